"""REBAR, RELAX and the estimators with sampled Q: unbiased at a power where 2 % would show, and less noise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import real
from problems import faulty, total_variance, worst_z, wrong_sign
from torch import Tensor

from pyro_bpq.estimators import (
    REBAR,
    RELAX,
    RELAXQ,
    Annealed,
    CriticBaseline,
    NetworkVariate,
    OptimalScale,
    QControlVariate,
    RunningBaseline,
    ScoreFunction,
)
from pyro_bpq.estimators.base import SiteContext, SiteInfo, SiteTerm
from pyro_bpq.estimators.relaxation import of_logits
from pyro_bpq.rollout.features import Components
from pyro_bpq.testing.contract import Problem, gradient_of, with_statistics


def test_slopes_are_those_of_free_logits() -> None:
    index = torch.tensor([1])
    assert of_logits(real(0.3), real(0.7), index).tolist() == [[-0.3, 0.3]]
    logits = real([0.1, 0.5, -0.3]).requires_grad_()
    slope, log_probs = real([0.2, -0.4, 0.9]), logits.log_softmax(-1)
    (wanted,) = torch.autograd.grad((slope * log_probs).sum(), logits)
    torch.testing.assert_close(of_logits(slope, log_probs.detach(), index), wanted)


PROBLEMS = {
    "bernoulli": Problem("bernoulli", 3, sites=1),
    "one_hot": Problem("one_hot", 1, 4, is_scalar=True, sites=1),
    "one_hot_vector": Problem("one_hot", 2, 3, sites=1),
}
ROWS, CALLS = 20_000, 12


def table_of(problem: Problem) -> Tensor:
    """A critic's table: for each value of a component the mean cost over the other components, less the mean cost."""
    index, chances = problem.outcomes(1)
    costs = problem.cost(problem.components.value(index[:, 0]).to(chances))
    mean, at = (chances[0] * costs).sum(), torch.nn.functional.one_hot(index[:, 0], problem.cardinality).to(chances)
    return torch.einsum("n,ndk->dk", chances[0] * (costs - mean), at) / torch.einsum("n,ndk->dk", chances[0], at)


# What the critic's table is multiplied by, and how far its level is wrong.
CRITIC = {"table": 1.0, "level": 0.1}


def contexts(name: str, estimator: Any, rows: int, seed: int, particles: int = 1) -> tuple[SiteContext, Tensor]:
    problem = replace(PROBLEMS[name], particles=particles)
    made, logits = problem.context((rows,), seed)
    known: dict[str, Any] = dict.fromkeys(("exact", "exact_cost", "correction", "exact_correction", "learned", "level"))
    if estimator.uses_critic:
        noise = torch.randn(made.cost.shape, generator=torch.Generator().manual_seed(seed))
        known |= {"learned": (CRITIC["table"] * table_of(problem)).expand(logits.shape)}
        known |= {"level": 1.8 + CRITIC["level"] * noise}
    return replace(made, **known), logits


def learned(name: str, estimator: Any, particles: int = 1, steps: int = 150) -> dict[str, Tensor]:
    """Statistics after some steps at fixed logits."""
    state: dict[str, Tensor] = {}
    for n in range(steps):
        made, _ = contexts(name, estimator, 64, 8 + 2 * n, particles)
        state |= estimator(with_statistics(estimator, made, n, state)).statistics
    return state


def gradients(name: str, estimator: Any, state: dict[str, Tensor], particles: int = 1, calls: int = CALLS) -> Tensor:
    """Independent gradients of a row, mean over particles, ``(calls * ROWS, ...)``."""
    found = []
    for call in range(calls):
        made, logits = contexts(name, estimator, ROWS, 100_000 + 2 * call, particles)
        found.append(gradient_of(estimator, with_statistics(estimator, made, 150, state), logits)[1][0].mean(0))
    return torch.cat(found)


def exact(name: str) -> Tensor:
    return PROBLEMS[name].exact_gradient()[0]


ESTIMATORS = [REBAR(), REBAR(temperature=Annealed(), scale=0.7), RELAX(), RELAXQ()]
ESTIMATORS += [RELAXQ(temperature=Annealed(1.0, 0.2, 0.99), scale=0.8), CriticBaseline()]
ESTIMATORS += [QControlVariate(num_samples=2), QControlVariate(num_samples=1, scale=0.6)]


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_gradient_is_unbiased_with_a_trained_variate(estimator: Any, name: str) -> None:
    state = learned(name, estimator)
    assert worst_z(exact(name), gradients(name, estimator, state)) < 4


@pytest.mark.parametrize("estimator", [REBAR(), RELAX(), RELAXQ(), CriticBaseline(), QControlVariate()], ids=repr)
def test_gradient_of_several_particles_is_unbiased(estimator: Any) -> None:
    state = learned("bernoulli", estimator, particles=3)
    assert worst_z(exact("bernoulli"), gradients("bernoulli", estimator, state, particles=3, calls=6)) < 4


# Planted errors.


def own_value_in_level(own: Any, context: SiteContext) -> SiteTerm:
    """A control variate that the sample itself enters, not only its relaxation."""
    return own(replace(context, level=context.level + 0.1 * context.index.sum(-1).to(context.cost)))


@pytest.mark.parametrize("is_sign", [True, False], ids=["wrong sign", "own value"])
def test_worst_z_sees_a_planted_bias(is_sign: bool) -> None:
    honest: Any = REBAR() if is_sign else RELAXQ()
    fault = wrong_sign(honest) if is_sign else faulty(honest, own_value_in_level)
    assert worst_z(exact("bernoulli"), gradients("bernoulli", fault, learned("bernoulli", honest))) > 6


# Less noise.


def variance(name: str, estimator: Any, particles: int = 1, steps: int = 300) -> tuple[float, float]:
    """Total variance of a row's gradient with respect to free logits, and its standard error."""
    return total_variance(gradients(name, estimator, learned(name, estimator, particles, steps), particles, calls=2))


def assert_below(left: tuple[float, float], right: tuple[float, float], factor: float = 1.0) -> None:
    """The variance is lower by more than four standard errors."""
    assert left[0] + 4 * math.hypot(left[1], factor * right[1]) < factor * right[0]


@pytest.mark.parametrize("name", ["bernoulli", "one_hot"])
def test_rebar_is_below_the_score_function_with_its_best_baseline(name: str) -> None:
    assert_below(variance(name, REBAR(), 1, 200), variance(name, ScoreFunction(RunningBaseline()), 1, 200))


@pytest.mark.parametrize("kind", [RELAXQ, QControlVariate, CriticBaseline])
def test_optimal_scale_is_below_scale_one_with_a_poor_critic(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CRITIC, "table", -3.0)
    monkeypatch.setitem(CRITIC, "level", 1.0)
    optimal = variance("bernoulli", kind(scale=OptimalScale()), 1, 200)
    assert_below(optimal, variance("bernoulli", kind(scale=1.0), 1, 200), 0.7)
    # And no worse than without a critic.
    without = variance("bernoulli", ScoreFunction(RunningBaseline()), 1, 200)
    assert optimal[0] < without[0] + 4 * math.hypot(optimal[1], without[1])


# By hand.


@pytest.mark.parametrize(("estimator", "number"), [(RELAX(), 0), (REBAR(), 2)], ids=repr)
def test_relax_runs_nothing_and_rebar_twice(estimator: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, cost = [], Problem.cost
    made, _ = contexts("bernoulli", estimator, 5, 0)
    monkeypatch.setattr(Problem, "cost", lambda self, value: calls.append(value.requires_grad) or cost(self, value))
    estimator(with_statistics(estimator, made))
    assert sum(calls) == number and bool(calls) == bool(number)


def test_network_does_not_see_the_step_that_it_corrects() -> None:
    state, found = learned("bernoulli", RELAX(), steps=20), []
    for estimator in (RELAX(), RELAX(NetworkVariate(lr=0.5))):
        made, logits = contexts("bernoulli", estimator, 5, 0)
        term, gradient = gradient_of(estimator, with_statistics(estimator, made, 20, state), logits)
        assert not torch.equal(term.statistics["phi"], state["phi"])
        found.append(gradient)
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_unsupported_sites_name_another_estimator() -> None:
    categorical = SiteInfo("z", "Categorical", False, Components("categorical", (), 3), 1)
    assert "OneHotCategorical" in (REBAR().unsupported(categorical) or "")
    assert RELAX().unsupported(categorical) is None
    assert "Pathwise()" in (RELAX().unsupported(SiteInfo("z", "Normal", True, None, 1)) or "")
