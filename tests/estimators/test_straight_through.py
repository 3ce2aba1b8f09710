"""The value of a straight-through site, and its gradient."""

from __future__ import annotations

import pyro.distributions as dist
import torch

from pyro_bpq.estimators import StraightThrough


def test_the_value_stays_and_has_the_gradient_of_the_mean() -> None:
    logits = torch.tensor([0.3, -1.0], requires_grad=True)
    fn, drawn = dist.Bernoulli(logits=logits), torch.tensor([1.0, 0.0])
    value = StraightThrough().attach(fn, drawn, torch.Generator())
    assert torch.equal(value, drawn)
    (slope,) = torch.autograd.grad((value * torch.tensor([2.0, 5.0])).sum(), logits)
    p = logits.detach().sigmoid()
    torch.testing.assert_close(slope, torch.tensor([2.0, 5.0]) * p * (1 - p))
