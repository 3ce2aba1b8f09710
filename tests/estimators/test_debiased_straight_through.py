"""Straight-through differences: what costs nothing. That they are exact is tested with the others, over all draws."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import real
from problems import moments_of_draws
from steps import coins_guide

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import DebiasedStraightThrough, MuProp


def linear_model() -> None:
    z = pyro.sample("z", dist.Bernoulli(torch.full((3,), 0.5)).to_event(1))
    pyro.factor("linear", (z * real(1.0, -2.0, 0.7)).sum())


@pytest.mark.parametrize("particles", [1, 2])
@pytest.mark.parametrize("estimator", [DebiasedStraightThrough(), MuProp()], ids=repr)
def test_linear_costs_have_no_variance(estimator: Any, particles: int) -> None:
    elbo = TraceBackpropQ_ELBO(particles, estimator=estimator).eval()
    elbo.loss_and_grads(linear_model, coins_guide)
    assert moments_of_draws(elbo, linear_model, coins_guide).total_variance < 1e-20
