"""Programs whose sites are all reparameterised: particles need no comparison, and cost what they cost in Trace_ELBO."""

from __future__ import annotations

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import Distribution
from pyro.infer.autoguide import AutoNormal
from steps import filtered, fresh, repeat

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import AllAction, Pathwise

PARTICLES, SEEDS, STEPS = 100, 10, 2


def plain() -> None:
    pyro.sample("rate", dist.LogNormal(0.0, 1.0))
    pyro.sample("shares", dist.Beta(2.0, 2.0).expand([2]).to_event(1))
    pyro.sample("x", dist.Normal(0.0, 1.0))


def asserting() -> None:
    with pyro.plate("components", 2):
        p = pyro.sample("p", dist.Beta(torch.tensor(1.1), torch.tensor(1.1)))
        assert p.shape == (PARTICLES, 1, 2)
        with pyro.plate("data", 40):
            pyro.sample("obs", dist.Bernoulli(p), obs=torch.ones(40, 2))


def prior() -> None:
    with pyro.plate("components", 2):
        pyro.sample("p", dist.Beta(pyro.param("a", lambda: torch.tensor(1.1)), torch.tensor(1.1)))


def auto() -> AutoNormal:
    guide = AutoNormal(plain)
    # What it makes in the shape of its first run would be that of a particle.
    guide()
    return guide


PROGRAMS = {"auto-normal": (plain, auto, 1), "asserts its shapes": (asserting, lambda: prior, 2)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run_once_and_nothing_is_said_of_particles_that_mix(name: str) -> None:
    (model, make, nesting), runs = PROGRAMS[name], itertools.count()

    def counted() -> None:
        next(runs)
        model()

    for seed in range(SEEDS):
        fresh(seed)
        guide, elbo = make(), TraceBackpropQ_ELBO(PARTICLES, vectorize_particles=True, max_plate_nesting=nesting)
        with filtered("error"):
            repeat(STEPS, elbo.loss_and_grads, counted, guide)
    assert next(runs) == SEEDS * STEPS


@pytest.mark.parametrize("change", ["", "law", "name"])
def test_programs_change_unseen(change: str) -> None:
    """A number that changes in many steps counts as a counter, which the key of a recording leaves out."""
    calls = [0]

    def sample(noisy: Distribution, smooth: Distribution) -> torch.Tensor:
        return pyro.sample(f"z{calls[0] * (change == 'name')}", noisy if change == "law" and calls[0] > 8 else smooth)

    def guide() -> None:
        calls[0] += 1
        q = pyro.param("q", torch.tensor(0.3))
        sample(dist.Bernoulli(q), dist.Normal(q, 1.0))

    elbo = TraceBackpropQ_ELBO(num_particles=1)
    repeat(20, elbo.loss_and_grads, lambda: pyro.factor("f", -sample(dist.Bernoulli(0.5), dist.Normal(0, 1))), guide)
    assert calls[0] == (22 if change else 20)
    ((name, spec),) = elbo.plan.layout.specs.items()
    assert isinstance(spec.estimator, AllAction if change == "law" else Pathwise)
    assert elbo.info[name]["estimator"] == spec.estimator
