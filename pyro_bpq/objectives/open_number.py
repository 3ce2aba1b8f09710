r"""Settles a number of particles that the user leaves open.

It goes through these states:

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
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from pyro_bpq.errors import BPQWarning
from pyro_bpq.graph.scg import Plate
from pyro_bpq.objectives.observation import Mode, Observation, Runner, Transient
from pyro_bpq.objectives.programs import compared_alone, is_same_program, make_parameters
from pyro_bpq.plan.particles import num_drawn_steps
from pyro_bpq.reruns.apart import keeps_apart
from pyro_bpq.reruns.comparisons import TrackedRuns, is_due
from pyro_bpq.rollout.runs import Particles, Program
from pyro_bpq.tracing.sandbox import Draws, LentBuffers, Trial
from pyro_bpq.tracing.traced_run import TracedRun

LOG = logging.getLogger("pyro_bpq")


@dataclass(frozen=True)
class _Findings:
    """What steps have found out of an open number."""

    programs: Transient = field(default_factory=Transient)  # model and guide of these steps; empty in a new state
    is_proved: bool = False  # whether particles that run together were compared with particles on their own
    next: Particles | None = None  # what runs from the next step on that learns, if anything else
    may_sum: bool | None = None  # whether the loss can be summed over all values; ``None`` before that is known
    unsummed: Particles | None = None  # how particles ran before it was summed
    has_failed: bool = False  # whether the program failed in the last step, after it had run with many particles
    sizes: Mapping[Plate, int] = field(default_factory=dict)  # sizes of plates that the number is for

    @property
    def is_new(self) -> bool:
        """Whether no step has shown the program yet, in this process."""
        return not self.programs.items

    def fit(self, program: Program) -> bool:
        """Whether they are those of a program; true in a new state."""
        return all(is_same_program(*pair) for pair in zip(self.programs.items, program[:2], strict=False))


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Leaves out our own warnings: a run of one particle has given them in the same step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BPQWarning)
        yield


class OpenNumber:
    """Settles how many particles run, and in which way.

    Attributes:
        now: How they run at present.
        nesting: Bound on the number of nested plates of the programs.
        tracked: The tracked runs so far, whose structure may be new.
        said: What was settled last, and why; empty before.
    """

    def __init__(self, nesting: float = math.inf) -> None:
        self.now, self.nesting, self.said = Particles(nesting=nesting), nesting, ""
        self.tracked = TrackedRuns()
        self._found = _Findings()

    @property
    def parts(self) -> tuple[Any, ...]:
        """What finds things out in a step."""
        return self, self.tracked

    @property
    def one(self) -> Particles:
        """One particle."""
        return Particles(nesting=self.nesting)

    @property
    def state(self) -> tuple[Any, ...]:
        """How particles run, how from the next step on, and how before sums: plain values, loaded without trust."""
        settled = self.now, self._found.next, self._found.unsummed
        return tuple(None if one is None else astuple(one) for one in settled)

    def reset(self, state: tuple[Any, ...] | None = None) -> None:
        """Goes on as after a state, that of a new count by default."""
        settled = (None if one is None else Particles(*one) for one in state or (None, None, None))
        now, following, unsummed = settled
        self.now, self._found = now or self.one, _Findings(next=following, unsummed=unsummed)

    def is_settled(self, program: Program) -> bool:
        """Whether number and way are settled for a program."""
        found = self._found
        if found.is_new or found.next is not None or (found.may_sum and not self.now.sums):
            return False
        return found.fit(program) and (self.now.number == 1 or found.is_proved)

    def observe(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        """The runs of a step, and the signals of their sites."""
        fits = self._found.fit(program)
        if (self.now.sums and mode.asks_for_more) or not (fits or mode.learning):
            return runner.observe(program, self.one, mode)
        if not fits:
            self.reset()
        if mode.learning:
            self._take_next()
        if self.now.number > 1:
            return self._many(runner, program, mode)
        found = runner.observe(program, self.now, mode)
        if mode.learning and self._found.is_new:
            self._settle(runner, program, found, mode)
            if self._found.next is not None and mode.num_steps == 0:
                # Adam long remembers a first gradient that is noisier than those that follow.
                self._take_next()
                return self._many(runner, program, mode, found)
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

    def _many(self, runner: Runner, program: Program, mode: Mode, alone: Any = None) -> Observation:
        """The step of many particles, or of one where they do not run; ``alone`` is that of one, if it was taken."""
        before, was_failed = (self.now, self._found, self.said), self._found.has_failed
        has_run = self._found.is_proved and not self._found.is_new and not self.now.sums
        found, reason = self._first_way(runner, program, mode, alone is not None)
        if found is not None or alone is not None:
            return found or alone
        try:
            found = runner.observe(program, self.now, mode)
        except BaseException:
            # With one particle it fails too: their number is not why.
            self.now, self._found, self.said = before
            raise
        if not mode.learning:
            # What an evaluation meets settles nothing.
            self.now, self._found, self.said = before
        elif (has_run or was_failed) and reason:
            number = before[0].number
            if self._found.has_failed:
                rest = f"This step took one particle; the next one tries {number} again."
            else:
                rest = "From now on one particle runs; write num_particles=1 if that is what you want."
            why = reason.split("\n")[0].rstrip(".")
            text = f"The program ran with {number} particles at once so far, but {why}. {rest}"
            warnings.warn(text, BPQWarning, stacklevel=2)
        return found

    def _first_way(
        self, runner: Runner, program: Program, mode: Mode, is_first: bool, said: str = ""
    ) -> tuple[Observation | None, str]:
        """The step in the first way in which many particles run; else ``None``, why, and one particle from now on.

        Where the program has made parameters there is no reason: one particle runs in this step alone.
        """
        before, first, settled, draws = self._found, self.now, Transient(program[:2]), Draws()
        if before.is_new and not first.sums:
            # Copied or loaded, maybe in a new process: one particle makes the parameters that Pyro's store lacks.
            make_parameters(runner, program, self.one, mode.num_steps)
        reason, refused = "", [said] if said else []
        for way in self._ways(first):
            self.now = way
            is_known = way is first and before.is_proved and not before.is_new
            found, trial = self._try_way(runner, program, mode, is_first, is_known)
            reason = trial.reason
            if found is not None:
                if not is_known:
                    what = "All values run" if way.sums else f"{way.number} particles run"
                    self._say(f"{what} {way.way}.", refused)
                self._note(programs=settled, is_proved=True, has_failed=False)
                if mode.learning:
                    self._lower(runner, found.runs[0])
                    self._turn_to_sums(runner, found.runs[0], mode)
                return found, ""
            draws.again()
            # An error may come once. What has run so far is tried again before anything is settled.
            is_once = is_known and trial.has_failed and not way.sums
            if is_once or not reason:
                self.now = self.one
                self._note(programs=settled, is_proved=False, next=way, has_failed=is_once)
                return None, reason
            if way.is_compact:
                continue
            text = reason.split("\n")[0].rstrip(".")
            place = "hiding" if way.is_hidden else "a plate"
            what = "All values" if way.sums else f"{way.number} particles"
            refused.append(f"{what} do not run in {place}: {text}.")
        self.now = before.unsummed or self.one if first.sums else self.one
        self._note(programs=settled, next=None, has_failed=False)
        if not first.sums:
            self._say("One particle runs from now on.", refused)
            return None, reason
        self._say("The loss is not summed over all values.", refused)
        self._note(is_proved=False, may_sum=False)
        return self._first_way(runner, program, mode, is_first, self.said) if self.now.number > 1 else (None, "")

    def _ways(self, first: Particles) -> list[Particles]:
        """In which ways many particles may run: the present one, then what asks less of the program."""
        if first.is_compact:
            return [first, replace(first, is_compact=False)]
        if first.is_hidden or first.sums:
            return [first]
        return [first, Particles(first.number, False, True, self.nesting)]

    def _try_way(
        self, runner: Runner, program: Program, mode: Mode, is_first: bool, is_known: bool
    ) -> tuple[Observation | None, Trial]:
        """The step in the present way, or ``None``, and the trial; it has no reason if it has made parameters."""
        # Programs change: into another mode, or with what they learn.
        is_checked_again = mode.learning and is_due(mode.num_steps) and not mode.is_recorded
        compares = not is_known or is_checked_again or runner.is_looking
        # In the first step the run of one particle has written them.
        lends = runner.has_buffers and (is_first or (compares and self.now.has_plate))
        silenced = _silenced() if is_first else contextlib.nullcontext()
        with Trial() as trial, LentBuffers() if lends else contextlib.nullcontext() as lent, silenced:
            found = runner.observe(program, self.now, replace(mode, is_checked=compares))
            is_new = self.tracked.may_be_new(found.runs[0]) or found.runs[0].mixes
            if (compares or is_new) and self.now.has_plate and not trial.new_parameters():
                trial.reason = self._difference(runner, program, found.runs[0], mode, lent, is_new)
                if lent is not None and not (trial.reason or is_first):
                    lent.keep()
        return (None if trial.reason or trial.created else found), trial

    # How an open number goes on, from a run of the present step.

    def _settle(self, runner: Runner, program: Program, found: Observation, mode: Mode) -> None:
        """From new to alone, or to a plate."""
        number = 1 if mode.has_ranks or found.ordered else runner.good_for(found.runs[0])
        if number == 1:
            why = "sampled values steer the program" if found.ordered else runner.why_one(found.runs[0])
            self.said = f"One particle runs, because {'several processes learn' if mode.has_ranks else why}."
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
            self._note(next=None if runner.rows_for(traced, now.number) else found.unsummed or self.one)
            return
        number = runner.good_for(traced, now.number if now.has_plate else 1)
        if number < now.number and (number > 1 or now.is_hidden):
            self._note(next=replace(now, number=number) if number > 1 else self.one)

    def _nesting_beside(self, traced: TracedRun) -> float:
        """Bound on the number of nested plates with that of the particles, from a run with the present ones."""
        if self.now.has_plate:
            return self.now.nesting
        return 1 + (traced.batch_ndim if math.isinf(self.nesting) else self.nesting)

    # Particles among others against particles on their own.

    def _difference(
        self, runner: Runner, program: Program, many: TracedRun, mode: Mode, lent: LentBuffers | None, is_new: bool
    ) -> str:
        """What tells a particle among others from one on its own; empty where nothing does."""
        is_first = is_new or not self._found.is_proved
        keeps = keeps_apart(compared_alone(runner, program, self.now, many, mode.num_steps), mode.num_steps, is_first)
        if keeps is None:
            return (
                "the programs draw noise besides their sites, or run at no given values: particles cannot be compared"
            )
        if not keeps:
            return "the costs of a particle depend on the particles that it runs with"
        return "" if lent is None or lent.fit else "a buffer of a module takes the shape of the particles"
