r"""How many particles run, and in which way.

A number that the user has given is kept. Its particles run, in the first of these ways that serves,

    in a plate                 as vectorize_particles=True asks; the program computes the same costs for each of them
    in a hidden dimension      where it does not
    one after the other        where it does not run in hiding either, or vectorize_particles=False

A number that the user leaves open goes through these states:

    state          particles         what comes next
    new            one               the first step that learns: it shows what number the program is good for
    alone          one               a change of the program, which makes it new; or sums
    in a plate     up to eight       hidden, where they do not run, or not with the costs of particles on their own
    hidden         up to eight       alone, where they do not run
    sums           one a value       how particles ran before, where the loss is not that of all values

What a step finds out holds from the next one on that learns; but in the very first step many particles run at once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pyro_bpq.errors import BPQWarning
from pyro_bpq.graph.scg import Plate
from pyro_bpq.objectives.observation import Observation, Runner
from pyro_bpq.objectives.programs import is_same_program, programs_of
from pyro_bpq.objectives.staged import Mode, Transient
from pyro_bpq.plan.particles import num_drawn_steps
from pyro_bpq.reruns.apart import Comparison, Together, keeps_apart
from pyro_bpq.reruns.row_runs import is_due
from pyro_bpq.rollout.runs import Particles, Program
from pyro_bpq.snapshots import restore, snapshot
from pyro_bpq.tracing.sandbox import Draws, LentBuffers, Sandbox, Trial
from pyro_bpq.tracing.traced_run import TracedRun

LOG = logging.getLogger("pyro_bpq")

# Number of tracked runs after which few of them are compared with particles on their own.
_NEW = 16


@dataclass(frozen=True)
class _Findings:
    """What steps have found out of an open number."""

    programs: Transient = field(default_factory=Transient)  # model and guide of these steps; empty in a new state
    is_proved: bool = False  # whether particles that run together were compared with particles on their own
    next: Particles | None = None  # what runs from the next step on that learns, if anything else
    may_sum: bool | None = None  # whether the loss can be summed over all values; ``None`` before that is known
    unsummed: Particles | None = None  # how particles ran before it was summed
    sizes: Mapping[Plate, int] = field(default_factory=dict)  # sizes of plates that the number is for

    @property
    def is_new(self) -> bool:
        """Whether no step has shown the program yet, in this process."""
        return not self.programs.items

    def fit(self, program: Program) -> bool:
        """Whether they are those of a program; true in a new state."""
        return all(is_same_program(*pair) for pair in zip(self.programs.items, program[:2], strict=False))


class ParticleCount:
    """Settles how the particles of an objective run.

    Attributes:
        now: How they run at present.
        is_open: Whether their number is left open.
        said: What was settled last, and why; empty before.
    """

    def __init__(self) -> None:
        self.now, self.is_open, self.said = Particles(), False, ""
        self._given_nesting = math.inf
        self._num_tracked = 0
        self._found = _Findings()
        # Structures whose particles were proved not to mix, if the user has chosen a plate of particles.
        self._proved = Together()

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
        found = self._found
        if found.is_new or found.next is not None or (found.may_sum and not self.now.sums):
            return False
        return found.fit(program) and (self.now.number == 1 or found.is_proved)

    # What the user, or a choice, sets.

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
        self.is_open = True
        self.open_state = None

    def close(self) -> None:
        """One particle from now on, where the number is open: with more, sites in rows of data have no critics."""
        self.open_state, self.is_open = None, False

    @property
    def open_state(self) -> Particles | None:
        """What was settled of an open number."""
        return self.now if self.is_open and self.now.number > 1 else self._found.next

    @open_state.setter
    def open_state(self, state: Particles | None) -> None:
        if self.is_open:
            self.now, self._found = state or self._one, _Findings()

    @property
    def for_evaluation(self) -> Particles:
        """One particle for programs that nothing is settled for: those of an evaluation may be others."""
        return self._one if self.is_open else self.now

    @property
    def drawn(self) -> Particles:
        """The particles of a run that draws: one where the loss is summed."""
        return self._one if self.now.sums else self.now

    @property
    def _one(self) -> Particles:
        return Particles(nesting=self._given_nesting)

    def observe(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        """The runs of a step, and the signals of their sites."""
        if self.is_open:
            return self._observe_open(runner, program, mode)
        if self.now.has_plate:
            return self._observe_plate(runner, program, mode)
        if self.now.is_hidden:
            return self._observe_hidden(runner, program, mode)
        return runner.observe(program, self.now, mode)

    # A number that the user has given.

    def _observe_plate(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        """Particles in a plate; those that do not keep apart there run in another way from now on."""
        draws, when = Draws(), (mode.learning, mode.num_steps)
        lends = self._proved.is_wanted(*when) and runner.has_buffers
        with LentBuffers() if lends else contextlib.nullcontext() as lent:
            found = runner.observe(program, self.now, mode)
            mixes = not (mode.is_recorded or self._proved.knows(found.runs[0].key, *when)) and self._proved.mixes(
                self._comparison(runner, program, found.runs[0], mode), *when
            )
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
        return self.observe(runner, program, replace(mode, is_checked=True))

    def _observe_hidden(self, runner: Runner, program: Program, mode: Mode) -> Observation:
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
            self._say(f"{apart.number} particles run one after the other.", ["They do not run in hiding."])
        return runner.observe(program, apart, hidden)

    # An open number.

    def _observe_open(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        if self.now.sums and mode.asks_for_more:
            return runner.observe(program, self.drawn, mode)
        if mode.learning:
            self._take_next()
        if not self._found.fit(program):
            self.open_state = None
        if self.now.number > 1:
            return self._observe_many(runner, program, mode)
        found = runner.observe(program, self.now, mode)
        if mode.learning and self._found.is_new:
            self._settle(runner, program, found, mode)
            if self._found.next is not None and mode.num_steps == 0:
                # Adam long remembers a first gradient that is noisier than those that follow.
                self._take_next()
                return self._observe_many(runner, program, mode, found)
        if not found.ordered:
            self._turn_to_sums(runner, found.runs[0], mode)
        return found

    def _take_next(self) -> None:
        """Goes on with what waits for this step."""
        particles = self._found.next
        if particles is not None:
            self.now = particles
            self._note(next=None, is_proved=self._found.is_proved and not particles.sums)

    def _note(self, **found: Any) -> None:
        self._found = replace(self._found, **found)

    def _say(self, text: str, refused: list[str]) -> None:
        self.said = " ".join([text, *refused])
        LOG.info("%s", self.said)

    def _observe_many(self, runner: Runner, program: Program, mode: Mode, alone: Any = None) -> Observation:
        """The step of many particles, or of one where they do not run; ``alone`` is that of one, if it was taken."""
        before = snapshot(self)
        has_run = self._found.is_proved and not self._found.is_new and not self.now.sums
        found, reason = self._first_way(runner, program, mode, alone is not None)
        if found is not None or alone is not None:
            return found or alone
        try:
            found = runner.observe(program, self.now, mode)
        except BaseException:
            # With one particle it fails too: their number is not why.
            restore(self, before)
            raise
        if has_run and reason:
            warnings.warn(
                f"The program ran with {before['now'].number} particles at once so far, but {reason}. From now on one "
                "particle runs; write num_particles=1 if that is what you want.",
                BPQWarning,
                stacklevel=2,
            )
        return found

    def _first_way(
        self, runner: Runner, program: Program, mode: Mode, is_first: bool
    ) -> tuple[Observation | None, str]:
        """The step in the first way in which many particles run; else ``None``, why, and one particle from now on.

        Where the program has made parameters there is no reason: one particle runs in this step alone.
        """
        before, first, settled, draws = self._found, self.now, Transient(program[:2]), Draws()
        if before.is_new and not first.sums:
            # Copied or loaded, maybe in a new process: one particle makes the parameters that Pyro's store lacks.
            with Sandbox(torch.get_rng_state(), runner.has_buffers), torch.no_grad():
                runner.trace(program, self._one, mode.num_steps)
            draws.again()
        reason, refused = "", list[str]()
        for way in self._ways(first):
            self.now = way
            is_known = way is first and before.is_proved and not before.is_new
            found, reason = self._one_way(runner, program, mode, is_first, is_known)
            if found is not None:
                if not is_known:
                    where = "a dimension that the program does not see" if way.is_hidden else "a plate of their own"
                    what = "All values run" if way.sums else f"{way.number} particles run"
                    self._say(f"{what} in one call, in {where}.", refused)
                self._note(programs=settled, is_proved=True)
                if mode.learning:
                    self._lower(runner, found.runs[0])
                    self._turn_to_sums(runner, found.runs[0], mode)
                return found, ""
            draws.again()
            if not reason:
                self.now = self._one
                self._note(programs=settled, is_proved=False, next=way)
                return None, ""
            if way.is_compact:
                continue
            text = reason.split("\n")[0].rstrip(".")
            place = "hiding" if way.is_hidden else "a plate"
            what = "All values" if way.sums else f"{way.number} particles"
            refused.append(f"{what} do not run in {place}: {text}.")
        self.now = before.unsummed or self._one if first.sums else self._one
        self._note(programs=settled, next=None)
        if not first.sums:
            self._say("One particle runs from now on.", refused)
            return None, reason
        self._say("The loss is not summed over all values.", refused)
        self._note(is_proved=False, may_sum=False)
        return self._first_way(runner, program, mode, is_first) if self.now.number > 1 else (None, "")

    def _ways(self, first: Particles) -> list[Particles]:
        """In which ways many particles may run: the present one, then what asks less of the program."""
        if first.is_compact:
            return [first, replace(first, is_compact=False)]
        if first.is_hidden or first.sums:
            return [first]
        return [first, Particles(first.number, False, True, self._given_nesting)]

    def _one_way(
        self, runner: Runner, program: Program, mode: Mode, is_first: bool, is_known: bool
    ) -> tuple[Observation | None, str]:
        """The step in the present way, or ``None`` and why it does not count; no reason if it has made parameters."""
        # Programs change: into another mode, or with what they learn.
        is_checked_again = mode.learning and is_due(mode.num_steps) and not mode.is_recorded
        compares = not is_known or is_checked_again or runner.is_looking
        lends = compares and self.now.has_plate and runner.has_buffers
        with Trial() as trial, LentBuffers() if lends else contextlib.nullcontext() as lent:
            found = runner.observe(program, self.now, replace(mode, is_checked=compares))
            is_new = self._is_new(found.runs[0])
            if (compares or is_new) and self.now.has_plate and not trial.new_parameters():
                trial.reason = self._difference(runner, program, found.runs[0], mode, lent, is_new)
                if lent is not None and not (trial.reason or is_first):
                    # In the first step the run of one particle has written them.
                    lent.keep()
        return (None if trial.reason or trial.created else found), trial.reason

    def _is_new(self, traced: TracedRun) -> bool:
        """Whether the structure of a run may be new: such runs are tracked. Where most are, few of them count."""
        if traced.reads is None:
            return False
        self._num_tracked += 1
        return self._num_tracked <= _NEW or is_due(self._num_tracked)

    # How an open number goes on, from a run of the present step.

    def _settle(self, runner: Runner, program: Program, found: Observation, mode: Mode) -> None:
        """From new to alone, or to a plate."""
        number = 1 if mode.has_ranks or found.ordered else runner.good_for(found.runs[0])
        if number == 1:
            self.said = (
                "One particle runs. Several run only if no sampled value steers the program, and if ten or more sites, "
                "or sites in plates of ten or more rows, have costs that are not known at their other values."
            )
        else:
            self._note(next=Particles(number, True, False, self._nesting_beside(found.runs[0])))
        sizes = {} if found.ordered else dict(found.runs[0].plate_sizes)
        self._note(programs=Transient(program[:2]), is_proved=False, sizes=sizes)

    def _turn_to_sums(self, runner: Runner, traced: TracedRun, mode: Mode) -> None:
        """To sums, from a step on that is fixed beforehand, where the loss can be summed over all values."""
        found, now = self._found, self.now
        if found.may_sum is False or now.sums or now.is_hidden or not mode.learning or mode.asks_for_more:
            return
        is_time = found.next is None and mode.num_steps + 1 >= num_drawn_steps(traced)
        if found.may_sum and not is_time:
            return
        rows = runner.rows_for(traced, now.number)
        self._note(may_sum=rows > 0)
        if rows and is_time:
            self._note(
                unsummed=now,
                next=Particles(rows, True, False, self._nesting_beside(traced), sums=True, is_compact=True),
            )

    def _lower(self, runner: Runner, traced: TracedRun) -> None:
        """To fewer particles, where plates have grown or values steer the program."""
        found, now = self._found, self.now
        if traced.plate_sizes == found.sizes and not now.is_hidden:
            return
        self._note(sizes=dict(traced.plate_sizes))
        if now.sums:
            self._note(next=None if runner.rows_for(traced, now.number) else found.unsummed or self._one)
            return
        number = runner.good_for(traced, now.number if now.has_plate else 1)
        if number < now.number and (number > 1 or now.is_hidden):
            self._note(next=replace(now, number=number) if number > 1 else self._one)

    def _nesting_beside(self, traced: TracedRun) -> float:
        """Bound on the number of nested plates with that of the particles, from a run with the present ones."""
        if self.now.has_plate:
            return self.now.nesting
        return 1 + (traced.batch_ndim if math.isinf(self._given_nesting) else self._given_nesting)

    # Particles among others against particles on their own.

    def _difference(
        self, runner: Runner, program: Program, many: TracedRun, mode: Mode, lent: LentBuffers | None, is_new: bool
    ) -> str:
        """What tells a particle among others from one on its own; empty where nothing does."""
        is_first = is_new or not self._found.is_proved
        keeps = keeps_apart(self._comparison(runner, program, many, mode), mode.num_steps, is_first)
        if keeps is None:
            return (
                "the programs draw noise besides their sites, or run at no given values: particles cannot be compared"
            )
        if not keeps:
            return "the costs of a particle depend on the particles that it runs with"
        return "" if lent is None or lent.fit else "a buffer of a module takes the shape of the particles"

    def _comparison(self, runner: Runner, program: Program, many: TracedRun, mode: Mode) -> Comparison:
        now, (together,) = self.now, programs_of(program, self.now)
        return Comparison(
            lambda part, put: runner.trace(part, now, mode.num_steps, put=put),
            *(program, together, many, now.number, int(now.nesting), runner.has_buffers, now.is_compact),
        )
