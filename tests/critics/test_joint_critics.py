"""Critics that read the value as a whole: closed forms against enumeration, memory, independence of sites."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_bpq import FirstOrderCritic, FlipCritic, MomentCritic, QuadraticCritic
from pyro_bpq.critics.joint import JointCritic, JointOutput, SiteValue
from pyro_bpq.critics.nets import CriticShape
from pyro_bpq.errors import OptionError

SHAPE = CriticShape(sites=2, features=3, components=3, cardinality=3)
FINITE: list[Any] = [
    QuadraticCritic(),
    QuadraticCritic(rank=1, hidden=()),
    FirstOrderCritic((8,)),
    FirstOrderCritic((8, 4)),
    FlipCritic((8,)),
    FlipCritic((8, 4), max_elements=1),
]
CRITICS: list[Any] = [*FINITE, MomentCritic(), MomentCritic((8, 4)), MomentCritic(())]
each = pytest.mark.parametrize("critic", CRITICS, ids=repr)
finite = pytest.mark.parametrize("critic", FINITE, ids=repr)


def build(critic: JointCritic, shape: CriticShape, is_trained: bool = True) -> torch.nn.Module:
    module = critic.build(shape, torch.Generator().manual_seed(0)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters() if is_trained else ():
            p.add_(torch.randn(p.shape, generator=generator))
    return module


def shape_of(critic: JointCritic, features: int = 3) -> CriticShape:
    return CriticShape(2, features, 3, 3 if critic.is_finite else 2)


def output(critic: JointCritic, module: torch.nn.Module, context: Tensor, site: SiteValue) -> JointOutput:
    shape = shape_of(critic)
    return JointOutput.unpacked(module(context, None, site), shape.components, shape.cardinality)


def rows_of(critic: JointCritic, rows: int = 5, features: int = 3, seed: int = 0) -> tuple[Tensor, SiteValue]:
    generator = torch.Generator().manual_seed(seed)
    context = torch.randn(2, rows, features, generator=generator)
    if not critic.is_finite:
        return context, SiteValue(powers=torch.randn(2, rows, 3, 2, generator=generator))
    probs = torch.randn(2, rows, 3, 3, generator=generator).softmax(-1)
    return context, SiteValue(torch.randint(0, 3, (2, rows, 3), generator=generator), probs)


def all_values() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every joint value of three components of three values as a row: context, index, probs, weights."""
    generator = torch.Generator().manual_seed(7)
    index = torch.tensor(list(itertools.product(range(3), repeat=3)))
    rows = len(index)
    context = torch.randn(2, 1, 3, generator=generator).expand(2, rows, 3)
    probs = torch.randn(2, 1, 3, 3, generator=generator).softmax(-1).expand(2, rows, 3, 3)
    index = index.expand(2, rows, 3)
    weights = probs.gather(-1, index.unsqueeze(-1)).squeeze(-1).prod(-1)
    return context, index, probs, weights


@each
def test_starts_at_zero(critic: Any) -> None:
    module = build(critic, shape_of(critic), is_trained=False)
    found = output(critic, module, *rows_of(critic))
    for name in ("level", "value", "mean", "own", "variate", "table"):
        assert float(getattr(found, name).detach().abs().max()) < 1e-12, name


@each
def test_a_critic_that_starts_at_zero_can_learn(critic: Any) -> None:
    module = build(critic, shape_of(critic), is_trained=False)
    found = output(critic, module, *rows_of(critic))
    gradients = torch.autograd.grad(found.value.sum(), list(module.parameters()), allow_unused=True)
    assert any(g is not None and bool(g.any()) for g in gradients)
    assert not any(part.requires_grad for part in found[2:])


@each
@pytest.mark.parametrize("features", [0, 3])
def test_rows_and_sites_are_independent(critic: Any, features: int) -> None:
    module = build(critic, shape_of(critic, features))
    context, site = rows_of(critic, features=features)
    whole = module(context, None, site)
    for row in range(5):
        part = SiteValue(*(None if t is None else t[:, row : row + 1] for t in site))
        torch.testing.assert_close(module(context[:, row : row + 1], None, part), whole[:, row : row + 1])
    with torch.no_grad():
        for p in module.parameters():
            p[1] += 1.0
    after = module(context, None, site)
    assert torch.equal(after[0], whole[0]) and not torch.equal(after[1], whole[1])


@finite
def test_variate_has_mean_zero(critic: Any) -> None:
    context, index, probs, weights = all_values()
    found = output(critic, build(critic, SHAPE), context, SiteValue(index, probs))
    torch.testing.assert_close((weights * found.variate).sum(1), torch.zeros(2), atol=1e-12, rtol=0.0)
    assert float(found.variate.abs().max()) > 1e-2


@finite
def test_table_goes_with_the_residual(critic: Any) -> None:
    # E[o ∇ log q_d] = E[Σ_k ∇q_d(k) T[d, k]] in logits: with ∇ log q_d = onehot - p.
    context, index, probs, weights = all_values()
    found = output(critic, build(critic, SHAPE), context, SiteValue(index, probs))
    score = torch.nn.functional.one_hot(index, 3) - probs
    left = (weights[..., None, None] * found.own[..., None, None] * score).sum(1)
    centred = found.table - (probs * found.table).sum(-1, keepdim=True)
    right = (weights[..., None, None] * probs * centred).sum(1)
    torch.testing.assert_close(left, right, atol=1e-12, rtol=0.0)
    assert float(left.abs().max()) > 1e-2


def test_quadratic_critic_matches_enumeration() -> None:
    context, index, probs, weights = all_values()
    found = output(QuadraticCritic(), build(QuadraticCritic(), SHAPE), context, SiteValue(index, probs))
    torch.testing.assert_close(found.mean[:, 0], (weights * found.value).sum(1))
    torch.testing.assert_close(found.own, found.value - found.mean)
    for d in range(3):
        given = torch.stack(
            [
                (torch.where(index[..., d] == k, weights, 0.0) * found.value).sum(1) / probs[:, 0, d, k]
                for k in range(3)
            ],
            -1,
        )
        table = found.table[:, 0, d]
        torch.testing.assert_close(table - table[:, :1], given - given[:, :1])


def test_flip_critic_matches_direct_evaluation() -> None:
    critic = FlipCritic((8, 4))
    context, index, probs, _ = all_values()
    module = build(critic, SHAPE)
    found = output(critic, module, context, SiteValue(index, probs))
    for d, k in itertools.product(range(3), range(3)):
        flipped = index.clone()
        flipped[..., d] = k
        value = output(critic, module, context, SiteValue(flipped, probs)).value
        torch.testing.assert_close(found.table[..., d, k], value)


@pytest.mark.parametrize("limit", [1, 200, 500])
def test_flips_in_chunks_are_the_same(limit: int) -> None:
    context, index, probs, _ = all_values()
    whole = build(FlipCritic((8,)), SHAPE)(context, None, SiteValue(index, probs))
    parts = build(FlipCritic((8,), max_elements=limit), SHAPE)(context, None, SiteValue(index, probs))
    torch.testing.assert_close(parts, whole)


def test_flips_hold_no_more_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    critic, sizes = FlipCritic((8,), max_elements=2000), []
    module = build(critic, SHAPE)
    tail = type(module).tail

    def recorded(self: Any, hidden: Tensor) -> Tensor:
        sizes.append(hidden.numel())
        return tail(self, hidden)

    monkeypatch.setattr(type(module), "tail", recorded)
    context, index, probs, _ = all_values()
    module(context, None, SiteValue(index, probs))
    # 2 sites, 27 rows, 8 hidden units, 3 values: one component at a time.
    assert max(sizes) == 2 * 27 * 8 * 3 and len(sizes) == 2 + 3


def test_first_order_critic_is_exact_where_the_critic_is_linear() -> None:
    # With weights so small that the perceptron is linear, mean and table are those of the critic itself.
    critic, small = FirstOrderCritic((8,)), 1e-5
    module = build(critic, SHAPE)
    with torch.no_grad():
        for name in ("rows", "columns", "bias"):
            getattr(module, name).mul_(small)
        module.weights[0].div_(small)
    context, index, probs, _ = all_values()
    found = output(critic, module, context, SiteValue(index, probs))
    torch.testing.assert_close(found.own, found.value - found.mean, atol=1e-3, rtol=1e-3)
    assert float(found.own.abs().max()) > 0.1


def test_moment_critic_is_a_quadratic() -> None:
    context, site = rows_of(MomentCritic())
    found = output(MomentCritic(), build(MomentCritic(), shape_of(MomentCritic())), context, site)
    assert site.powers is not None
    torch.testing.assert_close(found.value, (found.table * site.powers).sum((-1, -2)))
    assert not found.mean.any() and torch.equal(found.own, found.value.detach())


@each
def test_critics_are_values(critic: Any) -> None:
    assert isinstance(critic, JointCritic)
    assert eval(repr(critic)) == critic and hash(eval(repr(critic))) == hash(critic)


def test_options_are_checked() -> None:
    assert FlipCritic(16) == FlipCritic((16,))  # type: ignore[arg-type]
    for make in (lambda: FlipCritic(()), lambda: FirstOrderCritic(()), lambda: QuadraticCritic(rank=0)):
        with pytest.raises(OptionError, match="write"):
            make()
    with pytest.raises(OptionError, match="positive"):
        FlipCritic(max_elements=0)
