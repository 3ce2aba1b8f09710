"""``MLPCritic(context=...)``: what its two parts see, and that estimators stay unbiased with it."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import real
from steps import scramble, trained

from pyro_bpq import ExpectedCost, MLPCritic, cost
from pyro_bpq.critics.nets import CriticShape
from pyro_bpq.errors import OptionError
from pyro_bpq.testing import assert_unbiased

SHAPE = CriticShape(2, 5, 1, 3, context=2)


def moved(critic: MLPCritic) -> torch.nn.Module:
    module = critic.build(SHAPE, torch.Generator().manual_seed(0))
    scramble(module.parameters())
    return module


@pytest.mark.parametrize("critic", [MLPCritic(context=()), MLPCritic((8, 4), (4,)), MLPCritic((), ())])
def test_advantages_see_the_last_features_only(critic: MLPCritic) -> None:
    assert not critic.build(SHAPE, torch.Generator())(torch.ones(2, 4, 5), None).any()
    module, context = moved(critic), torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))
    before = module(context, None)
    other = context.clone()
    other[..., :3] += 1.0
    after = module(other, None)
    assert before.shape == (2, 4, 4) and torch.equal(before[..., 1:], after[..., 1:])
    assert not torch.equal(before[..., 0], after[..., 0])
    own = context.clone()
    own[..., 3:] += 1.0
    assert not torch.equal(module(own, None)[..., 1:], before[..., 1:])


@pytest.mark.parametrize("shape", [CriticShape(2, 5, 1, 3), CriticShape(2, 5, 0, 0, context=2)])
def test_context_and_finite_values_are_needed(shape: CriticShape) -> None:
    with pytest.raises(OptionError, match="context"):
        MLPCritic(context=()).build(shape, torch.Generator())


def program() -> None:
    def site(name: str, logits: torch.Tensor, *features: float) -> torch.Tensor:
        infer = {"bpq": {"context": real(*features)}}
        return pyro.sample(name, dist.Categorical(logits=logits), infer=infer)

    x = site("x", pyro.param("qx", lambda: real(0.2, -0.4, 0.1)), 1.0, -0.5)
    y = site("y", pyro.param("qy", lambda: real(0.5, 0.0, -0.3, 0.8, -1.0, 0.3).reshape(3, 2))[x], 0.3, 2.0)
    cost("f", lambda a, b: float(a.item() == 2 * b.item()) - 0.7 * float(b.item()), x, y)


def test_it_keeps_estimators_unbiased() -> None:
    objective = trained(ExpectedCost(critic=MLPCritic((8,), (4,))), None, program, steps=30, lr=0.02).eval()
    assert any(bool(w.any()) for name, w in objective.critics.weights().items() if "advantage" in name)
    assert_unbiased(objective, None, program)
