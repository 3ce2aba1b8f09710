"""Critics: shapes, independence of the sites, initial values."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from steps import scramble
from torch import Tensor

from pyro_bpq.critics.nets import Critic, CriticShape, LinearCritic, MLPCritic, TabularCritic
from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.variates import NetworkVariate

CRITICS = [MLPCritic(), MLPCritic((8, 4)), MLPCritic(hidden=()), LinearCritic(), TabularCritic()]
each = pytest.mark.parametrize("critic", CRITICS, ids=repr)


def build(critic: Critic, shape: CriticShape, seed: int = 0) -> torch.nn.Module:
    return critic.build(shape, torch.Generator().manual_seed(seed))


def inputs(shape: CriticShape, rows: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    context = torch.randn(shape.sites, rows, shape.features, generator=generator)
    return context, torch.randint(0, max(shape.cells, 1), (shape.sites, rows), generator=generator)


shapes = st.builds(
    CriticShape,
    sites=st.integers(1, 4),
    features=st.integers(0, 5),
    components=st.integers(0, 3),
    cardinality=st.integers(2, 4),
    cells=st.integers(1, 6),
)


@each
@hypothesis.given(shape=shapes)
def test_build_gives_outputs_of_the_promised_shape(critic: Critic, shape: CriticShape) -> None:
    module = build(critic, shape)
    assert module(*inputs(shape)).shape == (shape.sites, 5, 1 + shape.components * shape.cardinality)
    assert all(p.shape[0] == shape.sites for p in module.parameters())


@each
def test_build_starts_at_zero(critic: Critic) -> None:
    shape = CriticShape(2, 3, 2, 3, 4)
    assert not build(critic, shape)(*inputs(shape)).any()


@each
def test_sites_and_rows_are_independent(critic: Critic) -> None:
    shape = CriticShape(3, 3, 2, 3, 4)
    module = build(critic, shape)
    scramble(module.parameters())
    context, cells = inputs(shape)
    before = module(context, cells)
    parts = [module(context[:, i : i + 1], cells[:, i : i + 1]) for i in range(5)]
    torch.testing.assert_close(torch.cat(parts, 1), before)
    with torch.no_grad():
        for p in module.parameters():
            p[1] += 1.0
    after = module(context, cells)
    assert torch.equal(after[[0, 2]], before[[0, 2]]) and not torch.equal(after[1], before[1])
    gradients = torch.autograd.grad(after[1].sum(), list(module.parameters()), allow_unused=True)
    assert all(not g[[0, 2]].any() for g in gradients if g is not None)


def test_build_draws_from_its_generator_only() -> None:
    shape = CriticShape(2, 3, 1, 2)
    state = torch.get_rng_state()
    one, other, third = (build(MLPCritic(), shape, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    first = [next(iter(m.parameters())) for m in (one, other, third)]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])


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


def test_mlp_critic_takes_an_int() -> None:
    assert MLPCritic(16) == MLPCritic((16,))  # type: ignore[arg-type]


@pytest.mark.parametrize("critic", CRITICS, ids=repr)
def test_critics_are_values(critic: Any) -> None:
    assert isinstance(critic, Critic)
    assert eval(repr(critic)) == critic and hash(eval(repr(critic))) == hash(critic)


@pytest.mark.parametrize("hidden", [[32], 32.0, (0,), ("a",)])
@pytest.mark.parametrize("kind", [MLPCritic, NetworkVariate])
def test_layer_sizes_are_positive_integers(kind: Any, hidden: Any) -> None:
    with pytest.raises(OptionError, match=r"hidden=.*layer sizes"):
        kind(hidden=hidden)
