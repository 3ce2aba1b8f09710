"""The all-action estimator: closed forms, and its scales against least squares in logit space."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_contract import context, with_statistics
from torch import Tensor

from pyro_bpq.estimators import AllAction
from pyro_bpq.estimators.all_action import _terms
from pyro_bpq.estimators.base import SiteContext
from pyro_bpq.estimators.scales import PAIRS, solve


def gradient(estimator: AllAction, made: SiteContext, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(estimator(made).surrogate.sum(), logits, retain_graph=True)
    return found


def bare(made: SiteContext) -> SiteContext:
    return replace(made, exact=None, exact_cost=None, learned=None, level=None, correction=None)


def test_call_without_critics_is_leave_one_out() -> None:
    made, logits = context()
    made = with_statistics(AllAction(), bare(made))
    (expected,) = torch.autograd.grad(
        (2 * (made.cost - made.cost.mean(1, keepdim=True)) * made.score).sum(), logits, retain_graph=True
    )
    torch.testing.assert_close(gradient(AllAction(), made, logits), expected)


def test_call_with_all_costs_exact_has_no_noise() -> None:
    # What is left is Σ_d Σ_k ∇q_d(k) I[d, k]: it does not read the sampled value.
    made, logits = context()
    made = replace(bare(made), exact=made.exact, exact_cost=made.cost)
    made = with_statistics(AllAction(), made)
    assert made.log_probs is not None and made.exact is not None
    (expected,) = torch.autograd.grad((made.log_probs.exp() * made.exact).sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradient(AllAction(), made, logits), expected)


def test_call_is_linear_in_the_scales() -> None:
    # The gradient is u - Σ a_i v_i with the terms that the moments are about.
    made, logits = context()
    made = with_statistics(AllAction(), made)
    found = {}
    for scales in [(0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.3, 0.8, 1.1)]:
        statistics = {**made.statistics, "scales": torch.tensor([scales, scales])}
        found[scales] = gradient(AllAction(), replace(made, statistics=statistics), logits)
    u = found[0.0, 0.0, 0.0]
    parts = [u - found[1.0, 0.0, 0.0], u - found[0.0, 1.0, 0.0], u - found[0.0, 0.0, 1.0]]
    torch.testing.assert_close(found[0.3, 0.8, 1.1], u - 0.3 * parts[0] - 0.8 * parts[1] - 1.1 * parts[2])
    moments = _terms(made, made.log_probs.detach().exp()).moments()
    for n, (i, j) in enumerate(PAIRS):
        expected = (parts[i] * parts[j]).sum((-1, -2)).flatten(1).mean(1)
        torch.testing.assert_close(moments[:, n], expected, msg=lambda m, p=(i, j): f"v{p}: {m}")
    for i in range(3):
        expected = (u * parts[i]).sum((-1, -2)).flatten(1).mean(1)
        torch.testing.assert_close(moments[:, 6 + i], expected, msg=lambda m, i=i: f"u v{i}: {m}")


@pytest.mark.parametrize("missing", ["exact", "learned", "correction"])
def test_moments_where_a_part_is_missing(missing: str) -> None:
    made, logits = context()
    made = replace(made, **{missing: None})
    if missing == "exact":
        made = replace(made, exact_cost=None)
    made = with_statistics(AllAction(), made)

    def at(*scales: float) -> Tensor:
        return gradient(
            AllAction(), replace(made, statistics={**made.statistics, "scales": torch.tensor([scales] * 2)}), logits
        )

    u = at(0.0, 0.0, 0.0)
    parts = [u - at(*(float(i == j) for j in range(3))) for i in range(3)]
    moments = _terms(made, made.log_probs.detach().exp()).moments()
    for n, (i, j) in enumerate(PAIRS):
        torch.testing.assert_close(moments[:, n], (parts[i] * parts[j]).sum((-1, -2)).flatten(1).mean(1))
    for i in range(3):
        torch.testing.assert_close(moments[:, 6 + i], (u * parts[i]).sum((-1, -2)).flatten(1).mean(1))


def gram_of(v: Tensor, u: Tensor) -> Tensor:
    square = v @ v.T
    return torch.cat([torch.stack([square[i, j] for i, j in PAIRS]), v @ u]).unsqueeze(0)


def test_solve_is_least_squares_inside_the_bounds() -> None:
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(3, 50, generator=generator)
    u = 0.4 * v[0] + 0.9 * v[1] + 0.1 * v[2]
    scales = torch.ones(1, 3)
    for _ in range(40):
        scales = solve(gram_of(v, u), scales, torch.zeros(1), 1.2)
    torch.testing.assert_close(scales, torch.tensor([[0.4, 0.9, 0.1]]))


def test_solve_clamps() -> None:
    v = torch.eye(3)
    assert solve(gram_of(v, torch.tensor([5.0, -2.0, 0.7])), torch.ones(1, 3), torch.zeros(1), 1.2).tolist() == [
        [1.2, 0.0, 0.7]
    ]


def test_solve_leaves_the_scale_of_what_is_zero() -> None:
    v = torch.diag(torch.tensor([1.0, 0.0, 1.0]))
    found = solve(gram_of(v, torch.tensor([0.5, 0.0, 0.5])), torch.full((1, 3), 0.3), torch.zeros(1), 1.2)
    assert found.tolist() == [[0.5, 1.0, 0.5]]


def test_solve_starts_near_one() -> None:
    v = torch.eye(3)
    found = solve(gram_of(v, torch.zeros(3)), torch.ones(1, 3), torch.tensor([9.0]), 1.2)
    torch.testing.assert_close(found, torch.full((1, 3), 0.9))


def test_scales_drop_a_useless_critic_and_keep_a_good_one() -> None:
    estimator = AllAction()
    for is_good in (True, False):
        statistics = {name: torch.tensor([value] * 2) for name, value in estimator.statistics(2).items()}
        for step in range(200):
            made, _ = context(seed=step)
            made = replace(made, exact=None, exact_cost=None, level=None, correction=None)
            assert made.learned is not None and made.index is not None
            own = made.learned.gather(-1, made.index.unsqueeze(-1)).squeeze(-1).sum(-1)
            made = replace(
                made, cost=own if is_good else made.cost, statistics=statistics, count=torch.full((2,), float(step))
            )
            statistics = dict(estimator(made).statistics)
        scale = statistics["scales"][:, 1]
        assert bool((scale > 0.85).all()) if is_good else bool((scale < 0.15).all())


def test_scales_stay_one_where_they_do_not_adapt() -> None:
    made, logits = context()
    made = with_statistics(AllAction(), made)
    moved = replace(made, statistics={**made.statistics, "scales": torch.zeros(2, 3)})
    fixed = AllAction(adaptive=False)
    torch.testing.assert_close(gradient(fixed, moved, logits), gradient(fixed, made, logits))
    torch.testing.assert_close(gradient(fixed, moved, logits), gradient(AllAction(), made, logits))
