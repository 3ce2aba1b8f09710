"""The number of steps counts with and without critics, and looks become rare with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import SGD

from pyro_bpq import ExpectedCost, TraceBackpropQ_ELBO, TraceBackpropQ_IWAE, cost

IN_A_PLATE: dict[str, Any] = {"vectorize_particles": True, "max_plate_nesting": 0}
OBJECTIVES: dict[str, Callable[[], Any]] = {
    "default": TraceBackpropQ_ELBO,
    "no critics": lambda: TraceBackpropQ_ELBO(critic=None),
    "in a plate": lambda: TraceBackpropQ_ELBO(8, critic=None, **IN_A_PLATE),
    "analytic": lambda: TraceBackpropQ_ELBO(num_particles=1, analytic_kl=True),
    "recorded": lambda: TraceBackpropQ_ELBO(num_particles=2, compile="eager"),
    "bound": lambda: TraceBackpropQ_IWAE(8),
    "bound of one": lambda: TraceBackpropQ_IWAE(1),
    "bound in a plate": lambda: TraceBackpropQ_IWAE(8, **IN_A_PLATE),
    "recorded bound": lambda: TraceBackpropQ_IWAE(8, compile="eager", **IN_A_PLATE),
}
LAWS: dict[str, Callable[[Any], Any]] = {
    "discrete": lambda q: dist.Bernoulli(logits=q),
    "counts": lambda q: dist.Poisson(torch.as_tensor(q).exp()),
    "reparameterised": lambda q: dist.Normal(q, 1.0),
}


def programs(law: Callable[[Any], Any]) -> tuple[Any, Any, list[int]]:
    runs: list[int] = []

    def model(step: int) -> None:
        runs.append(step)
        z = pyro.sample("z", law(torch.tensor(0.2)))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(0.7))

    def guide(step: int) -> None:
        pyro.sample("z", law(pyro.param("q", torch.tensor(0.3))))

    return model, guide, runs


def train(objective: Any, model: Any, guide: Any, steps: int) -> None:
    svi = SVI(model, guide, SGD({"lr": 1e-3}), objective)
    for step in range(steps):
        svi.step(step)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("law", LAWS)
def test_steps_count(law: str, name: str) -> None:
    objective = OBJECTIVES[name]()
    train(objective, *programs(LAWS[law])[:2], 6)
    assert objective.num_steps == 6


def test_steps_of_an_expected_cost_count() -> None:
    def guide(step: int) -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))))
        cost("c", lambda z: (z - 0.3) ** 2, z)

    objective = ExpectedCost(critic=None)
    train(objective, lambda step: None, guide, 6)
    assert objective.num_steps == 6


def test_evaluations_do_not_count() -> None:
    model, guide, _ = programs(LAWS["discrete"])
    for objective in (TraceBackpropQ_ELBO(), TraceBackpropQ_IWAE(8)):
        objective.loss(model, guide, 0)
        with torch.no_grad():
            objective.differentiable_loss(model, guide, 0)
        assert objective.num_steps == 0


@pytest.mark.parametrize("law", LAWS)
def test_a_step_of_a_bound_runs_the_model_once(law: str) -> None:
    """But for the looks after 1, 2, 4, ... steps, which compare particles with runs of one."""
    model, guide, runs = programs(LAWS[law])
    train(TraceBackpropQ_IWAE(8, **IN_A_PLATE), model, guide, 32)
    often = {step for step in runs if runs.count(step) > 1}
    assert often <= {0, 1, 2, 4, 8, 16} and set(runs) == set(range(32))
