r"""How many particles run, and in which way: a number that the user has given, or one that is left open."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import Any

from pyro import poutine
from pyro.poutine.messenger import Messenger

from pyro_bpq.objectives.observation import Mode, Observation, Runner
from pyro_bpq.objectives.open_number import OpenNumber
from pyro_bpq.objectives.programs import compared_alone, make_parameters
from pyro_bpq.reruns.apart import Together
from pyro_bpq.reruns.comparisons import TrackedRuns, is_due
from pyro_bpq.rollout.runs import Particles, Program
from pyro_bpq.tracing.sandbox import Draws, LentBuffers, Trial

LOG = logging.getLogger("pyro_bpq")


class GivenNumber:
    """Runs a number of particles that the user has given, in the first of these ways that serves.

        in a plate                as vectorize_particles=True asks; the program computes the same costs for each of them
        in a hidden dimension     where it does not
        one after the other       where it does not run in hiding either, or vectorize_particles=False

    Attributes:
        now: How they run at present.
        proved: Structures whose particles were proved to keep apart in a plate.
        tracked: The tracked runs so far, whose structure may be new.
        said: What was settled last, and why; empty before.
    """

    def __init__(self) -> None:
        self.now, self.proved, self.said = Particles(), Together(), ""
        self.tracked = TrackedRuns()

    @property
    def parts(self) -> tuple[Any, ...]:
        """What finds things out in a step."""
        return self, self.proved, self.tracked

    def is_settled(self) -> bool:
        """Whether their way is settled."""
        return not self.now.has_plate or not self.proved.is_empty

    def observe(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        """The runs of a step, and the signals of their sites."""
        if self.now.has_plate:
            return self._in_plate(runner, program, mode)
        if self.now.is_hidden:
            return self._hidden(runner, program, mode)
        return runner.observe(program, self.now, mode)

    def _in_plate(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        """Particles in a plate; those that do not keep apart there run in another way from now on."""
        draws, when, mixes = Draws(), (mode.learning, mode.num_steps), False
        if self.proved.is_empty and isinstance(poutine.unwrap(program.guide), Messenger):
            # Such guides of Pyro make parameters in the shape of their first run.
            make_parameters(runner, program, Particles(nesting=self.now.nesting - 1), mode.num_steps)
        lends = (self.proved.is_wanted(*when) or runner.is_looking) and runner.has_buffers
        with LentBuffers() if lends else contextlib.nullcontext() as lent:
            found = runner.observe(program, self.now, mode)
            many, is_new = found.runs[0], self.tracked.may_be_new(found.runs[0])
            if not mode.is_recorded and (is_new or many.mixes or not self.proved.knows(many.key, *when)):
                compared = compared_alone(runner, program, self.now, many, mode.num_steps)
                mixes = self.proved.mixes(compared, mode.num_steps, is_new)
            if lent is not None and not mixes:
                lent.keep()
        if not mixes:
            return found
        draws.again()
        runner.forget_last()
        is_hidden = not (found.runs[0].user_costs or found.runs[0].enumerated)
        self.now = Particles(self.now.number, False, is_hidden, self.now.nesting - 1)
        way = "in a dimension that the program does not see" if is_hidden else "one after the other"
        self._say(f"{self.now.number} particles run {way}. In a plate the costs of one depend on the others.")
        return self.observe(runner, program, replace(mode, is_checked=True))

    def _hidden(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        """Particles in hiding; those that do not run there run one after the other from now on."""
        draws = Draws()
        is_checked = mode.is_checked or is_due(mode.num_steps) or runner.is_looking
        hidden = replace(mode, is_checked=is_checked and not mode.is_recorded)
        with Trial() as trial:
            found = runner.observe(program, self.now, hidden)
        if not (trial.reason or trial.created):
            return found
        draws.again()
        apart = replace(self.now, is_hidden=False)
        if not trial.created:
            self.now = apart
            self._say(f"{apart.number} particles run one after the other. They do not run in hiding.")
        return runner.observe(program, apart, hidden)

    def _say(self, text: str) -> None:
        self.said = text
        LOG.info("%s", text)


class ParticleCount:
    """Holds the number of an objective's particles, and the way in which they run.

    Attributes:
        given: Runs a number that the user has set.
        open: Settles a number that is left open.
        is_open: Which of the two it is.
    """

    def __init__(self) -> None:
        self.given, self.open, self.is_open = GivenNumber(), OpenNumber(), False

    @property
    def parts(self) -> tuple[Any, ...]:
        """What finds things out in a step."""
        return (self, *self._used.parts)

    @property
    def _used(self) -> GivenNumber | OpenNumber:
        return self.open if self.is_open else self.given

    @property
    def now(self) -> Particles:
        """How particles run at present."""
        return self._used.now

    @property
    def nesting(self) -> float:
        """Bound on the number of nested plates, without that of the particles."""
        return self.now.nesting - self.now.is_vectorized

    @property
    def drawn(self) -> Particles:
        """The particles of a run that draws: one where the loss is summed over all values."""
        return self.open.one if self.now.sums else self.now

    @property
    def for_evaluation(self) -> Particles:
        """One particle for programs that nothing is settled for: those of an evaluation may be others."""
        return self.open.one if self.is_open else self.now

    @property
    def said(self) -> str:
        """What was settled last, and why; empty before."""
        return self._used.said

    def is_settled(self, program: Program) -> bool:
        """Whether number and way are settled for a program."""
        return self.open.is_settled(program) if self.is_open else self.given.is_settled()

    def observe(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        """The runs of a step, and the signals of their sites."""
        return self._used.observe(runner, program, mode)

    def change(self, **changes: Any) -> None:
        """Sets options of the user's own; a number that is set is no longer open."""
        now = replace(self.drawn, **changes)
        self.is_open = self.is_open and "number" not in changes
        self._used.now = now

    def leave_open(self) -> None:
        """Leaves the number open, from one particle on."""
        self.open, self.is_open = OpenNumber(self.now.nesting), True

    def close(self) -> None:
        """One particle from now on, where the number is open: with more, sites in rows of data have no critics."""
        if self.is_open:
            self.given.now, self.is_open = self.open.one, False

    @property
    def open_state(self) -> tuple[Any, ...] | None:
        """What was settled of an open number; ``None`` of a given one."""
        return self.open.state if self.is_open else None

    @open_state.setter
    def open_state(self, state: tuple[Any, ...] | None) -> None:
        if self.is_open:
            self.open.reset(state)
