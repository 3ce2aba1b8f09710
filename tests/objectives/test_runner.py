"""A step runner, built alone: how particles run, what a step leaves behind, what stays as it was."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_bpq import MLPCritic
from pyro_bpq.critics.bank import CriticBank
from pyro_bpq.objectives.observation import Mode, NoiseSource
from pyro_bpq.objectives.runner import StepRunner
from pyro_bpq.plan.planner import Planner
from pyro_bpq.plan.rules import MOST_PARTICLES
from pyro_bpq.rollout.runs import Particles, Program

ROWS = 3


def guide() -> None:
    with pyro.plate("rows", ROWS):
        y = pyro.sample("y", dist.Bernoulli(logits=pyro.param("q", lambda: torch.zeros(ROWS))))
        pyro.sample("z", dist.Bernoulli(logits=y - 0.4))


def model() -> None:
    with pyro.plate("rows", ROWS):
        y = pyro.sample("y", dist.Bernoulli(torch.tensor(0.3)))
        z = pyro.sample("z", dist.Bernoulli(0.2 + 0.5 * y))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.ones(ROWS))


PROGRAM = Program(model, guide, (), {})
WAYS = {
    "one": Particles(),
    "apart": Particles(4),
    "plate": Particles(4, is_vectorized=True, nesting=2),
    "hidden": Particles(4, is_hidden=True),
}


def runner(**options: Any) -> StepRunner:
    critics = CriticBank(0, True, False, 2048)
    return StepRunner(Planner(None, MLPCritic(), "chain"), options.pop("structure", "auto"), critics, **options)


@pytest.mark.parametrize("way", WAYS)
def test_particles_run_as_they_are_told(way: str) -> None:
    found, particles = runner(), WAYS[way]
    for step in range(6):
        seen = found.observe(PROGRAM, particles, Mode(learning=True, num_steps=step))
        (item,) = seen.items
        assert len(seen.runs) == (1 if way in ("one", "plate") else 4)
        assert item.signals.rollout.num_particles == particles.number
        assert item.signals.rollout.is_vectorized == (way == "plate")
        # Values of all particles are there, and differ.
        cost = item.signals.costs[0]
        assert cost.shape[1] == particles.number
    assert not found.is_looking and found.plans.last is not None


def test_a_look_learns_nothing() -> None:
    found = runner()
    found.observe(PROGRAM, WAYS["one"], Mode())
    assert not found.structure.graphs and not found.critics.blocks


def test_further_runs_leave_the_last_plan_alone() -> None:
    found = runner()
    found.observe(PROGRAM, WAYS["one"], Mode(learning=True))
    last = found.plans.last
    traced = found.trace(PROGRAM, WAYS["one"], 0)
    staged = found.stage([traced], [PROGRAM], WAYS["one"], Mode())
    assert found.plans.last is last and staged.signals.layout is last.plan.layout  # type: ignore[union-attr]
    assert staged.signals.rerun is None


def test_a_forgotten_step_is_planned_anew() -> None:
    found = runner()
    found.observe(PROGRAM, WAYS["one"], Mode(learning=True))
    found.forget_last()
    assert found.plans.last is None
    found.observe(PROGRAM, WAYS["one"], Mode(learning=True))
    assert found.plans.last is not None


def short_guide() -> None:
    with pyro.plate("rows", ROWS):
        pyro.sample("y", dist.Bernoulli(logits=pyro.param("q", lambda: torch.zeros(ROWS))))


def short_model() -> None:
    with pyro.plate("rows", ROWS):
        y = pyro.sample("y", dist.Bernoulli(torch.tensor(0.3)))
        pyro.sample("x", dist.Normal(y, 1.0), obs=torch.ones(ROWS))


@pytest.mark.parametrize(
    ("program", "number"),
    [(PROGRAM, MOST_PARTICLES), (Program(short_model, short_guide, (), {}), 1)],
    ids=["noisy", "all known"],
)
def test_a_program_is_good_for_one_particle_where_nothing_is_noisy(program: Program, number: int) -> None:
    found = runner()
    assert found.good_for(found.trace(program, WAYS["one"], 0)) == 1  # nothing is planned yet
    seen = found.observe(program, WAYS["one"], Mode(learning=True))
    assert found.good_for(seen.runs[0]) == number


def test_noise_comes_from_generators_of_its_own() -> None:
    first, second = NoiseSource(3), NoiseSource(3)
    before = torch.get_rng_state()
    drawn = [torch.rand(2, generator=source()) for source in (first, second, first)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert first.number == 2 and torch.equal(before, torch.get_rng_state())
