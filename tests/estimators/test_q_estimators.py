"""Q in the place of the costs: right with an exact critic, off with a wrong one; and the baselines by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import BY_NAME
from steps import CHAIN, largest_error, settled
from test_contract import context
from torch import Tensor

from pyro_bpq import TabularCritic
from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators import (
    QRELAX,
    CriticBaseline,
    QAdvantage,
    QAllAction,
    QControlVariate,
    QRelaxation,
    QScoreFunction,
)
from pyro_bpq.estimators.base import SiteContext
from pyro_bpq.testing import expected_gradient
from pyro_bpq.testing.contract import Problem, gradient_of, with_statistics

LOCAL = [QAllAction(), QScoreFunction(), QAdvantage()]


def trained_on_chain(estimator: Any, steps: int) -> dict[str, Tensor]:
    """The expected gradient after some steps at fixed parameters."""
    elbo = settled(CHAIN, steps, estimator=estimator, critic=TabularCritic(), lam=0.0)
    return expected_gradient(elbo.eval(), *CHAIN.programs)


@pytest.mark.parametrize("estimator", [CriticBaseline(), CriticBaseline(scale=0.7)], ids=repr)
def test_critic_baseline_is_unbiased_with_a_trained_critic(estimator: Any) -> None:
    assert largest_error(CHAIN.exact(), trained_on_chain(estimator, 100)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("estimator", LOCAL, ids=repr)
def test_local_cost_approaches_the_gradient_as_the_critic_learns(estimator: Any) -> None:
    truth, found = CHAIN.exact(), trained_on_chain(estimator, 2000)
    scale = max(float(g.abs().max()) for g in truth.values())
    # Biased all the same.
    assert 1e-8 < max(float((found[name] - truth[name]).abs().max()) / scale for name in ("qa", "qb")) < 0.1


def test_sum_over_values_and_its_sampled_forms_have_one_mean() -> None:
    # The same draws, so the same critic.
    case = BY_NAME["constrained"]
    elbos = [settled(case, 20, estimator=estimator).eval() for estimator in LOCAL]
    found = [expected_gradient(elbo, *case.programs)["qk"] for elbo in elbos]
    assert float(found[0].abs().max()) > 1e-3
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("estimator", [*LOCAL, QRelaxation(), QRELAX()], ids=repr)
def test_sites_without_a_critic_say_so(estimator: Any) -> None:
    made, _ = context()
    bare = with_statistics(estimator, replace(made, learned=None, level=None, exact=None, exact_cost=None))
    with pytest.raises(UnsupportedSiteError, match=r"'a', 'b'.*no critic"):
        estimator(bare)
    # Where the immediate costs are all there is, nothing is missing.
    whole = replace(made, learned=None, level=None, exact_cost=made.cost)
    assert bool(estimator(with_statistics(estimator, whole)).surrogate.any())


def test_control_variate_with_many_samples_is_the_all_action_sum() -> None:
    made, logits = context(particles=2)
    # In the first step the other particles are all that is known.
    made = with_statistics(QControlVariate(), made, 0.0)
    found = gradient_of(QControlVariate(num_samples=3000, scale=1.0), made, logits)[1]
    made, logits = context(particles=2)
    # Of several components, the costs of one at the values of the others are left out.
    table, index = torch.as_tensor(made.learned), torch.as_tensor(made.index)
    rest = made.cost - made.level - table.gather(-1, index.unsqueeze(-1)).sum((-1, -2))
    surrogate = 2.0 * (rest - rest.mean(1, keepdim=True)) * made.score + (made.log_probs.exp() * table).sum((-1, -2))
    (right,) = torch.autograd.grad(surrogate.sum(), logits)
    assert float((found - right).abs().max()) < 0.15 < float(found.abs().max())


def coin(seed: int, q: tuple[float, float] = (-0.4, 1.3), rows: int = 100_000) -> tuple[SiteContext, Tensor]:
    """Coins of an exact critic, and the leaf of their logits."""
    made, leaf = Problem("bernoulli", size=1, is_scalar=True, sites=1, particles=1).context((rows,), seed)
    # What the run cost is far from what the critic says: it must not matter.
    signals = {**made.signals, "q_value": 2.0 + torch.tensor(q)[made.index].squeeze(-1)}
    known = {"learned": torch.tensor(q).expand_as(leaf), "level": torch.full_like(made.cost, 2.0), "signals": signals}
    return replace(made, exact=None, exact_cost=None, correction=None, exact_correction=None, **known), leaf


def mean_and_error(estimator: Any, made: SiteContext, leaf: Tensor) -> tuple[float, float]:
    """Of the gradient to the logit of the value one, and its standard error."""
    found = gradient_of(estimator, with_statistics(estimator, made), leaf)[1][..., 1]
    return float(found.mean()), float(found.std()) / found.numel() ** 0.5


P = float(Problem(size=1, sites=1).logits().softmax(-1)[..., 1])
TRUTH = 1.7 * P * (1.0 - P)


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, 0.358), (1.0, 0.280)])
def test_the_relaxation_is_biased_with_an_exact_critic(temperature: float, expected: float) -> None:
    made, leaf = coin(3)
    mean, error = mean_and_error(QRelaxation(temperature), made, leaf)
    assert abs(mean - expected) < 4 * error + 5e-4 and TRUTH - mean > 20 * error


@pytest.mark.parametrize(
    ("estimator", "noise"),
    [
        *((QAllAction(), 0.0), (QScoreFunction(), 2.0), (QAdvantage(), 1.0), (QRELAX(), 1.0)),
        *((QRELAX(temperature=1.0, scale=1.0), 1.0), (QRELAX(scale=0.0), 2.0)),
    ],
    ids=repr,
)
def test_with_an_exact_critic_local_costs_have_the_gradient_of_q(estimator: Any, noise: float) -> None:
    mean, error = mean_and_error(estimator, *coin(3))
    assert error < 0.01 * TRUTH * (noise + 0.1) and abs(mean - TRUTH) < 4 * error + 1e-6
