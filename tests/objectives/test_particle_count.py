"""How many particles run, with a runner that does what a test says."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyro
import pytest
import torch

from pyro_bpq.errors import BPQWarning
from pyro_bpq.objectives import open_number as module
from pyro_bpq.objectives.observation import Mode, Observation
from pyro_bpq.objectives.particle_count import ParticleCount
from pyro_bpq.rollout.runs import Particles, Program


def model() -> None:
    """A program that is never run."""


PROGRAM = Program(model, model, (), {})
PLATE, HIDDEN = Particles(8, True, False, 2), Particles(8, False, True)


class Runner:
    """Refuses some ways to run; every program is good for so many particles."""

    has_buffers, is_looking, mixes = False, False, False

    def __init__(self, refuses: Callable[[Particles], bool] = lambda _: False, number: int = 8) -> None:
        self.refuses, self.number = refuses, number
        self.ran: list[Particles] = []
        self.sizes: dict[Any, int] = {}

    def forget_last(self) -> None:
        """Nothing to forget."""

    def good_for(self, traced: Any, particles: int = 1) -> int:
        """The number that the test says."""
        return self.number

    def trace(self, program: Any, particles: Particles, num_steps: int, *, warns: bool = True, put: Any = None) -> Any:
        """No comparison is made here."""
        raise AssertionError

    def observe(self, program: Any, particles: Particles, mode: Mode) -> Observation:
        """One run."""
        torch.rand(2)
        if self.refuses(particles):
            raise RuntimeError("shapes do not fit")
        self.ran.append(particles)
        known = {
            "user_costs": {},
            "enumerated": (),
            "key": "k",
            "reads": None,
            "mixes": self.mixes and particles.has_plate,
        }
        run: Any = SimpleNamespace(batch_ndim=1, plate_sizes=self.sizes, **known)
        return Observation((run,))


@pytest.fixture(autouse=True)
def particles_keep_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "keeps_apart", lambda compared, *_: not compared.many.mixes)


def open_count() -> ParticleCount:
    count = ParticleCount()
    count.leave_open()
    return count


def run(count: ParticleCount, runner: Runner, steps: int = 4, start: int = 0) -> None:
    for step in range(start, start + steps):
        count.observe(runner, PROGRAM, Mode(learning=True, num_steps=step))


def test_an_open_number_is_settled_in_the_first_step() -> None:
    count, runner = open_count(), Runner()
    run(count, runner)
    assert runner.ran == [Particles(), *[PLATE] * 4] and count.now == PLATE


def test_what_does_not_run_in_a_plate_is_hidden() -> None:
    count, runner = open_count(), Runner(lambda particles: particles.has_plate)
    run(count, runner)
    assert runner.ran == [Particles(), *[HIDDEN] * 4]


def test_what_mixes_in_a_plate_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "keeps_apart", lambda *_: False)
    count, runner = open_count(), Runner()
    run(count, runner)
    assert count.now == HIDDEN


def test_particles_that_a_tracked_run_sees_meet_are_hidden_in_this_step() -> None:
    count, runner = open_count(), Runner()
    # No comparison is due in step 11.
    run(count, runner, 11)
    assert count.now == PLATE
    runner.mixes = True
    run(count, runner, 1, 11)
    assert count.now == HIDDEN and runner.ran[-2:] == [PLATE, HIDDEN]


def test_what_runs_in_no_way_runs_alone_and_draws_what_it_would_have_drawn() -> None:
    count, runner = open_count(), Runner(lambda particles: particles.number > 1)
    torch.manual_seed(0)
    run(count, runner)
    after = torch.rand(3)
    assert runner.ran == [Particles()] * 4
    torch.manual_seed(0)
    torch.rand(2 * 4)
    assert torch.equal(after, torch.rand(3))


def test_a_way_that_fails_later_is_left_with_a_warning() -> None:
    count, runner = open_count(), Runner()
    run(count, runner, 3)
    runner.refuses = lambda particles: particles.number > 1
    with pytest.warns(BPQWarning, match="ran with 8 particles at once so far, but it failed: shapes do not fit"):
        run(count, runner, 1, 3)
    assert count.now == Particles()


def test_a_program_that_fails_with_one_particle_too_changes_nothing() -> None:
    count, runner = open_count(), Runner()
    run(count, runner, 3)
    runner.refuses = lambda _: True
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run(count, runner, 1, 3)
    assert count.now == PLATE
    runner.refuses = lambda _: False
    run(count, runner, 1, 3)
    assert runner.ran[-1] == PLATE


def test_fewer_particles_run_where_plates_have_grown() -> None:
    count, runner = open_count(), Runner()
    run(count, runner, 3)
    runner.sizes, runner.number = {"rows": 100}, 3
    run(count, runner, 2, 3)
    assert count.now.number == 3


def test_a_number_that_is_set_is_no_longer_open(monkeypatch: pytest.MonkeyPatch) -> None:
    count, runner = open_count(), Runner()
    run(count, runner, 2)
    monkeypatch.setattr(count.given.proved, "mixes", lambda *_: False)
    count.change(number=2)
    run(count, runner, 1, 2)
    assert not count.is_open and count.now.number == 2


def test_state_goes_into_a_count_that_is_open() -> None:
    count, runner = open_count(), Runner()
    run(count, runner, 2)
    other = open_count()
    other.open_state = count.open_state
    assert other.now == PLATE
    closed = ParticleCount()
    closed.open_state = count.open_state
    assert closed.now == Particles()


def test_evaluations_take_one_where_the_number_is_open() -> None:
    count, runner = open_count(), Runner()
    run(count, runner, 2)
    assert count.for_evaluation == Particles()
    count.close()
    assert count.now == Particles() and not count.is_open


def test_given_particles_that_cannot_be_hidden_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    count, runner = ParticleCount(), Runner(lambda particles: particles.is_hidden)
    count.change(number=8, is_vectorized=True, nesting=2)
    monkeypatch.setattr(count.given.proved, "mixes", lambda *_: True)
    run(count, runner, 2)
    assert runner.ran == [Particles(8, True, False, 2), *[Particles(8, False, False, 1)] * 2]


def test_parameters_that_given_hidden_particles_make_are_made_again_without_them() -> None:
    class Making(Runner):
        """Makes a parameter in the third step, whose shape tells how it was made."""

        def observe(self, program: Any, particles: Particles, mode: Mode) -> Observation:
            if mode.num_steps >= 2:
                pyro.param("late", lambda: torch.zeros(8 if particles.is_hidden else 1))
            return super().observe(program, particles, mode)

    count, runner = ParticleCount(), Making()
    count.change(number=8, is_hidden=True)
    run(count, runner)
    assert pyro.param("late").shape == (1,)
    hidden, apart = Particles(8, is_hidden=True), Particles(8)
    assert runner.ran == [hidden, hidden, hidden, apart, hidden]


def test_the_evaluation_of_another_program_keeps_what_was_settled() -> None:
    def other() -> None:
        """Another program."""

    count, runner = open_count(), Runner()
    run(count, runner, 3)
    count.observe(runner, Program(other, other, (), {}), Mode(learning=False, num_steps=3))
    assert runner.ran[-1] == Particles()
    run(count, runner, 1, 3)
    assert count.now == runner.ran[-1] == PLATE
