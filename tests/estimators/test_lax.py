"""LAX on a cost without gradient, and reparameterisation of drawn values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import worst_z
from torch import Tensor

from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators import LAX
from pyro_bpq.estimators.base import SiteContext, SiteInfo, initial_statistics
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


class Drawn(NamedTuple):
    """What the estimator asks of the program."""

    value: Tensor
    fn: Any

    def stack(self, pick: Callable[[Any], Tensor], event_ndim: int) -> Tensor:
        return pick(self.fn).unsqueeze(0)


def context(kind: str, rows: int, seed: int, particles: int = 1) -> tuple[SiteContext, list[Tensor]]:
    make, numbers, _ = KINDS[kind]
    params = [torch.full((particles, rows), number, requires_grad=True) for number in numbers]
    fn = make(*params)
    torch.manual_seed(seed)
    value = fn.sample().unsqueeze(0)
    signals = {"program": Drawn(value, fn)}
    return SiteContext(("z",), fn.log_prob(value), stairs(value), num_particles=particles, signals=signals), params


def after(made: SiteContext, state: dict[str, Tensor], steps: int) -> SiteContext:
    return replace(made, statistics=state, count=torch.full((1,), float(steps)))


def gradients(kind: str, estimator: LAX, particles: int = 1, calls: int = 12) -> Tensor:
    """Independent gradients of a row, after steps in which the network has learned."""
    state = {name: torch.as_tensor(value)[None] for name, value in initial_statistics(estimator, 1).items()}
    for step in range(400):
        state |= estimator(after(context(kind, 64, step, particles)[0], state, step)).statistics
    assert float(state["phi"][:, -34:].abs().max()) > 1e-2
    found = []
    for call in range(calls):
        made, params = context(kind, ROWS, 10_000 + call, particles)
        term = estimator(after(made, state, 400))
        found.append(torch.stack(torch.autograd.grad(term.surrogate.sum(), params), -1).mean(0))
    return torch.cat(found)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_unbiased_with_a_trained_network(kind: str) -> None:
    assert worst_z(exact(kind), gradients(kind, LAX(), calls=18)) < 4


def test_gradient_of_two_particles_is_unbiased() -> None:
    assert worst_z(exact("normal"), gradients("normal", LAX(), 2)) < 4


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


def test_sites_that_cannot_be_served_say_so() -> None:
    assert "ScoreFunction()" in (LAX().unsupported(SiteInfo("z", "Poisson", False, None, 1)) or "")
    # What is known of a Student-t distribution shows when it is drawn.
    fn = dist.StudentT(3.0, pyro.param("loc", torch.zeros(())), 1.0)
    with pytest.raises(UnsupportedSiteError, match="Pathwise"):
        reparameterise(fn, torch.tensor(0.4))
