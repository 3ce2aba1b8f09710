"""Q in the place of the costs: right with an exact critic, off with a wrong one; and the baselines by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyro
import pytest
import torch
from models import BY_NAME
from problems import FakeProgram
from steps import no_gradients, trained
from test_contract import context

from pyro_bpq import TabularCritic, TraceBackpropQ_ELBO
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
from pyro_bpq.rollout.features import Components
from pyro_bpq.testing import exact_gradient, expected_gradient
from pyro_bpq.testing.contract import with_statistics

LOCAL = [QAllAction(), QScoreFunction(), QAdvantage()]


def expected(estimator: Any, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    case = BY_NAME["chain"].params()
    truth = exact_gradient(case.model, case.guide)
    case.params()
    pyro.set_rng_seed(0)
    elbo = TraceBackpropQ_ELBO(estimator=estimator, critic=TabularCritic(), lam=0.0)
    for _ in range(steps):
        elbo.loss_and_grads(case.model, case.guide)
        no_gradients()
    elbo.eval()
    return truth, expected_gradient(elbo, case.model, case.guide)


@pytest.mark.parametrize("estimator", [CriticBaseline(), CriticBaseline(scale=0.7)], ids=repr)
def test_critic_baseline_is_unbiased_with_a_trained_critic(estimator: Any) -> None:
    truth, found = expected(estimator, 100)
    for name, gradient in truth.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", LOCAL, ids=repr)
def test_local_cost_approaches_the_gradient_as_the_critic_learns(estimator: Any) -> None:
    truth, found = expected(estimator, 2000)
    scale = max(float(g.abs().max()) for g in truth.values())
    errors = {name: float((found[name] - truth[name]).abs().max()) / scale for name in ("qa", "qb")}
    assert max(errors.values()) < 0.1
    # Biased all the same.
    assert max(errors.values()) > 1e-8


def test_sum_over_values_and_its_sampled_forms_have_one_mean() -> None:
    # The same draws, so the same critic.
    case = BY_NAME["constrained"]
    found = []
    for estimator in LOCAL:
        elbo = trained(TraceBackpropQ_ELBO(estimator=estimator), *case.programs, params=case.params)
        found.append(expected_gradient(elbo.eval(), case.model, case.guide)["qk"])
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
    estimator = QControlVariate(num_samples=3000, scale=1.0)
    made = with_statistics(estimator, made)
    # In the first step the other particles are all that is known.
    made = replace(made, count=torch.zeros_like(made.count))  # type: ignore[arg-type]
    (found,) = torch.autograd.grad(estimator(made).surrogate.sum(), logits, retain_graph=True)
    # Of several components, the costs of one at the values of the others are left out.
    assert made.learned is not None and made.level is not None
    probs, table = made.log_probs.detach().exp(), made.learned  # type: ignore[union-attr]
    onehot = torch.nn.functional.one_hot(made.index, 3)  # type: ignore[arg-type]
    value = made.level + (onehot * table).sum((-1, -2))
    residual = 2.0 * ((made.cost - value) - (made.cost - value).mean(1, keepdim=True))
    surrogate = (residual * made.score).sum() + (made.log_probs.exp() * table).sum()  # type: ignore[union-attr]
    (right,) = torch.autograd.grad(surrogate, logits)
    assert float((found - right).abs().max()) < 0.15 < float((found - probs).abs().max())


def coin(
    seed: int, odds: float = 0.8, q: tuple[float, float] = (-0.4, 1.3), rows: int = 100_000
) -> tuple[SiteContext, Any]:
    """Coins of an exact critic, their values in the right proportion, and their logits."""
    logit = torch.full((rows,), odds, requires_grad=True)
    log_probs = torch.stack((-torch.nn.functional.softplus(logit), torch.nn.functional.logsigmoid(logit)), -1)
    generator = torch.Generator().manual_seed(seed)
    index = (torch.rand(rows, generator=generator) < torch.sigmoid(logit.detach())).long()
    shape = (1, 1, rows)
    value = index.to(logit).reshape(*shape, 1)
    program = FakeProgram(lambda value: value[..., 0], value, Components("bernoulli", (1,), 2), seed=seed + 1)
    made = SiteContext(
        names=("z",),
        score=log_probs.gather(-1, index.unsqueeze(-1)).reshape(shape),
        # What the run cost is far from what the critic says: it must not matter.
        cost=torch.randn(shape, generator=generator) + 9.0,
        log_probs=log_probs.reshape(*shape, 1, 2),
        index=index.reshape(*shape, 1),
        learned=torch.tensor(q).expand(*shape, 1, 2),
        level=torch.full(shape, 2.0),
        signals={"program": program, "q_value": 2.0 + torch.tensor(q)[index].reshape(shape)},
    )
    return made, logit


@pytest.mark.parametrize(("temperature", "expected_gradient_of_coin"), [(0.5, 0.215), (1.0, 0.167)])
def test_the_relaxation_is_biased_with_an_exact_critic(temperature: float, expected_gradient_of_coin: float) -> None:
    """A fair coin and ``Q(1) - Q(0) = 1``: the gradient to the logit is 0.25, which the sum over values has."""
    made, logit = coin(3, 0.0, (0.0, 1.0))
    (relaxed,) = torch.autograd.grad(QRelaxation(temperature)(made).surrogate.sum(), logit, retain_graph=True)
    (summed,) = torch.autograd.grad(QAllAction()(made).surrogate.sum(), logit)
    assert torch.allclose(summed, torch.tensor(0.25))
    error = float(relaxed.std()) / len(relaxed) ** 0.5
    assert abs(float(relaxed.mean()) - expected_gradient_of_coin) < 4 * error + 5e-4
    assert 0.25 - float(relaxed.mean()) > 20 * error


TRUTH = 1.7 * float(torch.sigmoid(torch.tensor(0.8)) * torch.sigmoid(torch.tensor(-0.8)))


@pytest.mark.parametrize(
    ("estimator", "noise"),
    [
        (QAllAction(), 0.0),
        (QScoreFunction(), 2.0),
        (QAdvantage(), 1.0),
        (QRELAX(), 1.0),
        (QRELAX(temperature=1.0, scale=1.0), 1.0),
        (QRELAX(scale=0.0), 2.0),
    ],
    ids=repr,
)
def test_with_an_exact_critic_local_costs_have_the_gradient_of_q(estimator: Any, noise: float) -> None:
    made, logit = coin(3)
    made = with_statistics(estimator, made)
    (found,) = torch.autograd.grad(estimator(made).surrogate.sum(), logit)
    error = float(found.std()) / len(found) ** 0.5
    assert error < 0.01 * TRUTH * (noise + 0.1)
    assert abs(float(found.mean()) - TRUTH) < 4 * error + 1e-6


def test_relax_with_a_wrong_q_has_the_gradient_of_the_wrong_q() -> None:
    # A critic that is wrong gives the gradient of the wrong Q: the bias that is declared.
    assert not QRELAX.is_unbiased
    estimator = QRELAX()
    made, logit = coin(7)
    wrong = replace(made, learned=2.0 * made.learned)  # type: ignore[operator]
    (found,) = torch.autograd.grad(estimator(with_statistics(estimator, wrong)).surrogate.sum(), logit)
    assert abs(float(found.mean()) - 2.0 * TRUTH) < 4 * float(found.std()) / len(found) ** 0.5
