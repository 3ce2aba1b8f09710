"""The all-action estimator: closed forms, and its scales against least squares in logit space."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_contract import context
from torch import Tensor

from pyro_bpq.estimators import AllAction
from pyro_bpq.estimators.all_action import SIZE, _terms, solve
from pyro_bpq.estimators.base import SiteContext
from pyro_bpq.testing.contract import with_statistics


def gradient(estimator: AllAction, made: SiteContext, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(estimator(made).surrogate.sum(), logits, retain_graph=True)
    return found


def bare(made: SiteContext) -> SiteContext:
    return replace(made, exact=None, exact_cost=None, learned=None, level=None, correction=None, exact_correction=None)


def test_call_without_critics_is_leave_one_out() -> None:
    made, logits = context()
    made = with_statistics(AllAction(), bare(made))
    surrogate = 2 * (made.cost - made.cost.mean(1, keepdim=True)) * made.score
    (expected,) = torch.autograd.grad(surrogate.sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradient(AllAction(), made, logits), expected)


def test_call_with_all_costs_exact_has_no_noise() -> None:
    # What is left is Σ_d Σ_k ∇q_d(k) I[d, k]: it does not read the sampled value.
    made, logits = context()
    made = replace(bare(made), exact=made.exact, exact_cost=made.cost)
    made = with_statistics(AllAction(), made)
    (expected,) = torch.autograd.grad((made.log_probs.exp() * made.exact).sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradient(AllAction(), made, logits), expected)


@pytest.mark.parametrize("missing", [(), ("exact", "exact_cost"), ("learned",), ("correction",)], ids=str)
def test_call_is_linear_in_the_scales(missing: tuple[str, ...]) -> None:
    # The gradient is u - Σ a_i v_i with the terms that the moments are about.
    made, logits = context()
    made = with_statistics(AllAction(), replace(made, **dict.fromkeys(missing)))

    def at(*scales: float) -> Tensor:
        moved = {**made.statistics, "scales": torch.tensor([scales] * 2)}
        return gradient(AllAction(), replace(made, statistics=moved), logits)

    u, mixed = at(*(0.0,) * SIZE), (0.7, 0.3, 0.8, 1.1, 0.4)
    parts = [u - at(*(float(i == j) for j in range(SIZE))) for i in range(SIZE)]
    torch.testing.assert_close(at(*mixed), u - sum(a * part for a, part in zip(mixed, parts, strict=True)))
    check_moments(made, u, parts)


def check_moments(made: SiteContext, u: Tensor, parts: list[Tensor]) -> None:
    """``v_i·v_j``, and ``(u - k)·v_i`` where ``k`` is what the scales make of the all-action terms."""
    terms = _terms(made, *made.score_table)
    scales = torch.full((len(made.names), SIZE), 0.4)
    known = sum((0.4 * offset for offset in terms.offsets if offset is not None), torch.zeros_like(u))
    moments, squares = terms.moments(scales)
    for i, j in itertools.product(range(SIZE), repeat=2):
        expected = (parts[i] * parts[j]).sum((-1, -2)).flatten(1).mean(1)
        # What later sites add has mean zero given all that the others read.
        expected = torch.zeros_like(expected) if min(i, j) < 3 <= max(i, j) else expected
        torch.testing.assert_close(moments[:, i, j], expected, msg=lambda m, p=(i, j): f"v{p}: {m}")
    for i in range(SIZE):
        expected = ((u - known) * parts[i]).sum((-1, -2)).flatten(1).mean(1)
        torch.testing.assert_close(moments[:, i, SIZE], expected, msg=lambda m, i=i: f"u v{i}: {m}")
        product = ((u - known) * parts[i]).sum((-1, -2))
        for j in range(SIZE):
            if j != i and (i < 3) == (j < 3):
                product = product - 0.4 * (parts[i] * parts[j]).sum((-1, -2))
        # Exact costs are not learned: nothing holds them to what is measured.
        square = product.square().flatten(1).mean(1) * float(i not in (0, 4))
        torch.testing.assert_close(squares[:, i], square, msg=lambda m, i=i: f"{i}: {m}")


def gram_of(v: Tensor, u: Tensor) -> Tensor:
    rows = torch.cat((v, u.unsqueeze(0)))
    return (rows @ rows.T).unsqueeze(0)


def without_the_last(gram: Tensor, scales: Tensor, *args: Any) -> Tensor:
    """The first four scales, where the exact costs of later sites are absent."""
    return solve(gram, scales, *args, present=(0, 1, 2, 3))[:, :4]


def test_solve_is_least_squares_inside_the_bounds() -> None:
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(SIZE, 50, generator=generator)
    u = 0.4 * v[0] + 0.9 * v[1] + 0.1 * v[2] + 0.6 * v[3]
    scales = torch.ones(1, SIZE)
    for _ in range(60):
        scales = solve(gram_of(v, u), scales, torch.zeros(1), 1.2, present=(0, 1, 2, 3))
    torch.testing.assert_close(scales, torch.tensor([[0.4, 0.9, 0.1, 0.6, 1.0]]))


@pytest.mark.parametrize(
    ("diagonal", "u", "count", "expected"),
    [
        ([1.0] * 5, [5.0, -2.0, 0.7, 1.0, 0.0], 0.0, [1.2, 0.0, 0.7, 1.0]),
        # What is zero keeps its scale.
        ([1.0, 0.0, 1.0, 1.0, 1.0], [0.5] * 5, 0.0, [0.5, 1.0, 0.5, 0.5]),
        # The first steps are near one.
        ([1.0] * 5, [0.0] * 5, 9.0, [0.9] * 4),
    ],
    ids=["bounds", "zero", "start"],
)
def test_solve_by_hand(diagonal: list[float], u: list[float], count: float, expected: list[float]) -> None:
    gram = gram_of(torch.diag(torch.tensor(diagonal)), torch.tensor(u))
    found = without_the_last(gram, torch.ones(1, SIZE), torch.tensor([count]), 1.2)
    torch.testing.assert_close(found, torch.tensor([expected]))


@pytest.mark.parametrize("learned", [0.0, 0.7])
def test_solve_takes_later_sites_by_critics_beside_what_is_known(learned: float) -> None:
    known, more = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.3, 1.0, 0.0])
    v = torch.zeros(SIZE, 3)
    v[4], v[3] = known, more
    scales = torch.ones(1, SIZE)
    for _ in range(20):
        scales = solve(gram_of(v, 0.9 * known + learned * more), scales, torch.zeros(1), 1.2)
    torch.testing.assert_close(scales[:, 3:], torch.tensor([[learned, 0.9]]))


@pytest.mark.parametrize("count", [0.0, 1e6])
def test_scales_after_a_step_by_hand(count: float) -> None:
    made, _ = context(particles=12)
    own = made.learned.gather(-1, made.table[1].unsqueeze(-1)).squeeze(-1).sum(-1)
    made = replace(bare(made), learned=made.learned, level=made.level, cost=0.8 * own + 0.5 * made.level)
    scales, number = torch.tensor([[1.0, 0.5, 0.8, 1.0, 1.0]]).expand(2, SIZE), own[0].numel()
    gram, squares = _terms(made, *made.score_table).moments(scales)
    known = {"scales": scales, "gram": 0.5 * gram, "squares": 0.5 * squares}
    made = replace(made, statistics={**with_statistics(AllAction(), made).statistics, **known})
    found = AllAction(decay=0.9)(replace(made, count=torch.full((2,), count))).statistics
    # The weight of this step, and the number of samples behind a running mean.
    weight, samples = (1.0, number) if count == 0.0 else (number / 1000, 2000 - number)
    gram, squares = ((0.5 + 0.5 * weight) * part for part in (gram, squares))
    means = torch.zeros(2, SIZE)
    for i, j in ((1, 2), (2, 1)):
        means[:, i] = gram[:, i, SIZE] - scales[:, j] * gram[:, i, j]
    ridge, noise = 3.0 / number / (count + 1.0), (squares - means.square()).clamp(min=0.0) / samples
    expected = solve(gram, scales, torch.full((2,), ridge), 1.2, noise, (1, 2))
    assert 0.2 < expected[0, 2] < 1.0
    torch.testing.assert_close(found["scales"], expected)


def test_scales_drop_a_useless_critic_and_keep_a_good_one() -> None:
    estimator = AllAction()
    for is_good in (True, False):
        statistics = {name: torch.stack([torch.as_tensor(value)] * 2) for name, value in estimator.statistics().items()}
        for step in range(200):
            made, _ = context(seed=step)
            made = replace(made, exact=None, exact_cost=None, level=None, correction=None, exact_correction=None)
            own = made.learned.gather(-1, made.index.unsqueeze(-1)).squeeze(-1).sum(-1)
            now = {"statistics": statistics, "count": torch.full((2,), float(step))}
            made = replace(made, cost=own if is_good else made.cost, **now)
            statistics = dict(estimator(made).statistics)
        scale = statistics["scales"][:, 2]
        assert bool((scale > 0.85).all()) if is_good else bool((scale < 0.15).all())


def test_scales_stay_one_where_they_do_not_adapt() -> None:
    made, logits = context()
    made = with_statistics(AllAction(), made)
    moved = replace(made, statistics={**made.statistics, "scales": torch.zeros(2, SIZE)})
    fixed = AllAction(adaptive=False)
    torch.testing.assert_close(gradient(fixed, moved, logits), gradient(fixed, made, logits))
    torch.testing.assert_close(gradient(fixed, moved, logits), gradient(AllAction(), made, logits))


def test_solve_drops_what_is_learned_within_its_noise() -> None:
    u = torch.full((SIZE,), 0.5)
    noise = torch.tensor([[9.0, 0.0, 0.25 * 0.25 / 4.0, 0.07, 0.0]])
    found = without_the_last(gram_of(torch.eye(SIZE), u), torch.ones(1, SIZE), torch.zeros(1), 1.2, noise)
    # Half a scale at an error of 0.125; at 0.26 it is within two of them; exact costs keep theirs.
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.5, 0.375, 0.0]]))


def test_a_rare_sample_alone_moves_no_scale_of_a_critic() -> None:
    made, _ = context(seed=1)
    made = with_statistics(AllAction(), made)
    statistics = made.statistics
    for step in range(40):
        cost = made.cost * (1000.0 if step == 20 else 0.0)
        now = replace(made, cost=cost, statistics=statistics, count=torch.full((2,), float(step)))
        statistics = {**statistics, **AllAction()(now).statistics}
    assert (statistics["scales"][:, 1:3] == 0.0).all()
