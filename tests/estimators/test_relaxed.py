"""REBAR, RELAX and the estimators with sampled Q: unbiased at a power where 2 % would show, and less noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from models import real
from problems import total_variance, worst_z, wrong_sign
from relaxed_problems import Problem, learned_statistics, next_step, width_of, with_initial
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


def test_slopes_are_those_of_free_logits() -> None:
    index = torch.tensor([1])
    assert of_logits(real(0.3), real(0.7), index).tolist() == [[-0.3, 0.3]]
    logits = real([0.1, 0.5, -0.3]).requires_grad_()
    slope, log_probs = real([0.2, -0.4, 0.9]), logits.log_softmax(-1)
    (wanted,) = torch.autograd.grad((slope * log_probs).sum(), logits)
    torch.testing.assert_close(of_logits(slope, log_probs.detach(), index), wanted)


def quadratic(value: Tensor) -> Tensor:
    """A cost without symmetry, of Bernoulli or one-hot values; its level is far from zero."""
    flat = value.flatten(-2) if value.dim() > 4 or (value.dim() == 3 and value.shape[-2:] == (2, 3)) else value
    weight = 0.9 * torch.cos(1.3 * torch.arange(flat.shape[-1]) + 0.2)
    return ((flat * weight).sum(-1) - 0.45) ** 2 + 0.3 * flat[..., 0] * flat[..., -1] + 2.0


PROBLEMS = {
    "bernoulli": Problem(Components("bernoulli", (3,), 2), real(0.4, -0.8, 1.1), quadratic),
    "one_hot": Problem(Components("one_hot", (), 4), real([0.4, -0.8, 1.1, 0.1]), quadratic),
    "one_hot_vector": Problem(Components("one_hot", (2,), 3), real([0.4, -0.8, 1.1], [0.9, 0.2, -0.3]), quadratic),
}
TABLE = {
    "bernoulli": real([0.1, 0.9], [0.3, -0.2], [0.0, 0.6]),
    "one_hot": real([0.6, -0.1, 0.4, 0.2]),
    "one_hot_vector": real([0.6, -0.1, 0.4], [0.2, 0.5, -0.3]),
}
# What the critic's level is wrong by.
NOISE = {"level": 0.1}
ROWS, CALLS = 20_000, 12


def contexts(name: str, estimator: Any, rows: int, seed: int, particles: int) -> tuple[SiteContext, Tensor]:
    problem = PROBLEMS[name]
    made, logits = problem.context(rows, seed, particles)
    if estimator.uses_critic:
        table = TABLE[name].expand(*made.cost.shape, *TABLE[name].shape)
        noise = torch.randn(made.cost.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        made = replace(made, learned=table, level=1.8 + NOISE["level"] * noise)
    return made, logits


def learned(name: str, estimator: Any, particles: int = 1, steps: int = 150) -> dict[str, Tensor]:
    """Statistics after some steps at fixed logits."""
    width = width_of(PROBLEMS[name].components)
    return learned_statistics(estimator, lambda n: contexts(name, estimator, 64, 8 + 2 * n, particles)[0], width, steps)


def gradients(name: str, estimator: Any, state: dict[str, Tensor], particles: int = 1, calls: int = CALLS) -> Tensor:
    """Independent gradients of a row, mean over particles, ``(calls * ROWS, ...)``."""
    found = []
    for call in range(calls):
        made, logits = contexts(name, estimator, ROWS, 100_000 + 2 * call, particles)
        term = estimator(next_step(made, state, 150))
        found.append(torch.autograd.grad(term.surrogate.sum(), logits)[0][0].mean(0))
    return torch.cat(found)


ESTIMATORS = [
    REBAR(),
    REBAR(temperature=Annealed(), scale=0.7),
    RELAX(),
    RELAXQ(),
    RELAXQ(temperature=Annealed(1.0, 0.2, 0.99), scale=0.8),
    CriticBaseline(),
    QControlVariate(num_samples=2),
    QControlVariate(num_samples=1, scale=0.6),
]


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_gradient_is_unbiased_with_a_trained_variate(estimator: Any, name: str) -> None:
    state = learned(name, estimator)
    assert worst_z(PROBLEMS[name].exact(), gradients(name, estimator, state)) < 4


@pytest.mark.parametrize("estimator", [REBAR(), RELAX(), RELAXQ(), CriticBaseline(), QControlVariate()], ids=repr)
def test_gradient_of_several_particles_is_unbiased(estimator: Any) -> None:
    state = learned("bernoulli", estimator, particles=3)
    assert worst_z(PROBLEMS["bernoulli"].exact(), gradients("bernoulli", estimator, state, particles=3, calls=6)) < 4


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
    assert worst_z(PROBLEMS["bernoulli"].exact(), gradients("bernoulli", fault, learned("bernoulli", honest))) > 6


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
    monkeypatch.setitem(TABLE, "bernoulli", -3.0 * TABLE["bernoulli"])
    monkeypatch.setitem(NOISE, "level", 1.0)
    optimal = variance("bernoulli", kind(scale=OptimalScale()), 1, 200)
    assert_below(optimal, variance("bernoulli", kind(scale=1.0), 1, 200), 0.7)
    # And no worse than without a critic.
    without = variance("bernoulli", ScoreFunction(RunningBaseline()), 1, 200)
    assert optimal[0] < without[0] + 4 * math.hypot(optimal[1], without[1])


# By hand.


def test_relax_runs_nothing_and_rebar_twice() -> None:
    for estimator, calls in ((RELAX(), 0), (REBAR(), 2)):
        made, _ = PROBLEMS["bernoulli"].context(5, 0)
        estimator(with_initial(estimator, made, 3))
        assert len(made.program.calls) == calls


def test_network_does_not_see_the_step_that_it_corrects() -> None:
    made, logits = PROBLEMS["bernoulli"].context(5, 0)
    state = learned("bernoulli", RELAX(), steps=20)
    term = RELAX()(next_step(made, state, 20))
    assert not torch.equal(term.statistics["phi"], state["phi"])
    again = replace(made, signals={"program": replace(made.program)})
    other = RELAX(NetworkVariate(lr=0.5))(next_step(again, state, 20))
    found = [torch.autograd.grad(t.surrogate.sum(), logits, retain_graph=True)[0] for t in (term, other)]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_unsupported_sites_name_another_estimator() -> None:
    categorical = SiteInfo("z", "Categorical", False, Components("categorical", (), 3), 1)
    assert "OneHotCategorical" in (REBAR().unsupported(categorical) or "")
    assert RELAX().unsupported(categorical) is None
    assert "Pathwise()" in (RELAX().unsupported(SiteInfo("z", "Normal", True, None, 1)) or "")
