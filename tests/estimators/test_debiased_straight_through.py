"""Straight-through differences: what costs nothing. That they are exact is tested with the others, over all draws."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import real
from problems import moments_of_draws

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import DebiasedStraightThrough, MuProp


def linear_guide() -> None:
    pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", real(0.3, -0.8))).to_event(1))


def linear_model() -> None:
    z = pyro.sample("z", dist.Bernoulli(logits=torch.zeros(2, dtype=torch.float64)).to_event(1))
    pyro.factor("linear", (z * real(1.0, -2.0)).sum())


@pytest.mark.parametrize("particles", [1, 2])
@pytest.mark.parametrize("estimator", [DebiasedStraightThrough(), MuProp()], ids=repr)
def test_linear_costs_have_no_variance(estimator: Any, particles: int) -> None:
    elbo = TraceBackpropQ_ELBO(particles, estimator=estimator).eval()
    elbo.loss_and_grads(linear_model, linear_guide)
    assert moments_of_draws(elbo, linear_model, linear_guide).total_variance < 1e-20
