"""Values that leave torch in a plate: one warning in the first step, and an advice that helps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import coin_guide, repeat, seeing, warnings_of
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO, cost, external
from pyro_bpq.diagnostics import gradient_moments
from pyro_bpq.testing import assert_unbiased

ROWS = 3
DATA = torch.tensor([0.3, 1.4, -0.2], dtype=torch.float64)


def guide(rows: int = ROWS) -> None:
    with pyro.plate("rows", rows):
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.linspace(-0.5, 0.5, rows))))


def simulated(z: Tensor) -> Tensor:
    return torch.from_numpy(2.0 * z.numpy())


SIMULATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "numpy": simulated,
    "item": lambda z: torch.tensor([2.0 if one.item() else 0.0 for one in z]),
    "list": lambda z: torch.tensor([2.0 * number for number in z.tolist()]),
}


def model(simulator: Callable[[Tensor], Tensor], data: Tensor = DATA) -> None:
    with pyro.plate("rows", len(data)):
        z = pyro.sample("z", dist.Bernoulli(0.4))
        pyro.sample("x", dist.Normal(simulator(z), 1.0), obs=data)


def as_cost(simulator: Callable[[Tensor], Tensor], data: Tensor = DATA) -> None:
    with pyro.plate("rows", len(data)):
        z = pyro.sample("z", dist.Bernoulli(0.4))
        cost("x", lambda value: -dist.Normal(simulator(value), 1.0).log_prob(data), z)


warned = partial(warnings_of, steps=3, category=Warning)


@pytest.mark.parametrize("simulator", SIMULATORS.values(), ids=SIMULATORS)
@pytest.mark.parametrize("particles", [None, 2])
def test_it_is_told_once_with_plate_sites_price_and_remedy(simulator: Any, particles: int | None) -> None:
    (text,) = warned(lambda: model(simulator), guide, num_particles=particles)
    remedies = "torch.where", "pyro_bpq.cost", "pyro_bpq.external"
    for words in ("Values of 'z'", "the plate 'rows'", "the costs of all 3 rows", *remedies):
        assert words in text


def test_values_that_stay_in_torch_or_in_a_cost_are_left_alone() -> None:
    assert not warned(lambda: model(lambda z: torch.tensor([0.0, 2.0])[z.long()]), guide)
    assert not warned(lambda: as_cost(simulated), guide)
    assert not warned(lambda: model(external(simulated)), guide)


def test_values_outside_of_plates_are_left_alone() -> None:
    assert not warned(seeing(float), coin_guide)


def test_reparameterised_values_are_left_alone() -> None:
    """Their gradients come through the values: nothing is charged to them."""

    def smooth(mean: Any) -> Tensor:
        with pyro.plate("rows", ROWS):
            return pyro.sample("y", dist.Normal(mean, 1.0))

    def checked() -> None:
        y = smooth(torch.zeros(ROWS))
        assert bool(y.isfinite().all())
        with pyro.plate("data", ROWS):
            pyro.sample("x", dist.Normal(y, 1.0), obs=DATA)

    assert not warned(checked, lambda: smooth(pyro.param("m", torch.zeros(ROWS))))


@pytest.mark.filterwarnings("ignore:Values of 'z', drawn in the plate 'rows', leave torch")
@pytest.mark.parametrize("program", [model, as_cost])
def test_both_are_unbiased(program: Any) -> None:
    elbo, run = TraceBackpropQ_ELBO(num_particles=1), lambda: program(simulated)
    repeat(10, elbo.loss_and_grads, run, guide)
    assert_unbiased(elbo.eval(), run, guide)


@pytest.mark.filterwarnings("ignore:Values of 'z', drawn in the plate 'rows', leave torch")
@pytest.mark.parametrize("advised", [as_cost, lambda simulator, data: model(external(simulator), data)])
def test_the_advice_takes_the_noise_of_other_rows_away(advised: Any) -> None:
    data = torch.linspace(-1.0, 2.0, 50)

    def variance(program: Any) -> float:
        pyro.clear_param_store()
        elbo, run = TraceBackpropQ_ELBO(num_particles=1), lambda: program(simulated, data)
        repeat(20, elbo.loss_and_grads, run, lambda: guide(50))
        return gradient_moments(elbo, run, lambda: guide(50), num_samples=100).total_variance

    assert 10.0 * variance(advised) < variance(model)
