"""REBAR, RELAX and the estimators with sampled Q: unbiased at a power where 2 % would show, and less noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from models import real
from problems import total_variance, worst_z, wrong_sign
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
from pyro_bpq.estimators.relaxation import score
from pyro_bpq.rollout.features import Components
from pyro_bpq.testing.contract import FakeProgram, Problem, gradient_of, with_statistics


def test_score_is_the_derivative_of_the_log_probability() -> None:
    logits, index = real(0.3, -0.7).requires_grad_(), torch.tensor([1, 0])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, index.double(), reduction="sum")
    torch.testing.assert_close(score(logits.detach(), index), -torch.autograd.grad(loss, logits)[0])
    # Log-probabilities are parameters themselves.
    assert score(real([0.1, 0.5, -0.3]).log_softmax(-1), torch.tensor([2])).tolist() == [[0.0, 0.0, 1.0]]


def problem(kind: str, particles: int = 1, **shape: Any) -> Problem:
    return Problem(kind, sites=1, particles=particles, **shape)


BITS = problem("bernoulli")
PROBLEMS = [BITS, problem("one_hot", size=1, cardinality=4, is_scalar=True), problem("one_hot", size=2, cardinality=3)]
ROWS, STEPS = 20_000, 150


def learned(given: Problem, estimator: Any) -> dict[str, Tensor]:
    """Statistics after some steps at fixed logits."""
    state: dict[str, Tensor] = {}
    for step in range(STEPS):
        made = with_statistics(estimator, given.context((64,), 8 + 2 * step)[0], step, state)
        state |= estimator.at(step)(made).statistics
    return state


def gradients(given: Problem, estimator: Any, state: dict[str, Tensor], calls: int = 12) -> Tensor:
    """Independent gradients of a row, mean over particles, ``(calls * ROWS, ...)``."""
    found = []
    for call in range(calls):
        made, logits = given.context((ROWS,), 100_000 + 2 * call)
        made = with_statistics(estimator, made, STEPS, state)
        found.append(gradient_of(estimator.at(STEPS), made, logits)[1][0].mean(0))
    return torch.cat(found)


def error_of(given: Problem, estimator: Any, state: dict[str, Tensor], calls: int = 12) -> float:
    return worst_z(given.exact_gradient()[0], gradients(given, estimator, state, calls))


ESTIMATORS = [
    *(REBAR(), REBAR(temperature=Annealed(), scale=0.7), RELAX(), RELAXQ(), CriticBaseline()),
    *(RELAXQ(Annealed(1.0, 0.2, 0.99), 0.8), QControlVariate(num_samples=2), QControlVariate(1, 0.6)),
]


@pytest.mark.parametrize("given", PROBLEMS, ids=["bernoulli", "one_hot", "one_hot_vector"])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_gradient_is_unbiased_with_a_trained_variate(estimator: Any, given: Problem) -> None:
    assert error_of(given, estimator, learned(given, estimator)) < 4


@pytest.mark.parametrize("estimator", [REBAR(), RELAX(), RELAXQ(), CriticBaseline(), QControlVariate()], ids=repr)
def test_gradient_of_several_particles_is_unbiased(estimator: Any) -> None:
    given = problem("bernoulli", particles=3)
    assert error_of(given, estimator, learned(given, estimator), calls=6) < 4


# Planted errors.


@dataclass(frozen=True)
class OwnValueInLevel(RELAXQ):
    """A control variate that the sample itself enters, not only its relaxation."""

    def __call__(self, context: SiteContext) -> SiteTerm:
        assert context.index is not None and context.level is not None
        own = context.index.sum(-1).to(context.cost.dtype)
        return super().__call__(replace(context, level=context.level + 0.1 * own))


@pytest.mark.parametrize(("fault", "honest"), [(wrong_sign(REBAR()), REBAR()), (OwnValueInLevel(), RELAXQ())])
def test_worst_z_sees_a_planted_bias(fault: Any, honest: Any) -> None:
    assert error_of(BITS, fault, learned(BITS, honest)) > 6


# Less noise.


def variance(given: Problem, estimator: Any) -> tuple[float, float]:
    """Total variance of a row's gradient with respect to free logits, and its standard error."""
    return total_variance(gradients(given, estimator, learned(given, estimator), calls=2))


def assert_below(left: tuple[float, float], right: tuple[float, float], factor: float = 1.0) -> None:
    """The variance is lower by more than four standard errors."""
    assert left[0] + 4 * math.hypot(left[1], factor * right[1]) < factor * right[0]


@pytest.mark.parametrize("given", PROBLEMS[:2], ids=["bernoulli", "one_hot"])
def test_rebar_is_below_the_score_function_with_its_best_baseline(given: Problem) -> None:
    assert_below(variance(given, REBAR()), variance(given, ScoreFunction(RunningBaseline())))


@pytest.mark.parametrize("kind", [RELAXQ, QControlVariate, CriticBaseline])
def test_optimal_scale_is_below_scale_one_with_a_poor_critic(kind: Any) -> None:
    # The critics of a problem say anything.
    optimal = variance(BITS, kind(scale=OptimalScale()))
    assert_below(optimal, variance(BITS, kind(scale=1.0)), 0.7)
    # And no worse than without a critic.
    without = variance(BITS, ScoreFunction(RunningBaseline()))
    assert optimal[0] < without[0] + 4 * math.hypot(optimal[1], without[1])


# By hand.


@pytest.mark.parametrize(("estimator", "runs"), [(RELAX(), 0), (REBAR(), 2)])
def test_relax_runs_nothing_and_rebar_twice(estimator: Any, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, cost = [], FakeProgram.cost
    made, _ = BITS.context((5,))
    monkeypatch.setattr(FakeProgram, "cost", lambda self, value: calls.append(value) or cost(self, value))
    estimator(with_statistics(estimator, made))
    assert len(calls) == runs


def test_network_does_not_see_the_step_that_it_corrects() -> None:
    state, found = learned(BITS, RELAX()), []
    for estimator in (RELAX(), RELAX(NetworkVariate(lr=0.5))):
        made, logits = BITS.context((5,))
        term, gradient = gradient_of(estimator, with_statistics(estimator, made, STEPS, state), logits)
        assert not torch.equal(term.statistics["phi"], state["phi"])
        found.append(gradient)
    assert torch.equal(*found)


def test_unsupported_sites_name_another_estimator() -> None:
    categorical = SiteInfo("z", "Categorical", False, Components("categorical", (), 3), 1)
    assert "OneHotCategorical" in (REBAR().unsupported(categorical) or "")
    assert RELAX().unsupported(categorical) is None
    assert "Pathwise()" in (RELAX().unsupported(SiteInfo("z", "Normal", True, None, 1)) or "")
