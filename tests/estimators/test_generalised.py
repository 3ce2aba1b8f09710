"""Generalised reparameterisation against quadrature, on whole programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import trained
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators import GeneralisedReparameterisation
from pyro_bpq.estimators.base import SiteInfo

KINDS = {
    "gamma": (dist.Gamma, (0.8, 1.3), (1.5, 1.0), (1e-12, 30.0)),
    "beta": (dist.Beta, (0.9, 1.7), (2.0, 1.5), (1e-12, 1.0 - 1e-12)),
    "log_normal": (dist.LogNormal, (-0.3, 0.35), (0.2, 0.5), (1e-9, 20.0)),
}


def program(kind: str, estimator: Any) -> tuple[Any, Any]:
    make, numbers, prior, _ = KINDS[kind]

    def model() -> None:
        z = pyro.sample("z", make(*(torch.tensor(p) for p in prior)))
        y = pyro.sample("y", dist.Bernoulli(logits=z - 0.4))
        pyro.sample("x", dist.Normal(z + 0.5 * y, 0.7), obs=torch.tensor(1.4))

    def guide() -> None:
        params = [pyro.param(f"p{i}", torch.tensor(number)) for i, number in enumerate(numbers)]
        z = pyro.sample("z", make(*params), infer={"bpq": {"estimator": estimator}})
        # A discrete site downstream: its gradient flows through the attached value too.
        pyro.sample("y", dist.Bernoulli(logits=0.8 * z))

    return model, guide


def exact(kind: str) -> Tensor:
    make, numbers, prior, (low, high) = KINDS[kind]
    params = [torch.tensor(number, requires_grad=True) for number in numbers]
    # Midpoints of a grid that is fine near zero, where the density may be infinite.
    edges = low + (high - low) * torch.linspace(0.0, 1.0, 400_001) ** 4
    z, width = (edges[1:] + edges[:-1]) / 2, edges.diff()
    fn = make(*params)
    log_q = fn.log_prob(z)
    cost = log_q - make(*(torch.tensor(p) for p in prior)).log_prob(z)
    for y in (0.0, 1.0):
        q, p = dist.Bernoulli(logits=0.8 * z), dist.Bernoulli(logits=z - 0.4)
        value = torch.tensor(y)
        likelihood = dist.Normal(z + 0.5 * y, 0.7).log_prob(torch.tensor(1.4))
        cost = cost + q.log_prob(value).exp() * (q.log_prob(value) - p.log_prob(value) - likelihood)
    return torch.stack(torch.autograd.grad((log_q.exp() * cost * width).sum(), params))


def worst_z(kind: str, estimator: Any, steps: int = 100, gate: float = 0.02) -> float:
    model, guide = program(kind, estimator)
    elbo = trained(
        TraceBackpropQ_ELBO(num_particles=10_000, vectorize_particles=True, max_plate_nesting=1), model, guide, steps=5
    )
    elbo.eval()
    found = []
    for _ in range(steps):
        for leaf in pyro.get_param_store()._params.values():
            leaf.grad = None
        elbo.loss_and_grads(model, guide)
        found.append(torch.stack([p.grad for p in pyro.get_param_store()._params.values()]))
    samples, truth = torch.stack(found), exact(kind)
    error = samples.std(0) / math.sqrt(steps)
    assert float(error.max()) < gate / 4 * float(truth.abs().max()), "too weak a test"
    return float(((samples.mean(0) - truth).abs() / error).max())


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_unbiased(kind: str) -> None:
    assert worst_z(kind, GeneralisedReparameterisation()) < 4


@dataclass(frozen=True)
class NoCorrection(GeneralisedReparameterisation):
    def correction(self, fn: Any, value: Tensor) -> Tensor:
        return 0.0 * super().correction(fn, value)


@dataclass(frozen=True)
class FlippedCorrection(GeneralisedReparameterisation):
    def correction(self, fn: Any, value: Tensor) -> Tensor:
        return -super().correction(fn, value)


@pytest.mark.parametrize("estimator", [NoCorrection(), FlippedCorrection()], ids=lambda e: type(e).__name__)
def test_worst_z_sees_a_wrong_correction(estimator: Any) -> None:
    assert worst_z("gamma", estimator, 20, gate=1.0) > 6


def test_correction_of_a_log_normal_vanishes() -> None:
    loc, scale = torch.tensor(-0.3, requires_grad=True), torch.tensor(0.6, requires_grad=True)
    log_q = GeneralisedReparameterisation().correction(dist.LogNormal(loc, scale), torch.tensor(1.7))
    for gradient in torch.autograd.grad(log_q, (loc, scale)):
        assert abs(float(gradient)) < 1e-12


def test_sites_without_a_transform_say_so() -> None:
    site = SiteInfo("z", "Bernoulli", False, None, 1)
    assert GeneralisedReparameterisation().unsupported(site) is None
    with pytest.raises(UnsupportedSiteError, match="Cauchy"):
        GeneralisedReparameterisation().attach(dist.Cauchy(0.0, 1.0), torch.tensor(0.3), torch.Generator())
