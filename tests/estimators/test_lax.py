"""LAX on a cost without gradient, and reparameterisation of drawn values."""

from __future__ import annotations

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import FakeProgram, learned_statistics, next_step, worst_z, wrong_sign
from steps import fresh, no_gradients, repeat
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators import LAX, LeaveOneOut, ScoreFunction
from pyro_bpq.estimators.base import SiteContext, SiteInfo
from pyro_bpq.estimators.reparameterise import reparameterise

ROWS = 20_000
KINDS = {
    "normal": (dist.Normal, (0.2, 0.9), (-9.0, 9.0)),
    "gamma": (dist.Gamma, (1.7, 2.0), (1e-9, 20.0)),
    "beta": (dist.Beta, (1.6, 2.4), (1e-9, 1.0 - 1e-9)),
    "log_normal": (dist.LogNormal, (-0.4, 0.6), (1e-9, 40.0)),
    "weibull": (dist.Weibull, (0.9, 1.8), (1e-9, 12.0)),
}
STEPS = (0.3, 0.7)


def stairs(value: Tensor) -> Tensor:
    """Two steps, no slope."""
    return 2.0 + 1.5 * (value > STEPS[0]).to(value.dtype) - 0.8 * (value > STEPS[1]).to(value.dtype)


def exact(kind: str) -> Tensor:
    """Gradient of the expected cost with respect to both parameters, by the midpoint rule between the steps."""
    make, numbers, (low, high) = KINDS[kind]
    params = [torch.tensor(number, requires_grad=True) for number in numbers]
    total = torch.zeros(())
    for start, end in ((low, STEPS[0]), (STEPS[0], STEPS[1]), (STEPS[1], high)):
        width = (end - start) / 400_000
        x = start + width * (torch.arange(400_000) + 0.5)
        total = total + (make(*params).log_prob(x).exp() * stairs(x)).sum() * width
    return torch.stack(torch.autograd.grad(total, params))


def context(kind: str, rows: int, seed: int, particles: int = 1) -> tuple[SiteContext, list[Tensor]]:
    make, numbers, _ = KINDS[kind]
    params = [torch.full((particles, rows), number, requires_grad=True) for number in numbers]
    fn = make(*params)
    torch.manual_seed(seed)
    value = fn.sample().unsqueeze(0)
    program = FakeProgram(stairs, value, fns=(fn,), seed=seed)
    score = fn.log_prob(value)
    return SiteContext(("z",), score, stairs(value), num_particles=particles, signals={"program": program}), params


def learned(kind: str, estimator: Any, particles: int = 1, steps: int = 400) -> dict[str, Tensor]:
    return learned_statistics(estimator, lambda n: context(kind, 64, n, particles)[0], 1, steps)


def gradients(kind: str, estimator: Any, state: dict[str, Tensor], particles: int = 1, calls: int = 12) -> Tensor:
    found = []
    for call in range(calls):
        made, params = context(kind, ROWS, 10_000 + call, particles)
        term = estimator(next_step(made, state, 400))
        found.append(torch.stack(torch.autograd.grad(term.surrogate.sum(), params), -1).mean(0))
    return torch.cat(found)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_unbiased_with_a_trained_network(kind: str) -> None:
    state = learned(kind, LAX())
    assert float(state["phi"][:, -34:].abs().max()) > 1e-2
    assert worst_z(exact(kind), gradients(kind, LAX(), state, calls=18)) < 4


def test_gradient_of_two_particles_is_unbiased() -> None:
    assert worst_z(exact("normal"), gradients("normal", LAX(), learned("normal", LAX(), 2), 2)) < 4


def test_worst_z_sees_a_wrong_sign() -> None:
    assert worst_z(exact("normal"), gradients("normal", wrong_sign(LAX()), learned("normal", LAX()))) > 6


@pytest.mark.parametrize("kind", KINDS)
def test_reparameterised_value_moves_as_its_quantile(kind: str) -> None:
    make, numbers, (low, _) = KINDS[kind]
    value = torch.tensor(0.45)
    params = [torch.tensor(number, requires_grad=True) for number in numbers]
    found = torch.autograd.grad(reparameterise(make(*params), value), params)
    assert float(reparameterise(make(*params), value).detach()) == pytest.approx(0.45)
    width = (0.45 - low) / 200_000
    x = low + width * (torch.arange(200_000) + 0.5)
    mass = (make(*params).log_prob(x).exp() * width).sum()
    expected = [-g / make(*numbers).log_prob(value).exp() for g in torch.autograd.grad(mass, params)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-5)


def floor_model() -> None:
    with pyro.plate("rows", 2):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0))
        w = pyro.sample("w", dist.Gamma(torch.full((2, 2), 2.0), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z.floor() + w.floor().sum(-1), 1.0), obs=torch.tensor([0.4, 1.7]))


def floor_guide() -> None:
    lax = {"bpq": {"estimator": LAX()}}
    with pyro.plate("rows", 2):
        pyro.sample("z", dist.Normal(pyro.param("loc", torch.tensor([0.2, 0.7])), 0.8), infer=lax)
        rate = pyro.param("rate", torch.tensor([[1.5, 2.0], [1.0, 2.5]]))
        pyro.sample("w", dist.Gamma(torch.tensor(2.0), rate).to_event(1), infer=lax)


def test_lax_serves_a_program() -> None:
    # Against many particles of the score function: the same mean within the errors of both.
    means = []
    for estimator in (LAX(), ScoreFunction(LeaveOneOut())):
        fresh()
        guide = pyro.poutine.infer_config(
            floor_guide, lambda site, e=estimator: {"bpq": {"estimator": e}} if site["name"] in "zw" else {}
        )
        elbo = TraceBackpropQ_ELBO(num_particles=400, vectorize_particles=True, max_plate_nesting=1)
        repeat(20, elbo.loss_and_grads, floor_model, guide)
        elbo.eval()
        samples = []
        for _ in range(90):
            no_gradients()
            elbo.loss_and_grads(floor_model, guide)
            samples.append(torch.cat([p.grad.flatten() for p in pyro.get_param_store()._params.values()]))
        stacked = torch.stack(samples)
        means.append((stacked.mean(0), stacked.std(0) / math.sqrt(len(stacked))))
    (ours, error), (theirs, other) = means
    assert float((error.square() + other.square()).sqrt().max()) < 0.05 * float(theirs.abs().max())
    assert float(((ours - theirs).abs() / (error.square() + other.square()).sqrt()).max()) < 4


def test_sites_that_cannot_be_served_say_so() -> None:
    assert "ScoreFunction()" in (LAX().unsupported(SiteInfo("z", "Poisson", False, None, 1)) or "")

    def guide() -> None:
        pyro.sample(
            "z", dist.StudentT(3.0, pyro.param("loc", torch.zeros(())), 1.0), infer={"bpq": {"estimator": LAX()}}
        )

    def model() -> None:
        pyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.raises(UnsupportedSiteError, match="Pathwise"):
        TraceBackpropQ_ELBO().loss_and_grads(model, guide)
