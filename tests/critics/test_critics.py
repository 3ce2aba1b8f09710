"""Critics: shapes, independence of the sites, initial values; those that read the value as a whole, too."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from steps import scramble
from torch import Tensor

from pyro_bpq import MomentCritic, ValueCritic
from pyro_bpq.critics.nets import (
    Critic,
    CriticShape,
    JointCritic,
    JointOutput,
    LinearCritic,
    MLPCritic,
    SiteValue,
    TabularCritic,
)

PLAIN = [MLPCritic(), MLPCritic((8, 4)), MLPCritic(hidden=()), LinearCritic(), TabularCritic()]
JOINT = [MomentCritic(), MomentCritic((8, 4)), MomentCritic(()), ValueCritic(), ValueCritic((8,))]
each = pytest.mark.parametrize("critic", [*PLAIN, *JOINT], ids=repr)
SHAPE = CriticShape(3, 3, 3, 2, 4)


def build(critic: Critic, shape: CriticShape, seed: int = 0) -> torch.nn.Module:
    return critic.build(shape, torch.Generator().manual_seed(seed))


def inputs(critic: Critic, shape: CriticShape, rows: int = 5) -> tuple[Any, ...]:
    """What the module of a critic is called with."""
    generator = torch.Generator().manual_seed(0)

    def draw(size: int) -> Tensor:
        return torch.randn(shape.sites, rows, size, generator=generator)

    if isinstance(critic, JointCritic):
        powers = draw(2 * shape.components).unflatten(-1, (-1, 2))
        return draw(shape.features), None, SiteValue(powers, *(draw(shape.components) for _ in range(3)))
    cells = torch.randint(0, max(shape.cells, 1), (shape.sites, rows), generator=generator)
    return draw(shape.features), cells


def output(critic: Critic, module: torch.nn.Module) -> JointOutput:
    return JointOutput.unpacked(module(*inputs(critic, SHAPE)), SHAPE.components, SHAPE.cardinality)


SIZES = {"sites": (1, 4), "features": (0, 5), "components": (0, 3), "cardinality": (2, 4), "cells": (1, 6)}
shapes = st.builds(CriticShape, **{name: st.integers(*sizes) for name, sizes in SIZES.items()})


@pytest.mark.parametrize("critic", PLAIN, ids=repr)
@hypothesis.given(shape=shapes)
def test_build_gives_outputs_of_the_promised_shape(critic: Critic, shape: CriticShape) -> None:
    module = build(critic, shape)
    assert module(*inputs(critic, shape)).shape == (shape.sites, 5, 1 + shape.components * shape.cardinality)
    assert all(p.shape[0] == shape.sites for p in module.parameters())


@each
def test_build_starts_at_zero(critic: Critic) -> None:
    assert float(build(critic, SHAPE)(*inputs(critic, SHAPE)).detach().abs().max()) < 1e-12


@pytest.mark.parametrize("critic", JOINT, ids=repr)
def test_a_critic_that_starts_at_zero_can_learn(critic: Critic) -> None:
    module = build(critic, SHAPE)
    found = output(critic, module)
    gradients = torch.autograd.grad(found.value.sum(), list(module.parameters()), allow_unused=True)
    assert any(g is not None and bool(g.any()) for g in gradients)
    assert not any(part.requires_grad for part in found[2:])


@each
@pytest.mark.parametrize("features", [0, 3])
def test_sites_and_rows_are_independent(critic: Critic, features: int) -> None:
    shape = CriticShape(3, features, 3, 2, 4)
    module, (context, cells, *site) = build(critic, shape), inputs(critic, shape)
    scramble(module.parameters())
    before = module(context, cells, *site).detach().clone()
    for i in range(5):
        row = slice(i, i + 1)
        own = [value.map(lambda part: part[:, row]) for value in site]  # noqa: B023
        part = module(context[:, row], None if cells is None else cells[:, row], *own)
        torch.testing.assert_close(part, before[:, row])
    with torch.no_grad():
        for p in module.parameters():
            p[1] += 1.0
    after = module(context, cells, *site)
    assert torch.equal(after[[0, 2]], before[[0, 2]]) and not torch.equal(after[1], before[1])
    gradients = torch.autograd.grad(after[1].sum(), list(module.parameters()), allow_unused=True)
    assert all(not g[[0, 2]].any() for g in gradients if g is not None)


def test_moment_critic_is_a_quadratic() -> None:
    module, (*_, site) = build(MomentCritic(), SHAPE), inputs(MomentCritic(), SHAPE)
    scramble(module.parameters())
    found = output(MomentCritic(), module)
    torch.testing.assert_close(found.value, (found.table * site.powers).sum((-1, -2)))
    assert not found.mean.any() and torch.equal(found.own, found.value.detach())


def fit(critic: Critic, target: Tensor, context: Tensor, cells: Tensor, shape: CriticShape) -> float:
    module = build(critic, shape)
    optimiser = torch.optim.Adam(module.parameters(), lr=0.03)
    for _ in range(600):
        loss = (module(context, cells)[..., 0] - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return loss.item()


def test_critics_learn_what_they_can_represent() -> None:
    shape = CriticShape(1, 2, 0, 2, 4)
    context = torch.tensor([[[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]]])
    cells = torch.arange(4).unsqueeze(0)
    linear, xor = torch.tensor([[0.5, 1.0, 1.5, 2.0]]), torch.tensor([[1.0, -1.0, -1.0, 1.0]])
    for critic in (MLPCritic(), LinearCritic(), TabularCritic()):
        assert fit(critic, linear, context, cells, shape) < 1e-3
    assert fit(MLPCritic(), xor, context, cells, shape) < 1e-3
    assert fit(TabularCritic(), xor, context, cells, shape) < 1e-3
    assert fit(LinearCritic(), xor, context, cells, shape) > 0.5


@pytest.mark.parametrize("kind", [MLPCritic, ValueCritic])
def test_layers_may_be_an_int(kind: Any) -> None:
    assert kind(16) == kind((16,))


@each
def test_critics_are_values(critic: Any) -> None:
    assert isinstance(critic, Critic)
    assert eval(repr(critic)) == critic and hash(eval(repr(critic))) == hash(critic)
