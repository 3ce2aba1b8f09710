"""Sites of rejection samplers: reparameterised in part, with a score term for the rest."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions.testing.rejection_gamma import RejectionStandardGamma
from pyro.infer import TraceGraph_ELBO
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO

SHAPE, SEEN = torch.tensor(1.7, dtype=torch.float64), torch.tensor(1.5, dtype=torch.float64)


def model() -> None:
    z = pyro.sample("z", dist.Gamma(2.0 * torch.ones_like(SEEN), 1.0))
    pyro.sample("x", dist.Normal(z, 1.0), obs=SEEN)


def guide() -> None:
    pyro.sample("z", RejectionStandardGamma(pyro.param("shape", SHAPE.clone())))


def quadrature() -> Tensor:
    """The derivative of the loss by the shape, from a sum over a grid of ``z``."""
    shape = SHAPE.clone().requires_grad_()
    z = torch.linspace(1e-6, 40.0, 400_000, dtype=torch.float64)
    log_q = dist.Gamma(shape, 1.0).log_prob(z)
    log_p = dist.Gamma(2.0, 1.0).log_prob(z) + dist.Normal(z, 1.0).log_prob(SEEN)
    loss = torch.trapezoid(log_q.exp() * (log_q - log_p), z)
    (found,) = torch.autograd.grad(loss, shape)
    return found


def z_score(make: Any) -> float:
    """Distance of a mean gradient from the truth, in standard errors."""
    found = []
    for seed in range(20):
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        elbo = make(num_particles=20_000, vectorize_particles=True, max_plate_nesting=0)
        elbo.loss_and_grads(model, guide)
        found.append(pyro.param("shape").grad)
    gradients = torch.stack(found)
    return float((gradients.mean() - quadrature()) / (gradients.std() / len(found) ** 0.5))


@pytest.mark.parametrize(("make", "is_right"), [(TraceBackpropQ_ELBO, True), (TraceGraph_ELBO, False)])
def test_score_term_of_a_rejection_sampler_counts(make: Any, is_right: bool) -> None:
    assert (abs(z_score(make)) < 4) == is_right
