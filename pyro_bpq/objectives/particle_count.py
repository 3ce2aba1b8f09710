r"""How many particles run, and in which way.

A number that is left open is found where a call looks new. One particle runs, and is recorded; its plan tells how many
the program is good for. They run in the first of these ways that serves:

    in a plate           the recording proves that particles keep apart, and one of them costs what it costs alone
    in one call          the recording of one particle runs for all others at once
    one after the other  only a number that the user has given

Where the loss can be summed over all values, a later step does that in their place.
"""

from __future__ import annotations

import logging
import math
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import ELBO
from pyro.poutine.messenger import Messenger

from pyro_bpq.errors import (
    BPQWarning,
    OptionError,
    ParticlesDifferError,
    StructureChangedError,
    TooManyOutcomesError,
    Unrecordable,
    is_real,
    warn,
)
from pyro_bpq.objectives.observation import Mode, Observation, Runner
from pyro_bpq.plan.plan import num_drawn_steps, num_particles_for, num_rows_for
from pyro_bpq.record.function import Uncut
from pyro_bpq.record.further import Draws
from pyro_bpq.record.key import Call
from pyro_bpq.record.program_errors import EXPLAINED
from pyro_bpq.record.statements import SkipCosts
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.rollout.runs import Particles, Program

LOG = logging.getLogger("pyro_bpq")

# A run of one particle, and its call.
_One = tuple[TracedRun, Call]


class ParticleCount:
    """Holds the number of an objective's particles, and the way in which they run.

    Attributes:
        written: What the user has written.
        is_open: Whether the number is left open.
        now: How particles ran last.
        said: What was settled last, and why; empty before.
    """

    def __init__(self) -> None:
        self.written = self.now = Particles()
        self.is_open, self.said = False, ""

    @property
    def nesting(self) -> float:
        """Bound on the number of nested plates, without that of the particles."""
        return self.written.nesting - self.written.is_vectorized

    @property
    def one(self) -> Particles:
        """One particle."""
        return Particles(nesting=self.nesting)

    @property
    def drawn(self) -> Particles:
        """The particles of a run that draws: one where the loss is summed over all values."""
        return self.one if self.now.sums else self.now

    def change(self, **changes: Any) -> None:
        """Sets options of the user's own; a number that is set is no longer open."""
        self.written = replace(self.written, **changes)
        self.is_open = self.is_open and "number" not in changes
        self.now = self.written

    def close(self) -> None:
        """One particle from now on, where the number is open: with more, sites in rows of data have no critics."""
        if self.is_open:
            self.written = self.now = self.one
            self.is_open = False

    def is_settled(self, runner: Runner) -> bool:
        """Whether number and way are settled for the call that was looked at last."""
        sums = runner.recordings.now.sums
        return not self.is_open or (self.now.sums if sums else sums is not None and self.way(runner) is not None)

    def way(self, runner: Runner) -> Particles | None:
        """How the particles of such calls run, if that is settled."""
        return runner.recordings.now.particles.get((self.written, self.is_open))

    def use(self, runner: Runner, way: Particles) -> None:
        """Settles how the particles of such calls run, if they are drawn."""
        if not way.sums:
            runner.recordings.now.particles[self.written, self.is_open] = way

    def say(self, *texts: str) -> None:
        """Notes what was settled."""
        self.said = " ".join(texts)
        LOG.info("%s", self.said)

    def observe(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        """The runs of a step, and the signals of their sites."""
        runner.meet(program, mode)
        return _Step(self, runner, program, mode, self.now.sums).taken()


class CountedELBO(ELBO):
    """An ELBO of Pyro whose options about particles are held, and may be settled, by a count.

    Attributes:
        particles: How many particles run, and in which way.
    """

    def __init__(self, **options: Any) -> None:
        # Pyro's constructor sets the number of particles.
        self.particles = ParticleCount()
        super().__init__(**options)  # type: ignore[no-untyped-call]

    @property
    def num_particles(self) -> int:
        """Number of particles; 1 where the loss is summed over all values."""
        return self.particles.now.draws

    @num_particles.setter
    def num_particles(self, number: int) -> None:
        self.particles.change(number=number)

    @property
    def vectorize_particles(self) -> bool:
        """Whether particles run in one call, in a plate of their own."""
        return self.particles.drawn.is_vectorized

    @vectorize_particles.setter
    def vectorize_particles(self, is_vectorized: bool) -> None:
        self.particles.change(is_vectorized=is_vectorized)

    @property
    def max_plate_nesting(self) -> float:
        """Bound on the number of nested plates, that of vectorised particles included."""
        return self.particles.now.nesting

    @max_plate_nesting.setter
    def max_plate_nesting(self, nesting: float) -> None:
        if not (is_real(nesting) and nesting >= 0 and (math.isinf(nesting) or nesting == int(nesting))):
            raise OptionError(
                f"max_plate_nesting={nesting!r}: write a whole number, or leave it out: then it is found."
            )
        self.particles.change(nesting=nesting)

    def _guess_max_plate_nesting(self, model: Any, guide: Any, args: Any, kwargs: Any) -> None:
        programs = SkipCosts()(model), SkipCosts()(guide)
        try:
            super()._guess_max_plate_nesting(*programs, args, kwargs)  # type: ignore[no-untyped-call]
        except EXPLAINED:
            # A run of our own says more of the same error.
            self.run_program(Program(*programs, args, kwargs))
            raise

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        return self.run_program(Program(model, guide, args, kwargs))

    @abstractmethod
    def run_program(self, program: Program, particles: Particles | None = None) -> TracedRun:
        """Runs guide and model as a step does, or for other particles."""


@dataclass(frozen=True)
class _Step:
    """A step whose particles run in a way that is settled, or that it settles."""

    count: ParticleCount
    runner: Runner
    program: Program
    mode: Mode
    was_summed: bool  # whether the last step was

    def taken(self) -> Observation:
        """The runs of the step, and the signals of their sites."""
        count, way = self.count, self.count.way(self.runner)
        if not count.is_open:
            return self._settled(way) if way else self._given()
        if way is None and not (self.mode.settles or self._sums()):
            return self._run(count.one)
        found, refused = self._summed()
        if found is None:
            found = self._settled(way) if way else self._like_before() or self._first()
            self._plan_sums(found)
        if refused:
            count.say(count.said, f"The loss is not summed over all values: {refused}.")
        return found

    def _run(self, way: Particles) -> Observation:
        self.count.now = way
        return self.runner.observe(self.program, way, self.mode).staged()

    def _back(self, draws: Draws, runs: Sequence[TracedRun] = (), params: set[str] | None = None) -> None:
        """Takes back what runs have drawn and written, and new parameters, which have their shape; they run again."""
        for name in () if params is None else pyro.get_param_store().keys() - params:
            del pyro.get_param_store()[name]
        draws.again(runs)
        # Where parameters have left, the call is still no other one.
        self.runner.meet(self.program, self.mode, None if params is None else self.runner.recordings.now)

    def _settled(self, way: Particles) -> Observation:
        """The step of particles that run in a settled way, as long as they can be computed from a recording."""
        count, draws = self.count, self.runner.recordings.mark() if way.is_hidden else None
        try:
            return self._run(way)
        except Uncut as error:
            if draws is None:
                raise
            self._back(draws)
            count.say(f"Particles do not run {way.way}: {error}.")
            return self._first_of((), count.one if count.is_open else replace(way, is_hidden=False))[0]

    def _first_of(self, ways: Iterable[Particles], last: Particles, one: _One | None = None) -> tuple[Observation, str]:
        """The step in the first way that serves, else in the last one; and how and why so, in words."""
        refused = list[str]()
        for way in ways:
            found, reason = self._tried(way, one)
            if found is not None:
                break
            where = "in a plate" if way.has_plate else "in one call"
            refused.append(f"{way.number} particles do not run {where}: {reason}.")
        else:
            way = last
            self.count.use(self.runner, way)
            found = self._run(way)
        said = f"{way.number} particles run {way.way}." if way.number > 1 else "One particle runs."
        return found, " ".join((said, *refused))

    # A number that the user has given.

    def _given(self) -> Observation:
        """Particles as the user has written; those that do not keep apart in a plate run in another way."""
        count, runner, way = self.count, self.runner, self.count.written
        draws, params = runner.recordings.mark(), set(pyro.get_param_store().keys())
        if way.has_plate and isinstance(poutine.unwrap(self.program.guide), Messenger):
            # Such guides of Pyro make parameters in the shape of their first run.
            with torch.no_grad():
                self._back(draws, [runner.trace(self.program, count.one, step=self.mode.num_steps, track=True)])
        found, mixed = self._settled(way), None
        if way.has_plate and found.runs:  # else no site has a score
            # Without a score no particle is charged with the costs of others: they run as the user has written.
            first, failed = runner.recordings.shown(found.runs[0], way.in_call), runner.recordings.failed
            mixed = ("the program", failed) if failed else first.mixes if first.scored else None
        if mixed is None:
            if not self.mode.is_recorded:
                count.use(runner, count.now)
            return found
        cost, why = mixed
        unknown = f"it is not known that particles stay apart in {cost}: it reads them by {why!r}"
        reason = unknown if why else f"{cost} reads values of other particles"
        self._back(draws, found.runs, params)
        apart = replace(way, is_vectorized=False, nesting=count.nesting)
        ways = [] if found.runs[0].is_dear else [replace(apart, is_hidden=True)]
        found, _ = self._first_of(ways, apart)
        count.say(f"{way.number} particles do not run in a plate: {reason}. They run {count.now.way}.")
        warn(
            f"Particles run {count.now.way}, because {reason}. Look at the dimensions in which the program of {cost} "
            "reduces or indexes, as by z.sum() or z[0]: those of particles and plates lie on the left."
        )
        return found

    # A number that is left open.

    def _first(self) -> Observation:
        """The step of a call that looks new: one particle shows what number the program is good for."""
        count, runner = self.count, self.runner
        draws, call, count.now = runner.recordings.mark(), runner.recordings.call, count.one
        found = runner.observe(self.program, count.one, self.mode)
        self._plan_sums(found)
        number, why = self._good_for(found, 1)
        if self.mode.has_ranks:
            number, why = 1, "several processes learn"
        if self._sums():
            self._back(draws, found.runs)
            return self.taken()
        if number == 1:
            count.use(runner, count.one)
            count.say(f"One particle runs, because {why}.")
            return found.staged()
        self._back(draws, found.runs)
        plate = Particles(number, True, False, 1 + self._nesting(found.runs[0]))
        number, _ = self._good_for(found, 1, is_hidden=True)
        hidden = [Particles(number, False, True, count.nesting)] if number > 1 else []
        found, said = self._first_of((plate, *hidden), count.one, (found.runs[0], call))
        count.say(said)
        return found

    def _like_before(self) -> Observation | None:
        """The step of a call that looks new, with the particles of the last one, if its structure is no news."""
        way = self.count.now
        if not way.has_plate or way.sums or self.mode.is_recorded:
            return None
        return self._tried(way, known=set(self.runner.recordings.known))[0]

    def _tried(
        self, way: Particles, one: _One | None = None, known: set[Any] | None = None
    ) -> tuple[Observation | None, str]:
        """The step of many particles in some way, settled from now on; or, with nothing drawn, why they do not run so.

        The structure has to be one of those that are ``known``.
        """
        draws, params = self.runner.recordings.mark(), set(pyro.get_param_store().keys())
        runs: Sequence[TracedRun] = ()
        try:
            with warnings.catch_warnings():
                if known is None:  # another run has given the same ones in this step, or our own before later sums
                    warnings.simplefilter("ignore", BPQWarning if way.sums else UserWarning)
                found = self._run(way)
            runs, reason = found.runs, "" if way.sums else self._differs(found, way, one, known)
            if not reason:
                self.count.use(self.runner, way)
                return found, ""
        except (StructureChangedError, TooManyOutcomesError, Unrecordable):
            raise
        except Exception as error:  # a program may fail in any way at values of another shape
            text = str(error).split("\n")[0].rstrip(".")
            reason = text if way.sums or isinstance(error, (ParticlesDifferError, Uncut)) else f"it failed: {text}"
        self._back(draws, runs, params)
        return None, reason

    def _differs(self, found: Observation, way: Particles, one: _One | None, known: set[Any] | None) -> str:
        """What tells a particle among others from one on its own; empty where nothing does."""
        run = next(iter(found.runs), None)
        is_news = known is not None and (run is None or run.key not in known)
        if run is None or is_news or (known and self._good_for(found, way.number)[0] < way.number):
            return "it is another program"
        if run.mixes is not None:
            cost, why = run.mixes
            return f"{cost} reads them by {why!r}" if why else f"{cost} of a particle reads values of others"
        if self.runner.is_alike(run, way, one):
            return ""
        if way.is_hidden:
            return "its gradient is not that of its operators, as with hooks or torch.no_grad()"
        return "the costs of a particle depend on the particles that it runs with"

    def _good_for(self, found: Observation, number: int, is_hidden: bool = False) -> tuple[int, str]:
        """The number of particles to take for a program, from a run of some number; and why, where it is 1."""
        recordings = self.runner.recordings
        if found.plan is None:
            why = "the program cannot be recorded" if recordings.failed else "sampled values steer the program"
            return 1, why if recordings.mode == "auto" else f'you wrote structure="{recordings.mode}"'
        run = recordings.shown(found.runs[0], number)
        return num_particles_for(found.plan, run, number, is_hidden), found.plan.alone

    def _nesting(self, one: TracedRun) -> float:
        """Bound on the number of nested plates, from a run of one particle."""
        found = max((cost.dim() for cost in one.run.costs.values()), default=0)
        return found if math.isinf(self.count.nesting) else self.count.nesting

    # Sums over all values.

    def _plan_sums(self, found: Observation) -> None:
        """Sums from a step on that is fixed beforehand, where the loss can be summed over all values."""
        mode, now, way = self.mode, self.runner.recordings.now, self.count.now
        is_asked = mode.learning or self.was_summed  # sums serve other sizes of data, too, where nothing is learned
        if not is_asked or mode.is_recorded or mode.shows or mode.by_value or found.ordered or now.sums is not None:
            return
        run = self.runner.recordings.shown(found.runs[0], way.in_call)
        rows = num_rows_for(found.plan, run, way.in_call) if mode.may_order else 0
        nesting = way.nesting if way.has_plate else 1 + self._nesting(run)
        table = Particles(rows, True, False, nesting, sums=True)
        now.sums = (replace(table, is_compact=True), table) if rows else ()
        now.drawn = num_drawn_steps(run) if rows else 0

    def _sums(self) -> bool:
        """Whether the step is one of those that are summed."""
        now = self.runner.recordings.now
        return bool(now.sums) and self.mode.num_steps >= now.drawn

    def _summed(self) -> tuple[Observation | None, str]:
        """The step whose loss is summed over all values; ``None``, and why, where that fails or is not planned."""
        count, mode, before, refused = self.count, self.mode, self.count.now, ""
        while self._sums():
            if mode.shows or mode.by_value or not mode.may_order:  # more than a loss and its gradient
                return self.runner.observe(self.program, count.one, mode).staged(), ""
            way, *others = self.runner.recordings.now.sums or ()
            found, refused = self._tried(way)
            if found is not None:
                if not before.sums:
                    count.say("All values run in one call, in a plate of their own.")
                return found, ""
            self.runner.recordings.now.sums, count.now = tuple(others), before
        return None, refused
