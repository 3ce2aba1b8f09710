"""Critics that read the value as a whole: zero at first, independence of rows and sites."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_bpq import MomentCritic, ValueCritic
from pyro_bpq.critics.joint import JointCritic, JointOutput, SiteValue
from pyro_bpq.critics.nets import CriticShape
from pyro_bpq.errors import OptionError

CRITICS: list[Any] = [MomentCritic(), MomentCritic((8, 4)), MomentCritic(()), ValueCritic(), ValueCritic((8,))]
each = pytest.mark.parametrize("critic", CRITICS, ids=repr)


def build(critic: JointCritic, shape: CriticShape, is_trained: bool = True) -> torch.nn.Module:
    module = critic.build(shape, torch.Generator().manual_seed(0)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters() if is_trained else ():
            p.add_(torch.randn(p.shape, generator=generator))
    return module


def shape_of(features: int = 3) -> CriticShape:
    return CriticShape(2, features, 3, 2)


def output(critic: JointCritic, module: torch.nn.Module, context: Tensor, site: SiteValue) -> JointOutput:
    shape = shape_of()
    return JointOutput.unpacked(module(context, None, site), shape.components, shape.cardinality)


def rows_of(rows: int = 5, features: int = 3, seed: int = 0) -> tuple[Tensor, SiteValue]:
    generator = torch.Generator().manual_seed(seed)
    context, *parts = (torch.randn(2, rows, size, generator=generator) for size in (features, 6, 3, 3, 3))
    return context, SiteValue(parts[0].unflatten(-1, (3, 2)), *parts[1:])


@each
def test_starts_at_zero(critic: Any) -> None:
    module = build(critic, shape_of(), is_trained=False)
    found = output(critic, module, *rows_of())
    for name in ("level", "value", "mean", "own", "table"):
        assert float(getattr(found, name).detach().abs().max()) < 1e-12, name


@each
def test_a_critic_that_starts_at_zero_can_learn(critic: Any) -> None:
    module = build(critic, shape_of(), is_trained=False)
    found = output(critic, module, *rows_of())
    gradients = torch.autograd.grad(found.value.sum(), list(module.parameters()), allow_unused=True)
    assert any(g is not None and bool(g.any()) for g in gradients)
    assert not any(part.requires_grad for part in found[2:])


@each
@pytest.mark.parametrize("features", [0, 3])
def test_rows_and_sites_are_independent(critic: Any, features: int) -> None:
    module = build(critic, shape_of(features))
    context, site = rows_of(features=features)
    whole = module(context, None, site)
    for row in range(5):
        part = SiteValue(*(None if t is None else t[:, row : row + 1] for t in site))
        torch.testing.assert_close(module(context[:, row : row + 1], None, part), whole[:, row : row + 1])
    with torch.no_grad():
        for p in module.parameters():
            p[1] += 1.0
    after = module(context, None, site)
    assert torch.equal(after[0], whole[0]) and not torch.equal(after[1], whole[1])


def test_moment_critic_is_a_quadratic() -> None:
    context, site = rows_of()
    found = output(MomentCritic(), build(MomentCritic(), shape_of()), context, site)
    torch.testing.assert_close(found.value, (found.table * site.powers).sum((-1, -2)))
    assert not found.mean.any() and torch.equal(found.own, found.value.detach())


@each
def test_critics_are_values(critic: Any) -> None:
    assert isinstance(critic, JointCritic)
    assert eval(repr(critic)) == critic and hash(eval(repr(critic))) == hash(critic)


def test_options_are_checked() -> None:
    assert ValueCritic(16) == ValueCritic((16,))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="write"):
        ValueCritic(())
