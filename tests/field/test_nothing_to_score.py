"""Programs whose sites are all reparameterised: particles need no comparison, and cost what they cost in Trace_ELBO."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
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


def auto() -> Callable[[], object]:
    guide = AutoNormal(plain)
    # What it makes in the shape of its first run would be that of a particle.
    guide()
    return guide


PROGRAMS = {"auto-normal": (plain, auto, 1), "asserts its shapes": (asserting, lambda: prior, 2)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_said_of_particles_that_mix(name: str) -> None:
    model, make, nesting = PROGRAMS[name]
    for seed in range(SEEDS):
        fresh(seed)
        guide, elbo = make(), TraceBackpropQ_ELBO(PARTICLES, vectorize_particles=True, max_plate_nesting=nesting)
        with filtered("error"):
            repeat(STEPS, elbo.loss_and_grads, model, guide)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_runs_the_programs_once(name: str) -> None:
    model, make, nesting = PROGRAMS[name]
    guide, elbo, runs = make(), TraceBackpropQ_ELBO(PARTICLES, vectorize_particles=True, max_plate_nesting=nesting), 0

    def counted() -> None:
        nonlocal runs
        runs += 1
        model()

    with filtered("ignore"):
        repeat(STEPS, elbo.loss_and_grads, counted, guide)
    assert runs == STEPS


@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_pyro(seed: int) -> None:
    guide = auto()

    def step(elbo: Trace_ELBO | TraceBackpropQ_ELBO) -> tuple[float, list[torch.Tensor]]:
        pyro.set_rng_seed(seed)
        for parameter in guide.parameters():
            parameter.grad = None
        return elbo.loss_and_grads(plain, guide), [parameter.grad for parameter in guide.parameters()]

    options = {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": 1}
    elbo, (expected, exact) = TraceBackpropQ_ELBO(**options), step(Trace_ELBO(**options))
    for loss, gradients in (step(elbo) for _ in range(STEPS)):
        assert loss == pytest.approx(expected, rel=1e-12)
        for ours, theirs in zip(gradients, exact, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_late", [False, True])
def test_noise_that_no_call_shows_is_scored(is_late: bool) -> None:
    """A number that changes in many steps counts as a counter, which the key of a recording leaves out."""
    calls = [0]

    def model() -> None:
        calls[0] += 1
        law = dist.Bernoulli(0.5) if calls[0] > 8 else dist.Normal(0.0, 1.0)
        pyro.factor("f", -pyro.sample("z", law))

    def guide() -> None:
        q = pyro.param("q", torch.tensor(0.3))
        pyro.sample("z", dist.Bernoulli(q) if calls[0] > 7 else dist.Normal(q, 1.0))

    elbo = TraceBackpropQ_ELBO(num_particles=1)
    repeat(20 if is_late else 8, elbo.loss_and_grads, model, guide)
    assert isinstance(elbo.plan.layout.specs["z"].estimator, AllAction if is_late else Pathwise)
    assert ("z" in elbo.info) is is_late
