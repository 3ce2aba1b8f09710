"""``examples/critics/context.py``: what the two parts of the critic see, and that estimators stay unbiased."""

from __future__ import annotations

from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from test_examples import load

from pyro_bpq import ExpectedCost, MLPCritic
from pyro_bpq.critics.nets import CriticShape
from pyro_bpq.errors import OptionError
from pyro_bpq.testing import exact_gradient, expected_gradient

ContextCritic, policy = load("context").ContextCritic, load("context").policy
SHAPE = CriticShape(2, 5, 1, 3, context=2)


def moved(critic: Any) -> torch.nn.Module:
    module = critic.build(SHAPE, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return module


@pytest.mark.parametrize("critic", [ContextCritic(), ContextCritic((8, 4), (4,)), ContextCritic((), ())])
def test_advantages_see_the_last_features_only(critic: Any) -> None:
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
        ContextCritic().build(shape, torch.Generator())


@pytest.mark.parametrize("options", [{"hidden": 32.0}, {"hidden": (0,)}])
def test_bad_layers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        MLPCritic(**options)


def test_it_keeps_estimators_unbiased() -> None:
    objective = ExpectedCost(critic=ContextCritic((8,), (4,)))
    pyro.clear_param_store()
    svi = SVI(None, policy, Adam({"lr": 0.02}), objective)
    for _ in range(30):
        svi.step()
    objective.eval()
    assert any(bool(w.any()) for name, w in objective.critics.weights().items() if "advantage" in name)
    pyro.clear_param_store()
    truth = exact_gradient(None, policy, only_costs=True)
    found = expected_gradient(objective, None, policy)
    assert all(float((found[name] - g).abs().max()) < 1e-10 for name, g in truth.items())
