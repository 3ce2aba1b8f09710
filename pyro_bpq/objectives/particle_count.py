r"""How many particles run, and in which way: a number that the user has given, or one that is left open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyro_bpq.objectives.given_number import GivenNumber
from pyro_bpq.objectives.observation import Observation, Runner
from pyro_bpq.objectives.open_number import OpenNumber
from pyro_bpq.objectives.staged import Mode
from pyro_bpq.rollout.runs import Particles, Program


class ParticleCount:
    """Holds the number of an objective's particles, and the way in which they run.

    Attributes:
        given: Runs a number that the user, or a choice, has set.
        open: Settles a number that is left open.
        is_open: Which of the two it is.
    """

    def __init__(self) -> None:
        self.given, self.open, self.is_open = GivenNumber(), OpenNumber(), False

    def __repr__(self) -> str:
        return f"ParticleCount({self.now}, is_open={self.is_open})"

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

    def reopen(self) -> None:
        """Leaves the number open again."""
        self.is_open = True
        self.open.reset()

    def fix(self, number: int, is_vectorized: bool, nesting: float) -> None:
        """Runs so many particles from now on; an infinite bound on nested plates is found anew."""
        self.given.now, self.is_open = Particles(number, is_vectorized, False, nesting), False

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
