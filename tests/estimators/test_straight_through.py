"""The value of a straight-through site, and its gradient."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from steps import filtered, trained

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import StraightThrough


def test_the_value_stays_and_has_the_gradient_of_the_mean() -> None:
    logits = torch.tensor([0.3, -1.0], requires_grad=True)
    fn, drawn = dist.Bernoulli(logits=logits), torch.tensor([1.0, 0.0])
    value = StraightThrough().attach(fn, drawn, torch.Generator())
    assert torch.equal(value, drawn)
    (slope,) = torch.autograd.grad((value * torch.tensor([2.0, 5.0])).sum(), logits)
    p = logits.detach().sigmoid()
    torch.testing.assert_close(slope, torch.tensor([2.0, 5.0]) * p * (1 - p))


def test_that_of_pyro_stays_pathwise_where_a_cost_jumps() -> None:
    """It was chosen for that."""

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
        pyro.factor("f", torch.where(z > 0.5, 1.0, -0.3) + 0.4 * z)

    def guide() -> None:
        logits = pyro.param("q", torch.tensor(0.3))
        pyro.sample("z", dist.RelaxedBernoulliStraightThrough(torch.tensor(0.7), logits=logits))

    with filtered("error"):
        elbo = trained(TraceBackpropQ_ELBO(1), model, guide, steps=2)
    assert "z: Pathwise()" in str(elbo.plan)
