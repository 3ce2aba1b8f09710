"""Programs that mix particles, and catch errors or change by themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import trained

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.testing import assert_unbiased


def coins(q: torch.Tensor) -> list[torch.Tensor]:
    """Draws that mix particles."""
    return [pyro.sample(f"z_{i}", dist.Bernoulli(logits=q[i])).sum() for i in range(2)]


def guide() -> None:
    coins(pyro.param("q", torch.tensor([0.3, -0.2])))


@contextlib.contextmanager
def tolerant() -> Iterator[None]:
    """Swallows errors where nothing shows it."""
    try:
        yield
    except RuntimeError:
        pass


def test_particles_that_mix_cost_what_they_cost_alone() -> None:
    """Also if a program catches what torch says of writes that it refuses."""

    def model() -> None:
        a, b = coins(torch.zeros(2))
        scale = torch.tensor(2.0)
        with tolerant():
            scale = torch.tensor(0.5).add_(a)
        pyro.sample("x", dist.Normal(a - 0.3 * b, scale), obs=torch.tensor(1.3))

    with pytest.warns(UserWarning):
        elbo = trained(TraceBackpropQ_ELBO(2, vectorize_particles=True), model, guide, steps=6, lr=1e-3)
    assert elbo.num_particles == 2 and not elbo.particles.now.has_plate, str(elbo)
    assert_unbiased(elbo.eval(), model, guide)


def test_costs_that_change_by_themselves_are_not_compared() -> None:
    calls = [0]

    def model() -> None:
        calls[0] += 1
        a, b = coins(torch.zeros(2))
        pyro.sample("x", dist.Normal((a - 0.3 * b) * calls[0] / 100, 1.0), obs=torch.tensor(1.3))
        pyro.factor("count", 0.0 * a - 1000.0 * calls[0])

    elbo = trained(TraceBackpropQ_ELBO(), model, guide, steps=40, lr=1e-3)
    assert elbo.particles.now.is_hidden and elbo.num_particles > 1, str(elbo)
    assert elbo.loss_and_grads(model, guide) == pytest.approx(1000.0 * calls[0], abs=100.0)
