"""Latent counts in compiled steps: their totals are numbers of the program, or data that may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import real
from steps import assert_recorded, coin_guide, recorded_and_eager, seeing, unbiased
from torch import Tensor

from pyro_bpq import AllAction, TraceBackpropQ_ELBO

ROWS = 3
LAWS: dict[str, Callable[[Any, Tensor], Any]] = {
    "binomial": lambda total, q: dist.Binomial(total, logits=q),
    "beta_binomial": lambda total, q: dist.BetaBinomial(q.exp(), 1.5, total),
}


DATA = real(1.0, 2.0, 0.0)


def programs(law: Callable[[Any, Tensor], Any]) -> tuple[Any, Any]:
    def model(total: Any) -> None:
        with pyro.plate("rows", ROWS):
            z = pyro.sample("z", law(total, torch.full((ROWS,), 0.2)))
            pyro.sample("x", dist.Normal(z, 1.0), obs=DATA)

    def guide(total: Any) -> None:
        with pyro.plate("rows", ROWS):
            pyro.sample("z", law(total, pyro.param("q", torch.tensor([0.3, -0.2, 0.1]))))

    return model, guide


# Totals of some steps, options, and how often they are recorded.
TOTALS: dict[str, tuple[list[Any], dict[str, Any], int]] = {
    "a number of the program, all values": ([5] * 10, {"num_particles": 1, "estimator": AllAction()}, 1),
    "a number of the program, two particles": ([5] * 10, {"num_particles": 2}, 1),
    "of each row": ([real(3.0 + step % 3, 4.0, 5.0) for step in range(10)], {"num_particles": 2}, 1),
    # One number in a tensor says how many values there are: each has its own recording.
    "a tensor": ([real(3.0 + n % 3)[0] for n in range(18)], {"num_particles": 1, "estimator": AllAction()}, 3),
}


@pytest.mark.parametrize("name", TOTALS)
@pytest.mark.parametrize("law", LAWS)
def test_counts_up_to_a_total_are_compiled(law: str, name: str) -> None:
    totals, options, number = TOTALS[name]
    calls = [(total,) for total in totals]
    assert_recorded(lambda: (*programs(LAWS[law]), calls), number, **options)


@pytest.mark.parametrize("total", [2, torch.tensor([2.0, 2.0, 2.0])], ids=["one", "own"])
def test_gradients_through_counts_are_exact(total: Any) -> None:
    model, guide = programs(LAWS["binomial"])
    unbiased(TraceBackpropQ_ELBO(num_particles=1), model, guide, total, steps=4)


@pytest.mark.filterwarnings("ignore:compile")
def test_a_program_that_catches_a_refused_read_is_not_recorded() -> None:
    """Its other branch would be taken in a recording, and in no step."""

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(0.4))
        try:
            scale = 1.0 + pyro.param("w", torch.tensor(2.0)).item()
        except Exception:
            scale = 1.0
        pyro.sample("x", dist.Normal(z, scale), obs=torch.tensor(0.7))

    *_, said = recorded_and_eager(lambda: (model, coin_guide, [()] * 8), num_particles=2)
    assert ".item()" in said


def test_numbers_of_the_program_itself_may_be_read() -> None:
    def model(shift: Tensor) -> None:
        z = pyro.sample("z", dist.Bernoulli(0.4))
        size = max(torch.tensor([0, int(torch.tensor([1, 2]).max())]).tolist())
        pyro.sample("x", dist.Normal(z + shift, 1.0).expand([size]).to_event(1), obs=torch.ones(size))

    calls = [(torch.tensor(0.1 * step),) for step in range(8)]
    assert_recorded(lambda: (model, coin_guide, calls), num_particles=1)


def test_what_is_written_by_way_of_another_tensor_is_read() -> None:
    def mean(z: Tensor, shift: Tensor) -> Tensor:
        kept = torch.zeros(2)
        whole = kept.view(2)
        kept[0].add_(shift)
        return z + float(whole[0])

    calls = [(torch.tensor(shift),) for shift in (0.3, 0.3, 0.3, 0.3, 0.7, 0.7, 0.3, 0.3)]
    assert_recorded(lambda: (seeing(mean), coin_guide, calls), 2, num_particles=1)
