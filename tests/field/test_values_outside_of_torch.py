"""Values that leave torch in a plate: one warning in the first step, and an advice that helps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import coin_guide, rows, seeing, trained, unbiased, warnings_of
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO, cost, external
from pyro_bpq.diagnostics import gradient_moments

ROWS = 3
DATA = torch.tensor([0.3, 1.4, -0.2], dtype=torch.float64)


def simulated(z: Tensor) -> Tensor:
    return torch.from_numpy(2.0 * z.numpy())


SIMULATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "numpy": simulated,
    "item": lambda z: torch.tensor([2.0 if one.item() else 0.0 for one in z]),
    "list": lambda z: torch.tensor([2.0 * number for number in z.tolist()]),
}


def as_cost(simulator: Callable[[Tensor], Tensor], data: Tensor) -> tuple[Any, Any]:
    def model() -> None:
        with pyro.plate("rows", len(data)):
            z = pyro.sample("z", dist.Bernoulli(0.4))
            cost("x", lambda value: -dist.Normal(simulator(value), 1.0).log_prob(data), z)

    return model, rows(simulator, data)[1]


warned = partial(warnings_of, steps=3, category=Warning)


@pytest.mark.parametrize("simulator", SIMULATORS.values(), ids=SIMULATORS)
@pytest.mark.parametrize("particles", [None, 2])
def test_it_is_told_once_with_plate_sites_price_and_remedy(simulator: Any, particles: int | None) -> None:
    (text,) = warned(*rows(simulator, DATA), num_particles=particles)
    remedies = "torch.where", "pyro_bpq.cost", "pyro_bpq.external"
    for words in ("Values of 'z'", "the plate 'rows'", "the costs of all 3 rows", *remedies):
        assert words in text


def test_values_that_stay_in_torch_or_in_a_cost_are_left_alone() -> None:
    for simulator in (lambda z: torch.tensor([0.0, 2.0])[z.long()], external(simulated)):
        assert not warned(*rows(simulator, DATA))
    assert not warned(*as_cost(simulated, DATA))


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
@pytest.mark.parametrize("make", [rows, as_cost])
def test_both_are_unbiased(make: Any) -> None:
    unbiased(TraceBackpropQ_ELBO(num_particles=1), *make(simulated, DATA), steps=10)


@pytest.mark.filterwarnings("ignore:Values of 'z', drawn in the plate 'rows', leave torch")
@pytest.mark.parametrize("advised", [as_cost, lambda simulator, data: rows(external(simulator), data)])
def test_the_advice_takes_the_noise_of_other_rows_away(advised: Any) -> None:
    def variance(make: Any) -> float:
        programs = make(simulated, torch.linspace(-1.0, 2.0, 50))
        elbo = trained(TraceBackpropQ_ELBO(num_particles=1), *programs, steps=20)
        return gradient_moments(elbo, *programs, num_samples=100).total_variance

    assert 10.0 * variance(advised) < variance(rows)
