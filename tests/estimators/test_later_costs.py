"""Costs at the end of a chain: what an extra run tells of the last site corrects all earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import bias, trained
from torch import Tensor

from pyro_bpq import AllAction, TraceBackpropQ_ELBO
from pyro_bpq.graph.scg import cost_of_model
from pyro_bpq.step.signals import Signals

STATES, END = 3, cost_of_model("end")
COST = torch.tensor([0.0, 6.0, -4.0], dtype=torch.float64)

Program = Callable[[], Any]


def chain(sites: int) -> tuple[Program, Program, Program]:
    """Model, guide and a function that fills the parameters; the cost at the end reads the last site."""

    def params() -> None:
        pyro.clear_param_store()
        generator = torch.Generator().manual_seed(0)
        for t in range(sites):
            pyro.param(f"q_{t}", torch.randn(STATES, STATES, generator=generator, dtype=torch.float64))

    def guide() -> None:
        x = torch.tensor(0)
        for t in range(sites):
            x = pyro.sample(f"x_{t}", dist.Categorical(logits=pyro.param(f"q_{t}")[x]))

    def model() -> None:
        for t in range(sites):
            x = pyro.sample(f"x_{t}", dist.Categorical(logits=torch.zeros(STATES, dtype=torch.float64)))
        pyro.factor("end", -COST[x])

    return model, guide, params


def stepped(elbo: TraceBackpropQ_ELBO, sites: int, steps: int) -> TraceBackpropQ_ELBO:
    """After some steps in which the guide stands still."""
    model, guide, params = chain(sites)
    return trained(elbo, model, guide, params=params, steps=steps)


MANY: dict[str, Any] = {"num_particles": 4, "vectorize_particles": True, "max_plate_nesting": 0}


@pytest.mark.parametrize("options", [{}, MANY], ids=["1", "4"])
def test_a_cost_of_the_last_site_is_told_where_all_sites_gain(options: dict[str, Any]) -> None:
    plan = stepped(TraceBackpropQ_ELBO(estimator=AllAction(), **options), 6, 1).plan
    assert plan.flips is not None and dict(plan.flips.costs) == {"x_5": (END,)}


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_exact_costs_of_later_sites_count_in_full(sign: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside critics that have learned nothing."""
    plain = Signals.later

    def signed(self: Signals, c: int, shape: tuple[int, ...]) -> tuple[Tensor | None, Tensor | None]:
        learned, exact = plain(self, c, shape)
        return learned, None if exact is None else sign * exact

    monkeypatch.setattr(Signals, "later", signed)
    elbo = stepped(TraceBackpropQ_ELBO(estimator=AllAction(exact=True), **MANY), 6, 25)
    scales = torch.stack([elbo.info[f"x_{t}"]["scales"] for t in range(4)])
    used = scales[:, 4]
    # A wrong sign is seen: nothing is left of it.
    assert bool((used > 0.8).all()) if sign > 0.0 else bool((used < 0.2).all())


@pytest.mark.parametrize("steps", [1, 60])
@pytest.mark.parametrize("particles", [1, 2])
@pytest.mark.parametrize("alone", [False, True])
def test_with_or_without_critics_of_later_sites_it_is_unbiased(steps: int, particles: int, alone: bool) -> None:
    model, guide, params = chain(2)
    elbo = TraceBackpropQ_ELBO(num_particles=particles, estimator=AllAction(exact=True))
    trained(elbo, model, guide, params=params, steps=steps)
    with torch.no_grad():
        for name, tensor in elbo.critics.blocks.state_dict(keep_vars=True).items():
            if name.endswith("scales"):
                tensor[:, 3:] = torch.tensor([0.0, 1.0] if alone else [1.0, 0.7], dtype=tensor.dtype)
    assert bias(elbo.eval(), model, guide, params=params) < 1e-10
