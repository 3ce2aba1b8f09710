"""Programs whose structure changes between steps, in ways that arguments show: no step is biased."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import coins, filtered, fitted, rows
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.testing import assert_unbiased

X = torch.tensor([0.3, -1.2], dtype=torch.float64)
OPTIONS: list[dict[str, Any]] = [{}, {"num_particles": 1}, {"num_particles": 2}]


def _stays_unbiased(model: Any, guide: Any, phases: Sequence[tuple[Any, int]], **options: Any) -> TraceBackpropQ_ELBO:
    """Takes so many steps with each argument in turn; the gradient is exact before and after each."""
    elbo = TraceBackpropQ_ELBO(**options)

    def calls() -> Iterator[tuple[Any]]:
        for arg, steps in phases:
            yield from [(arg,)] * steps
            assert_unbiased(copy.deepcopy(elbo).eval(), model, guide, arg)

    return fitted(elbo, model, guide, calls())


def _line(z: Tensor) -> Tensor:
    w = pyro.param("w", torch.tensor([0.5, 1.0]))
    return w[0] + w[1] * z


@pytest.mark.parametrize("options", [*OPTIONS, {"num_particles": 2, "vectorize_particles": True}])
def test_rows_that_meet_from_one_flag_to_the_next(options: dict[str, Any]) -> None:
    """The run before was tracked as well, since its flag was new."""

    programs = rows(lambda z, flag: _line(z) + (0.3 * z.sum() if flag == 2 else 0.0), X)
    _stays_unbiased(*programs, [(0, 20), (1, 1), (2, 1), (2, 1), (2, 5), (0, 1)], **options)


@pytest.mark.parametrize("options", OPTIONS[:2])
@pytest.mark.parametrize("law", ["Geometric", "Poisson", "Categorical"])
def test_another_law_of_a_latent_site_is_another_structure(law: str, options: dict[str, Any]) -> None:
    parameter = torch.ones(3) / 3.0 if law == "Categorical" else torch.tensor(0.4)
    laws = [dist.Bernoulli(0.3), getattr(dist, law)(parameter)]

    def model(kind: int) -> None:
        with pyro.plate("rows", len(X)):
            pyro.sample("x", dist.Normal(_line(pyro.sample("z", laws[kind])), 1.0), obs=X)

    _stays_unbiased(model, rows(_line, X)[1], [(0, 15), (1, 1), (1, 5)], **options)


@pytest.mark.parametrize("first", [False, True])
def test_a_site_that_is_reparameterised_in_some_calls_only(first: bool) -> None:
    def law(is_normal: bool, q: Any) -> Any:
        return (dist.Normal(q, 1.0) if is_normal else dist.Poisson(q.exp())).to_event(1)

    def model(is_normal: bool) -> None:
        z = pyro.sample("z", law(is_normal, torch.full((2,), 0.6)))
        pyro.factor("f", -((pyro.param("w", torch.tensor(0.7)) * z.sum(-1) - 1.0) ** 2))

    def guide(is_normal: bool) -> None:
        pyro.sample("z", law(is_normal, pyro.param("q", torch.tensor([0.3, 0.2]))))

    elbo = TraceBackpropQ_ELBO(num_particles=2)
    for is_normal in [first] * 5 + [not first] * 4 + [first] * 2:
        elbo.loss_and_grads(model, guide, is_normal)
        assert ("Pathwise" in str(elbo.plan)) == is_normal


def test_a_step_count_among_the_arguments_makes_looks_more_frequent() -> None:
    def model(step: int) -> None:
        w = pyro.param("w", torch.tensor([0.5, 1.0]))
        z = [pyro.sample(f"z{i}", dist.Bernoulli(0.3)) for i in range(2)]
        pyro.sample("x0", dist.Normal(w[0] + w[1] * z[0], 1.0), obs=X[0])
        pyro.sample("x1", dist.Normal(w[0] + w[1] * z[1] * (1.0 if step < 250 else z[0]), 1.0), obs=X[1])

    elbo, guide = TraceBackpropQ_ELBO(num_particles=1), coins("z0", "z1")
    with filtered("ignore"):
        for step in range(350):
            elbo.loss_and_grads(model, guide, step)
    assert_unbiased(elbo.eval(), model, guide, 350)
