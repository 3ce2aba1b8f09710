"""Subclasses that override hooks of Pyro's ELBOs are told, and ``elbo.traces`` gives what they want."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.infer.autoguide import AutoNormalMessenger
from pyro.optim import SGD, ClippedAdam
from steps import CoinModule, filtered, from_seed, repeat, seeing, stepped, told
from steps import pair_guide as guide
from steps import pair_model as model

from pyro_bpq import CompiledSVI, ExpectedCost, ProximalSVI, TraceBackpropQ_ELBO, TraceBackpropQ_IWAE, cost
from pyro_bpq.errors import BPQError, BPQWarning


def one() -> TraceBackpropQ_ELBO:
    """After a step."""
    return stepped(1, TraceBackpropQ_ELBO(num_particles=1), model, guide)


steered_model = partial(model, lambda z: 1.0 if z.item() else -1.0)


# Hooks that nothing calls.


def hook(self: Any, *_: Any) -> Any:
    raise AssertionError


class Keeps(TraceBackpropQ_ELBO):
    _get_trace = hook


class Logs:
    _get_traces = _differentiable_loss_particle = hook


class Bound(Logs, TraceBackpropQ_IWAE):
    pass


class Surrogate(ExpectedCost):
    _loss_and_surrogate_loss = hook


HOOKS = {
    Keeps: ["Keeps._get_trace"],
    Bound: ["Logs._differentiable_loss_particle", "Logs._get_traces"],
    Surrogate: ["Surrogate._loss_and_surrogate_loss"],
}


@pytest.mark.parametrize(("kind", "names"), HOOKS.items(), ids=lambda item: getattr(item, "__name__", ""))
def test_hooks_that_are_never_called_are_told_once(kind: Any, names: list[str]) -> None:
    with told(BPQWarning) as texts:
        kind()
    (text,) = texts
    assert text.startswith(f"{', '.join(names)} is never called") and "elbo.traces" in text


class Named(TraceBackpropQ_ELBO):
    """What is called may be overridden."""

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        self.was_called = True
        return super().loss_and_grads(model, guide, *args, **kwargs)

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Any:
        return super().differentiable_loss(model, guide, *args, **kwargs)

    def describe(self) -> str:
        return "mine"


def test_what_is_called_is_left_alone() -> None:
    with filtered("error"):
        for kind in (TraceBackpropQ_ELBO, TraceBackpropQ_IWAE, ExpectedCost, Named):
            kind()
        elbo = Named()
        SVI(model, guide, SGD({"lr": 0.1}), elbo).step()
    assert elbo.was_called


@pytest.mark.parametrize("loop", [CompiledSVI, ProximalSVI])
def test_loops_that_call_something_else_say_so(loop: Any) -> None:
    with pytest.warns(BPQWarning, match=f"Named.loss_and_grads is not called by {loop.__name__}"):
        loop(model, guide, SGD({"lr": 0.1}), Named())


# The traces of a step.


def sites_of(trace: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Values and log-probabilities."""
    sites = {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}
    return {name: (site["value"], site["log_prob_sum"]) for name, site in sites.items()}


OPTIONS: dict[str, dict[str, Any]] = {
    "one": {"num_particles": 1},
    "apart": {"num_particles": 3},
    "order": {"num_particles": 1, "structure": "dense"},
}


@pytest.mark.parametrize("program", [model, steered_model])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_traces_are_those_of_the_last_steps_first_particle(options: dict[str, Any], program: Any) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    for seed in range(5):
        from_seed(seed, elbo.loss_and_grads, program, guide)
        theirs = from_seed(seed, TraceGraph_ELBO()._get_trace, program, guide, (), {})
        ours, theirs = map(sites_of, elbo.traces), map(sites_of, theirs)
        for own, other in zip(ours, theirs, strict=True):
            assert list(own) == list(other)
            torch.testing.assert_close(own, other)


@pytest.mark.parametrize("kind", [TraceBackpropQ_ELBO, TraceBackpropQ_IWAE])
def test_particles_of_one_call_share_a_trace_as_in_pyro(kind: Any) -> None:
    model_trace, guide_trace = stepped(1, kind(num_particles=3, vectorize_particles=True), model, guide).traces
    assert guide_trace.nodes["z"]["value"].shape == (3,) == model_trace.nodes["x"]["log_prob"].shape


def test_traces_of_a_module_an_expected_cost_and_a_messenger() -> None:
    elbo = TraceBackpropQ_ELBO(num_particles=1)
    loss = elbo(seeing(lambda z: z), CoinModule())()
    of_model, of_guide = elbo.traces
    torch.testing.assert_close(of_guide.log_prob_sum() - of_model.log_prob_sum(), loss)

    def policy() -> None:
        cost("fee", 2.0 * pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3)))))

    costs = ExpectedCost(num_particles=1)
    found = costs.loss_and_grads(None, policy)
    assert 2.0 * float(costs.traces[1].nodes["z"]["value"]) == found

    def smooth() -> None:
        pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 1.0), obs=torch.tensor(0.7))

    elbo.loss_and_grads(smooth, AutoNormalMessenger(smooth))
    assert "z" in elbo.traces[1].nodes and "x" in elbo.traces[0].nodes


def test_evaluation_leaves_those_of_the_last_training_step() -> None:
    elbo = one()
    before = elbo.traces
    elbo.loss(model, guide)
    elbo.eval().loss_and_grads(model, guide)
    assert elbo.traces[0] is before[0]


def test_after_a_compiled_step_there_are_none() -> None:
    elbo = TraceBackpropQ_ELBO(num_particles=1)
    svi = CompiledSVI(model, guide, ClippedAdam({"lr": 0.01}), elbo, compile="eager")
    repeat(12, svi.step)
    assert elbo.compiled is not None
    with pytest.raises(BPQError, match="Compiled steps"):
        _ = elbo.traces


@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["open", *OPTIONS])
def test_copies_and_pickles_work_after_a_step_and_have_none(options: dict[str, Any]) -> None:
    elbo = stepped(1, TraceBackpropQ_ELBO(**options), model, guide)
    torch.save(elbo.state_dict(), io.BytesIO())
    for twin in (copy.deepcopy(elbo), pickle.loads(pickle.dumps(elbo))):
        with pytest.raises(BPQError, match="take a step first"):
            _ = twin.traces
        twin.loss_and_grads(model, guide)
        assert twin.traces[0] is not elbo.traces[0]


def test_the_next_step_lets_them_go_before_it_runs() -> None:
    elbo, alive = one(), []
    kept = weakref.ref(elbo.traces[0])

    def watching() -> None:
        gc.collect()
        alive.append(kept() is not None)
        model()

    elbo.loss_and_grads(watching, guide)
    assert not any(alive)
