"""Credit per component of a vector site: by the extra run for immediate costs, by what elements read for later ones."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch

from pyro_bpq import AllAction, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.testing import assert_unbiased, expected_moments

SIZE = 3
DATA = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
Program = Callable[[], None]


def coins(name: str, logits: torch.Tensor, rows: pyro.plate | None) -> torch.Tensor:
    if rows is None:
        return pyro.sample(name, dist.Bernoulli(logits=logits).to_event(1))
    with rows:
        return pyro.sample(name, dist.Bernoulli(logits=logits))


def normal(loc: torch.Tensor, rows: pyro.plate | None) -> None:
    if rows is None:
        pyro.sample("data", dist.Normal(loc, 0.5).to_event(1), obs=DATA)
        return
    with rows:
        pyro.sample("data", dist.Normal(loc, 0.5), obs=DATA)


def programs(is_deep: bool, in_plate: bool) -> tuple[Program, Program]:
    """An elementwise model with one or two layers of coins."""

    def model() -> None:
        rows = pyro.plate("rows", SIZE) if in_plate else None
        z = coins("z", torch.zeros(SIZE), rows)
        if is_deep:
            z = coins("y", z - 0.5, rows)
        normal(2.0 * z - 0.3, rows)

    def guide() -> None:
        rows = pyro.plate("rows", SIZE) if in_plate else None
        z = coins("z", pyro.param("q_z", torch.tensor([0.3, -0.4, 0.9])), rows)
        if is_deep:
            coins("y", pyro.param("q_y", torch.tensor([0.5, -0.2, 0.1])) + z, rows)

    return model, guide


def variance(is_deep: bool, in_plate: bool, estimator: AllAction | ScoreFunction, structure: str = "auto") -> float:
    pyro.clear_param_store()
    elbo = TraceBackpropQ_ELBO(estimator=estimator, critic=None, structure=structure).eval()
    model, guide = programs(is_deep, in_plate)
    assert_unbiased(elbo, model, guide, atol=1e-10)
    return float(expected_moments(elbo, model, guide).variance["q_z"].sum())


def test_immediate_costs_are_split_by_component_by_the_extra_run() -> None:
    assert variance(False, False, ScoreFunction()) > 1.0
    assert variance(False, False, AllAction()) < 1e-20


def test_later_costs_are_split_as_by_a_plate() -> None:
    apart, joined = variance(True, True, ScoreFunction()), variance(True, False, ScoreFunction())
    assert abs(joined - apart) < 1e-9 * apart
    # What the tables of the later site correct is not split: a plate does better there, one cost for all does worse.
    split, whole = variance(True, False, AllAction()), variance(True, False, AllAction(), structure="dense")
    assert variance(True, True, AllAction()) < split < 0.9 * whole
