"""Operators that check values, where the program catches the error: what it learns steers it, error or not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import coin_guide, coins, recorded_and_eager, trained
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO, TraceBackpropQ_IWAE
from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.testing import assert_unbiased

# Each fails where z is 0, or where it is 1.
FAILING: dict[str, Callable[[Tensor], Any]] = {
    "cholesky": lambda z: torch.linalg.cholesky(torch.eye(2) * (z - 0.5)),
    "old cholesky": lambda z: torch.cholesky(torch.eye(2) * (z - 0.5)),
    "inverse": lambda z: torch.linalg.inv(torch.eye(2) * z),
    "old inverse": lambda z: torch.inverse(torch.eye(2) * z),
    "solve": lambda z: torch.linalg.solve(torch.eye(2) * z, torch.ones(2)),
    "singular values": lambda z: torch.linalg.svdvals(torch.eye(2) * torch.where(z > 0, torch.nan, 1.0)),
    "least squares": lambda z: torch.linalg.lstsq(torch.eye(2) * torch.where(z > 0, torch.nan, 1.0), torch.ones(2, 1)),
    "index": lambda z: torch.ones(1)[z.long()],
    "list of indices": lambda z: torch.ones(1, 1)[[z.long()], 0],
    "index_select": lambda z: torch.ones(1).index_select(0, z.long().reshape(1)),
    "gather": lambda z: torch.ones(1).gather(0, z.long().reshape(1)),
    "take": lambda z: torch.ones(1).take(z.long()),
    "embedding": lambda z: torch.nn.functional.embedding(z.long(), torch.ones(1, 2)),
    "scatter": lambda z: torch.zeros(1).scatter(0, z.long().reshape(1), 1.0),
    "index_add": lambda z: torch.zeros(1).index_add(0, z.long().reshape(1), torch.ones(1)),
    "index_put": lambda z: torch.zeros(1).index_put_((z.long(),), torch.ones(())),
    "nll_loss": lambda z: torch.nn.functional.nll_loss(torch.zeros(1, 1), z.long().reshape(1)),
    "one_hot": lambda z: torch.nn.functional.one_hot(z.long(), 1),
    "integer division": lambda z: torch.tensor(1) // z.long(),
    "remainder": lambda z: torch.tensor(1) % z.long(),
    "bincount": lambda z: torch.bincount(z.long().reshape(1) - 1),
    "repeat_interleave": lambda z: torch.ones(1).repeat_interleave(z.long().reshape(1) - 1),
    "masked_scatter": lambda z: torch.zeros(1).masked_scatter(z.bool().reshape(1), torch.ones(0)),
    "quantile": lambda z: torch.quantile(torch.ones(2), 2.0 * z),
    "async assertion": lambda z: torch._assert_async(z > 0),
    "multinomial": lambda z: torch.multinomial(z.reshape(1), 1),
    "normal": lambda z: torch.normal(torch.zeros(1), z.reshape(1) - 0.5),
    "conversion": lambda z: [0][int(z)],
    "validation": lambda z: dist.Normal(0.0, z - 0.5),
    "covariance": lambda z: dist.MultivariateNormal(torch.zeros(2), torch.eye(2) * (z - 0.5)),
    "support": lambda z: dist.Beta(1.0, 1.0).log_prob(2.0 * z),
}
DRAWS = ("multinomial", "normal")


def caught(read: Callable[[Tensor], Any], z: Tensor) -> float:
    try:
        read(z)
    except (RuntimeError, IndexError, ValueError):
        return 0.0
    return 1.0


def suppressed(read: Callable[[Tensor], Any], z: Tensor) -> float:
    with contextlib.suppress(RuntimeError, IndexError, ValueError):
        read(z)
        return 1.0
    return 0.0


def programs(learn: Callable[[Tensor], float]) -> tuple[Any, Any]:
    """The factor depends on nothing but what the program has learned of ``z``."""

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(0.4))
        pyro.factor("f", torch.tensor(2.0 * learn(z)))

    return model, coin_guide


def assert_seen(learn: Callable[[Tensor], float], number: int | None = 1) -> None:
    """Whichever value the first steps draw."""
    model, guide = programs(learn)
    for seed in range(4):
        elbo = trained(TraceBackpropQ_ELBO(num_particles=number), model, guide, steps=6, lr=0.01, seed=seed)
        assert_unbiased(elbo.eval(), model, guide)


@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
@pytest.mark.parametrize("name", FAILING)
def test_each_of_them_fails_at_one_value(name: str) -> None:
    assert {caught(FAILING[name], torch.tensor(value)) for value in (0.0, 1.0)} == {0.0, 1.0}


@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
@pytest.mark.parametrize("learn", [caught, suppressed])
@pytest.mark.parametrize("name", [name for name in FAILING if name not in DRAWS])
def test_a_branch_that_an_error_takes_is_seen_on_all_seeds(name: str, learn: Any) -> None:
    assert_seen(lambda z: learn(FAILING[name], z))


def test_open_numbers_of_particles_meet_such_branches() -> None:
    assert_seen(lambda z: caught(FAILING["cholesky"], z), None)


@pytest.mark.parametrize("name", ["cholesky", "index", "covariance", "validation"])
def test_a_program_that_catches_nothing_is_not_steered(name: str) -> None:
    """The same operators, at values where they do not fail: each cost keeps its own sites."""

    def model() -> None:
        z, w = (pyro.sample(name, dist.Bernoulli(0.4)) for name in "zw")
        FAILING[name](z * 0.0 if name == "index" else z * 0.0 + 1.0)
        try:
            weight = {"a": 1.0}["b"]
        except KeyError:
            weight = 0.5
        pyro.factor("f", weight * z)
        pyro.factor("g", 2.0 * w)

    elbo = trained(TraceBackpropQ_ELBO(num_particles=1), model, coins("z", "w"), steps=6, lr=0.01)
    parents = {cost.name: cost.parents for cost in elbo.graph.costs if cost.name[-2] in "fg"}
    assert parents == {"-log p(f)": ("z",), "-log p(g)": ("w",)}


def test_particles_at_once_are_refused_where_errors_are_caught() -> None:
    model, guide = programs(lambda z: caught(lambda z: z.sum(), z))
    elbo = TraceBackpropQ_ELBO(2, vectorize_particles=True, max_plate_nesting=0)
    with pytest.raises(UnsupportedProgramError, match="try"):
        trained(elbo, model, guide, steps=6, lr=0.01)


@pytest.mark.filterwarnings("ignore:compile")
def test_a_recording_freezes_no_branch() -> None:
    """The matrix is an argument: the first ones have a factor, later ones have none."""

    def model(matrix: Tensor) -> None:
        z = pyro.sample("z", dist.Bernoulli(0.4))
        pyro.factor("f", z * 2.0 * caught(torch.linalg.cholesky, matrix))

    calls = [(torch.eye(2) * (1.0 if step < 10 else -1.0),) for step in range(14)]
    compiled, eager, said = recorded_and_eager(lambda: (model, coin_guide, calls), num_particles=1)
    assert "catches errors" in said
    assert compiled == pytest.approx(eager, abs=1e-12)


def test_bounds_count_all_costs_anyway() -> None:
    model, guide = programs(lambda z: caught(FAILING["cholesky"], z))
    assert trained(TraceBackpropQ_IWAE(2), model, guide, steps=6, lr=0.01).num_steps == 6
