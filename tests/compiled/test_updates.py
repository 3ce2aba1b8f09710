"""Parameters that a compiled step updates: those that an eager one would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.optim import Adam, ClippedAdam
from steps import filtered, fresh, no_gradients, repeat

from pyro_bpq import CompiledSVI, TraceBackpropQ_ELBO, compile_report
from pyro_bpq.errors import BPQWarning

X = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64)


class Settings:
    """What a schedule sets."""

    beta = 1.0


def model(x: Any) -> None:
    x = torch.as_tensor(x)
    w = pyro.param("w", torch.tensor([0.5, 1.0]))
    with pyro.plate("d", len(x)), poutine.scale(scale=Settings.beta):
        z = pyro.sample("z", dist.Bernoulli(0.3))
        pyro.sample("x", dist.Normal(w[0] + w[1] * z, 1.0), obs=x)


def guide(x: Any) -> None:
    x = torch.as_tensor(x)
    q = pyro.param("q", torch.tensor([0.2, -0.3]))
    with pyro.plate("d", len(x)):
        pyro.sample("z", dist.Bernoulli(logits=q[0] + q[1] * x))


def _set() -> None:
    pyro.get_param_store()["w"] = torch.tensor([2.0, 0.0])


def _reload() -> None:
    store = pyro.get_param_store()
    store.set_state(store.get_state())


@pytest.mark.parametrize("optim", [Adam, ClippedAdam])
@pytest.mark.parametrize(("change", "often"), [(_set, False), (_reload, False), (no_gradients, True)])
def test_parameters_go_on_learning_as_in_svi(change: Callable[[], None], often: bool, optim: Any) -> None:
    found = []
    for is_compiled in (False, True):
        fresh(1)
        elbo = TraceBackpropQ_ELBO(num_particles=2)
        made = CompiledSVI(model, guide, optim({"lr": 0.05}), elbo, compile="eager")
        svi: Any = made if is_compiled else SVI(model, guide, optim({"lr": 0.05}), elbo)
        for step in range(26):
            if often or step == 16:
                change()
            svi.step(X)
        found.append(torch.cat([pyro.param("w").detach(), pyro.param("q").detach()]))
        if is_compiled:
            assert "updates 2 parameters" in str(compile_report(elbo))
    # A compiled step sums in another order; a parameter that stays behind is off by more than 0.01.
    assert torch.allclose(*found, rtol=0.0, atol=1e-10)


def test_plain_attributes_of_classes_are_a_part_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for make in (SVI, lambda *args: CompiledSVI(*args, compile="eager")):
        fresh(1)
        monkeypatch.setattr(Settings, "beta", 1.0)
        svi = make(model, guide, Adam({"lr": 0.05}), TraceBackpropQ_ELBO(num_particles=2))
        with filtered("error", BPQWarning):
            own = [svi.step(X) for _ in range(12)]
            monkeypatch.setattr(Settings, "beta", 0.5)
            losses.append([*own, *(svi.step(X) for _ in range(12))])
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)


def test_new_arrays_in_each_call_run_eagerly_and_are_named() -> None:
    data = numpy.random.RandomState(0).randn(30, 3)
    elbo = TraceBackpropQ_ELBO(num_particles=2)
    svi = CompiledSVI(model, guide, Adam({"lr": 0.01}), elbo, compile="eager")
    with pytest.warns(BPQWarning, match=r"args\[0\] is a new array of numpy in each call; hand over torch.as_tensor"):
        for row in data:
            svi.step(row)
    assert elbo.compiled is not None and not elbo.compiled.entries
    repeat(12, svi.step, row)
    assert elbo.compiled.entries
