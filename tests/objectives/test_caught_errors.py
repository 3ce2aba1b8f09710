"""Programs that catch an error which comes at some values of a site only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import SGD
from steps import fresh, repeat

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.testing import assert_unbiased


def coins(q: torch.Tensor, is_mixed: bool) -> list[torch.Tensor]:
    drawn = [pyro.sample(f"z_{i}", dist.Bernoulli(logits=q[i])) for i in range(2)]
    return [z.sum() for z in drawn] if is_mixed else drawn


def guide_of(is_mixed: bool) -> Any:
    return lambda: coins(pyro.param("q", torch.tensor([0.3, -0.2])), is_mixed)


def factor(a: torch.Tensor) -> torch.Tensor:
    return torch.linalg.cholesky((a - 0.5).reshape(*a.shape, 1, 1))[..., 0, 0]


def entry(a: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0.2, 0.9])[2 - a.long()]


READS = {"cholesky": (factor, torch.linalg.LinAlgError), "index": (entry, IndexError)}


def programs(name: str, is_mixed: bool) -> tuple[Any, Any]:
    read, error = READS[name]

    def model() -> None:
        a, b = coins(torch.zeros(2), is_mixed)
        try:
            scale = read(a)
        except error:
            scale = torch.ones(())
        pyro.sample("x", dist.Normal(a - 0.3 * b, 0.5 + scale), obs=torch.tensor(1.3))

    return model, guide_of(is_mixed)


def after(steps: int, model: Any, guide: Any, **options: Any) -> TraceBackpropQ_ELBO:
    """An ELBO after steps of SVI, whose handlers see what the programs do."""
    fresh()
    elbo = TraceBackpropQ_ELBO(**options)
    svi = SVI(model, guide, SGD({"lr": 1e-3}), elbo)
    repeat(steps, svi.step)
    return elbo


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("is_mixed", [False, True], ids=["apart", "mixed"])
@pytest.mark.parametrize("options", [{"num_particles": 1}, {"num_particles": 2}, {}], ids=["one", "two", "default"])
def test_who_catches_an_error_is_steered(name: str, is_mixed: bool, options: dict[str, Any]) -> None:
    model, guide = programs(name, is_mixed)
    elbo = after(12, model, guide, **options)
    assert elbo.runner.recordings.escaping and not elbo.particles.now.is_hidden
    assert_unbiased(elbo.eval(), model, guide)


@contextlib.contextmanager
def tolerant() -> Iterator[None]:
    """Swallows errors where nothing shows it."""
    try:
        yield
    except RuntimeError:
        pass


def hiding() -> tuple[Any, Any]:
    """Programs that mix particles, and catch what torch says of writes that it refuses."""

    def model() -> None:
        a, b = coins(torch.zeros(2), True)
        scale = torch.tensor(2.0)
        with tolerant():
            scale = torch.tensor(0.5).add_(a)
        pyro.sample("x", dist.Normal(a - 0.3 * b, scale), obs=torch.tensor(1.3))

    return model, guide_of(True)


def test_particles_that_mix_cost_what_they_cost_alone() -> None:
    with pytest.warns(UserWarning):
        elbo = after(6, *hiding(), num_particles=2, vectorize_particles=True)
    assert elbo.num_particles == 2 and not elbo.particles.now.has_plate, str(elbo)
    assert_unbiased(elbo.eval(), *hiding())


def test_costs_that_change_by_themselves_are_not_compared() -> None:
    calls = [0]

    def model() -> None:
        calls[0] += 1
        a, b = coins(torch.zeros(2), True)
        pyro.sample("x", dist.Normal((a - 0.3 * b) * calls[0] / 100, 1.0), obs=torch.tensor(1.3))
        pyro.factor("count", 0.0 * a - 1000.0 * calls[0])

    elbo = after(40, model, guide_of(True))
    assert elbo.particles.now.is_hidden and elbo.num_particles > 1, elbo.settled
    assert elbo.loss_and_grads(model, guide_of(True)) == pytest.approx(1000.0 * calls[0], abs=100.0)
