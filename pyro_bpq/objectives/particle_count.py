r"""How many particles run, and in which way.

Leave-one-out needs particles, and particles that run in one call cost little beside Pyro's Python code. Where the user
leaves their number open, the first step runs one particle, to see the program's structure, and then as many together
as the program is good for. They run in a plate that the program sees, if it computes the same costs for a particle
among others as for that particle on its own; else in a hidden dimension, if the program allows that; else one particle
runs. A number that the user has given is kept, and so are the ways, from the first one that serves.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import warnings
from dataclasses import replace
from typing import Any

import pyro
import torch

from pyro_bpq.errors import BPQWarning, StructureChangedError
from pyro_bpq.graph.scg import Plate
from pyro_bpq.objectives.observation import Mode, Observation, Runner, Transient
from pyro_bpq.objectives.programs import is_same_program, programs_of
from pyro_bpq.plan.particles import num_drawn_steps
from pyro_bpq.reruns.apart import Comparison, Program, Together, keeps_apart
from pyro_bpq.reruns.row_runs import is_due
from pyro_bpq.rollout.runs import Particles
from pyro_bpq.snapshots import restore, snapshot
from pyro_bpq.tracing.sandbox import Draws, LentBuffers, Sandbox
from pyro_bpq.tracing.traced_run import TracedRun

LOG = logging.getLogger("pyro_bpq")
# What torch, Pyro and this package raise where shapes do not fit; a program's own errors are left alone.
_DOES_NOT_FIT = (ValueError, RuntimeError, IndexError, TypeError, AssertionError, NotImplementedError)


class ParticleCount:
    """Settles how the particles of an objective run.

    Attributes:
        now: How they run at present.
        is_open: Whether their number is left open.
        said: What was settled last, and why; empty before.
    """

    def __init__(self) -> None:
        self.now, self.is_open = Particles(), False
        self._given_nesting = math.inf
        # What the number was settled for; a run of many is compared with runs of one before it counts.
        self._settled, self._is_compared = Transient(), False
        self._next: Particles | None = None
        self._sizes = dict[Plate, int]()
        # Structures whose particles were proved to keep apart, where the user has asked for a plate of them.
        self._proved = Together()
        # Whether the loss is to be summed over all values, once it is known; and how particles run if that fails.
        self._may_sum: bool | None = None
        self._otherwise: Particles | None = None
        self.said = ""

    def __repr__(self) -> str:
        return f"ParticleCount({self.now}, is_open={self.is_open})"

    @property
    def parts(self) -> tuple[Any, ...]:
        """What finds things out in a step."""
        return self, self._proved

    def is_settled(self, program: Program) -> bool:
        """Whether number and way are settled for a program."""
        if not self.is_open:
            return not self.now.has_plate or not self._proved.is_empty
        if not self._settled.items or self._next is not None or (self._may_sum and not self.now.sums):
            return False
        is_same = all(is_same_program(*pair) for pair in zip(self._settled.items, program[:2], strict=True))
        return is_same and (self.now.number == 1 or self._is_compared)

    def change(self, **changes: Any) -> None:
        """Sets options of the user's own; a number that is set is no longer open."""
        self.now = replace(self.drawn, **changes)
        self.is_open = self.is_open and "number" not in changes

    def leave_open(self) -> None:
        """Leaves the number open, from one particle on."""
        self.is_open, self._given_nesting = True, self.now.nesting

    def fix(self, number: int, is_vectorized: bool, nesting: float) -> None:
        """Runs so many particles from now on; an infinite bound on nested plates is found anew."""
        self.reopen()
        self.now, self.is_open = Particles(number, is_vectorized, False, nesting), False

    def reopen(self) -> None:
        """Leaves the number open again."""
        if not self.is_open:
            self.is_open, self.now = True, self._one
        self.open_state = None

    @property
    def open_state(self) -> Particles | None:
        """What was settled of an open number."""
        return self.now if self.is_open and self.now.number > 1 else self._next

    @open_state.setter
    def open_state(self, state: Particles | None) -> None:
        if self.is_open:
            self._take(state or self._one)
            self._settled, self._is_compared, self._may_sum = Transient(), False, None

    @property
    def for_evaluation(self) -> Particles:
        """One particle for programs that nothing is settled for: those of an evaluation may be others."""
        return self._one if self.is_open else self.now

    @property
    def drawn(self) -> Particles:
        """The particles of a run that draws: one where the loss is summed."""
        return self._one if self.now.sums else self.now

    def close(self) -> None:
        """One particle from now on, where the number is open: with more, sites in rows of data have no critics."""
        if self.is_open:
            self.open_state, self.is_open = None, False

    @property
    def _one(self) -> Particles:
        return Particles(nesting=self._given_nesting)

    def _take(self, particles: Particles) -> None:
        self.now, self._next = particles, None

    def observe(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        """The runs of a step, and what their sites are told."""
        if not self.is_open:
            return self._observe_given(runner, program, mode)
        if self.now.sums and mode.asks_for_more:
            return runner.observe(program, self.drawn, mode)
        if self._next is not None and mode.learning:
            self._is_compared = self._is_compared and not self._next.sums
            self._take(self._next)
        if not all(is_same_program(*pair) for pair in zip(self._settled.items, program[:2], strict=False)):
            self.open_state = None
        if self.now.number > 1:
            before = snapshot(self)
            many, warning = self._observe_many(runner, program, mode)
            if many is not None:
                return many
            try:
                found = runner.observe(program, self.now, mode)
            except BaseException:
                # With one particle it fails too: their number is not why.
                restore(self, before)
                raise
            if warning:
                warnings.warn(warning, BPQWarning, stacklevel=2)
            return found
        found = runner.observe(program, self.now, mode)
        if mode.learning and not self._settled.items:
            self._settle(runner, program, found, mode)
            if self._next is not None and mode.num_steps == 0:
                # Adam long remembers a first gradient that is noisier than those that follow.
                self._take(self._next)
                return self._observe_many(runner, program, mode, is_first=True)[0] or found
        if not found.ordered:
            self._turn_to_sums(runner, found.runs[0], mode)
        return found

    # A number that the user has given.

    def _observe_given(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        """Particles that are to run in one plate, but do not keep apart there, run in another way from now on."""
        if self.now.is_hidden:
            return self._observe_hidden(runner, program, mode)
        if not self.now.has_plate:
            return runner.observe(program, self.now, mode)
        draws = Draws()
        lends = self._proved.is_wanted(mode.learning, mode.num_steps) and runner.has_buffers
        with LentBuffers() if lends else contextlib.nullcontext() as lent:
            found = runner.observe(program, self.now, mode)
            mixes, when = False, (mode.learning, mode.num_steps)
            if not (mode.is_recorded or self._proved.knows(found.runs[0].key, *when)):
                mixes = self._proved.mixes(self._comparison(runner, program, found.runs[0], mode), *when)
            if lent is not None and not mixes:
                lent.keep()
        if not mixes:
            return found
        draws.again()
        runner.forget_last()
        is_hidden = not (found.runs[0].user_costs or found.runs[0].enumerated)
        self.now = Particles(self.now.number, False, is_hidden, self.now.nesting - 1)
        way = "in a dimension that the program does not see" if is_hidden else "one after the other"
        self._say(f"{self.now.number} particles run {way}.", ["In a plate the costs of one depend on the others."])
        return self._observe_given(runner, program, replace(mode, is_checked=True))

    def _observe_hidden(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        draws, known, found = Draws(), set(pyro.get_param_store().keys()), None
        is_checked = mode.is_checked or is_due(mode.num_steps) or runner.is_looking
        mode = replace(mode, is_checked=is_checked and not mode.is_recorded)
        try:
            found = runner.observe(program, self.now, mode)
        except StructureChangedError:
            raise
        except _DOES_NOT_FIT:
            # An error that has another cause comes again.
            pass
        created = _forget_parameters(known)
        if found is not None and not created:
            return found
        draws.again()
        apart = replace(self.now, is_hidden=False)
        if not created:
            self.now = apart
            self._say(f"{apart.number} particles run one after the other.", ["They do not run in hiding."])
        return runner.observe(program, apart, mode)

    # An open number.

    def _settle(self, runner: Runner, program: Program, found: Observation, mode: Mode) -> None:
        """Settles the number for the steps to come."""
        self._settled, self._is_compared = Transient(program[:2]), False
        number = 1 if mode.has_ranks or found.ordered else runner.good_for(found.runs[0])
        if number == 1:
            self.said = (
                "One particle runs: more are taken only where ten sites, or ten rows of data, or more have costs that "
                "are not known at other values, and no value steers the program."
            )
        if number > 1:
            # One particle may still have to be reckoned with in this step.
            self._next = Particles(number, True, False, self._nesting_beside(found.runs[0]))
        self._sizes = {} if found.ordered else dict(found.runs[0].plate_sizes)

    def _nesting_beside(self, traced: TracedRun) -> float:
        """Bound on the number of nested plates with that of the particles, from a run with the present ones."""
        if self.now.has_plate:
            return self.now.nesting
        return 1 + (traced.batch_ndim if math.isinf(self._given_nesting) else self._given_nesting)

    def _turn_to_sums(self, runner: Runner, traced: TracedRun, mode: Mode) -> None:
        """Lets the loss be summed over all values from a step on that is fixed beforehand, where that can be done."""
        if self._may_sum is False or self.now.sums or self.now.is_hidden or not mode.learning or mode.asks_for_more:
            return
        is_time = self._next is None and mode.num_steps + 1 >= num_drawn_steps(traced)
        if self._may_sum and not is_time:
            return
        rows = runner.rows_for(traced, self.now.number)
        self._may_sum = rows > 0
        if rows and is_time:
            self._otherwise = self.now
            self._next = Particles(rows, True, False, self._nesting_beside(traced), sums=True)

    def _lower(self, runner: Runner, traced: TracedRun) -> None:
        """Lets fewer particles run from the next step on, where plates have grown or values steer the program."""
        if traced.plate_sizes != self._sizes or self.now.is_hidden:
            self._sizes = dict(traced.plate_sizes)
            if self.now.sums:
                self._next = None if runner.rows_for(traced, self.now.number) else self._otherwise or self._one
                return
            number = runner.good_for(traced, self.now.number if self.now.has_plate else 1)
            if number < self.now.number and (number > 1 or self.now.is_hidden):
                self._next = replace(self.now, number=number) if number > 1 else self._one

    def _observe_many(
        self, runner: Runner, program: Program, mode: Mode, is_first: bool = False
    ) -> tuple[Observation | None, str]:
        """The runs of a step; ``None``, and one particle from now on, if the program runs in no other way.

        Where it has made parameters, ``None`` too, but with one particle for this step alone. Also a warning, to be
        given if it runs with one; empty where none is due.
        """
        settled_before = bool(self._settled.items)
        was_compared, settled, number = self._is_compared and settled_before, program[:2], self.now.number
        hidden = Particles(number, False, True, self._given_nesting)
        ways = [self.now] if self.now.is_hidden or self.now.sums else [self.now, hidden]
        reason, refused, draws = "", list[str](), Draws()
        if not settled_before and not self.now.sums:
            # Copied or loaded. Parameters of modules may be missing in Pyro's store, as in a new process.
            self._make_parameters(runner, program, mode)
        for way in ways:
            self.now = way
            is_known = was_compared and way is ways[0]
            found, reason = self._attempt(runner, program, mode, is_first, is_known)
            if found is not None:
                if not is_known:
                    where = "a dimension that the program does not see" if way.is_hidden else "a plate of their own"
                    what = "All values run" if way.sums else f"{number} particles run"
                    self._say(f"{what} in one call, in {where}.", refused)
                self._settled, self._is_compared = Transient(settled), True
                if mode.learning:
                    self._lower(runner, found.runs[0])
                    self._turn_to_sums(runner, found.runs[0], mode)
                return found, ""
            draws.again()
            if reason:
                first = reason.split("\n")[0].rstrip(".")
                refused.append(f"{number} do not run in {'hiding' if way.is_hidden else 'a plate'}: {first}.")
            if not reason:
                self._take(self._one)
                self._settled, self._next, self._is_compared = Transient(settled), way, False
                return None, ""
        self._settled = Transient(settled)
        if ways[0].sums:
            self._say("The loss is not summed over all values.", refused)
            self._take(self._otherwise or self._one)
            self._is_compared = self._may_sum = False
            return self._observe_many(runner, program, mode, is_first) if self.now.number > 1 else (None, "")
        self._take(self._one)
        self._say("One particle runs from now on.", refused)
        if not was_compared:
            return None, ""
        return None, (
            f"The program ran with {number} particles at once so far, but {reason}. From now on one "
            "particle runs; write num_particles=1 if that is what you want."
        )

    def _say(self, text: str, refused: list[str]) -> None:
        self.said = " ".join([text, *refused])
        LOG.info("%s", self.said)

    def _make_parameters(self, runner: Runner, program: Program, mode: Mode) -> None:
        """Runs one particle, so that no run of many makes parameters; draws and buffers stay as they are."""
        draws = Draws()
        with Sandbox(torch.get_rng_state(), runner.has_buffers), torch.no_grad():
            runner.trace(program, self._one, mode.num_steps)
        draws.again()

    def _attempt(
        self, runner: Runner, program: Program, mode: Mode, is_first: bool, was_compared: bool
    ) -> tuple[Observation | None, str]:
        """The runs of a step in the present way, or ``None`` and why they do not count.

        No reason is given where they have made parameters, which are forgotten, and nothing else speaks against them.
        """
        # Programs change: into another mode, or with what they learn.
        is_checked_again = mode.learning and is_due(mode.num_steps) and not mode.is_recorded
        compares = not was_compared or is_checked_again or runner.is_looking
        reason, known, found = "", set(pyro.get_param_store().keys()), None
        lends = compares and self.now.has_plate and runner.has_buffers
        with LentBuffers() if lends else contextlib.nullcontext() as lent:
            try:
                found = runner.observe(program, self.now, replace(mode, is_checked=compares))
                if compares and self.now.has_plate and known.issuperset(pyro.get_param_store().keys()):
                    reason = self._difference(runner, program, found.runs[0], mode, lent)
                    if lent is not None and not (reason or is_first):
                        # In the first step the run of one particle has written them.
                        lent.keep()
            except StructureChangedError:
                raise
            except _DOES_NOT_FIT as error:
                # An error that has another cause comes again.
                reason = f"it failed: {error}"
        created = _forget_parameters(known)
        return (None if reason or created else found), reason

    def _difference(
        self, runner: Runner, program: Program, many: TracedRun, mode: Mode, lent: LentBuffers | None
    ) -> str:
        """What tells a particle among others from one on its own; empty where nothing does."""
        compared = self._comparison(runner, program, many, mode)
        if not keeps_apart(compared, mode.num_steps, not self._is_compared):
            return "the costs of a particle depend on those it runs with"
        return "" if lent is None or lent.fit else "a buffer of a module takes the shape of the particles"

    def _comparison(self, runner: Runner, program: Program, many: TracedRun, mode: Mode) -> Comparison:
        trace = functools.partial(runner.trace, particles=self.now, num_steps=mode.num_steps)
        (together,) = programs_of(program, self.now)
        return Comparison(
            trace=lambda part, put: trace(part, put=put),
            one=program,
            together=together,
            many=many,
            number=self.now.number,
            nesting=int(self.now.nesting),
            has_buffers=runner.has_buffers,
        )


def _forget_parameters(known: set[str]) -> set[str]:
    """Forgets parameters that a run of many particles has made: they might have the shape of those."""
    store = pyro.get_param_store()
    created = set(store.keys()) - known
    for name in created:
        del store[name]
    return created
