"""Recorded steps of several objectives, in a fork, in the background, and of a program that begins to branch."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import coin_guide, from_seed, repeat, seeing, told, trained

from pyro_bpq import Compile, TraceBackpropQ_ELBO, compile_report
from pyro_bpq.errors import BPQWarning

OBSERVED = torch.tensor(0.7)


def program(name: str, width: int) -> tuple[Any, Any]:
    """A model and a guide whose sites and parameters carry a name."""

    def model() -> None:
        z = pyro.sample(f"{name}_z", dist.Bernoulli(torch.full((width,), 0.4)).to_event(1))
        pyro.sample(f"{name}_x", dist.Normal(z.sum(-1), 1.0), obs=OBSERVED)

    def guide() -> None:
        q = pyro.param(f"{name}_q", torch.full((width,), 0.3))
        pyro.sample(f"{name}_z", dist.Bernoulli(logits=q).to_event(1))

    return model, guide


def test_two_objectives_in_turn_go_on_as_each_does_alone() -> None:
    programs = {"a": program("a", 1), "b": program("b", 3)}

    def losses(compiled: Any, names: str) -> list[float]:
        pyro.clear_param_store()
        elbos = {name: TraceBackpropQ_ELBO(compile=compiled) for name in programs}
        found = []
        for step in range(12):
            for name in names:
                found.append(from_seed(step, elbos[name].loss_and_grads, *programs[name]))
        assert not compiled or all(elbos[name].compiled.entries[0].steps > 3 for name in names)
        return found

    together = losses("eager", "ab")
    assert together == pytest.approx(losses(False, "ab"), abs=1e-9)
    assert together[::2] == pytest.approx(losses("eager", "a"), abs=1e-9)
    assert together[1::2] == pytest.approx(losses("eager", "b"), abs=1e-9)


class Hidden:
    """State of a program."""

    branches = False


def test_a_program_that_begins_to_branch_runs_eagerly_at_once() -> None:
    hidden = Hidden()
    model = seeing(lambda z: 2.0 * z if hidden.branches and z > 0 else z)
    elbo = trained(TraceBackpropQ_ELBO(compile="eager"), model, coin_guide, steps=20)
    (entry,) = elbo.compiled.entries
    recorded = entry.steps
    assert recorded > 10
    hidden.branches = True
    with told(BPQWarning) as texts:
        repeat(5, elbo.loss_and_grads, model, coin_guide)
    assert any("sampled values of z steer Python" in text for text in texts), texts
    # The attribute belongs to the call, which is of another kind now: its first step looks at the structure.
    assert entry.steps == recorded and "eagerly" in compile_report(elbo)


def losses_of_a_fork_and_of_its_parent() -> tuple[list[float], list[float]]:
    elbo, programs = TraceBackpropQ_ELBO(compile="eager"), program("a", 2)
    repeat(8, elbo.loss_and_grads, *programs)
    assert elbo.compiled.entries[0].steps > 1
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = " ".join(f"{loss:.17g}" for loss in from_seed(5, repeat, 3, elbo.loss_and_grads, *programs))
            os.write(writer, text.encode())
        finally:
            os._exit(0)
    os.close(writer)
    own = from_seed(5, repeat, 3, elbo.loss_and_grads, *programs)
    with os.fdopen(reader) as pipe:
        theirs = [float(word) for word in pipe.read().split()]
    os.waitpid(child, 0)
    return theirs, own


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_goes_on_with_the_recording() -> None:
    # In a process of its own: in a fork of one whose autograd has started threads, torch refuses every backward.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        theirs, own = pool.apply_async(losses_of_a_fork_and_of_its_parent).get(timeout=100)
    assert len(own) == 3 and theirs == own


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_recorded_steps_go_on_while_a_thread_compiles(fails: bool, is_long: bool, monkeypatch: Any) -> None:
    if is_long:
        monkeypatch.setattr("pyro_bpq.compiled.backends._LONG", 0)
    released, runs = threading.Event(), []

    def backend(graph: Any, examples: Any) -> Any:
        assert released.wait(60.0)
        if fails:
            raise RuntimeError("no such kernel")

        def run(*tensors: Any) -> Any:
            runs.append(threading.current_thread())
            return graph(*tensors)

        return run

    elbo = TraceBackpropQ_ELBO(1, compile=Compile(backend, background=None if is_long else True))
    programs = program("background", 2)

    losses = repeat(12, elbo.loss_and_grads, *programs)
    (entry,) = elbo.compiled.entries
    assert not entry.is_ready and entry.steps > 0 and not runs and elbo.num_steps == 12
    assert "being compiled, the recorded operators run as they are meanwhile" in compile_report(elbo)
    before = entry.steps
    with told() as texts:
        released.set()
        entry.thread.join(60.0)
    assert ["the compiler failed (no such kernel)" in text for text in texts] == [True] * fails
    losses += repeat(5, elbo.loss_and_grads, *programs)
    assert losses == pytest.approx([1.0] * 17, abs=20.0)
    assert entry.steps == before + 5 and elbo.num_steps == 17
    # The thread's own run is the first one.
    assert len(runs) == (0 if fails else 6)
    assert ("the compiler failed" in compile_report(elbo)) == fails
