r"""How many particles run, and in which way: a number that the user has given, or one that is left open.

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
from collections.abc import Sequence
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
    is_real,
)
from pyro_bpq.objectives.observation import STEERED, Mode, Observation, Runner
from pyro_bpq.plan.particles import num_drawn_steps
from pyro_bpq.plan.rules import MOST_PARTICLES
from pyro_bpq.record.function import Uncut
from pyro_bpq.record.further import Draws
from pyro_bpq.record.key import Call
from pyro_bpq.record.program_errors import EXPLAINED
from pyro_bpq.record.statements import SkipCosts
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.rollout.runs import Particles, Program

LOG = logging.getLogger("pyro_bpq")


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
        now = runner.recordings.now
        is_drawn = self.way(runner) is not None and not now.may_sum
        return not self.is_open or is_drawn or (now.sums is not None and self.now is now.sums)

    def way(self, runner: Runner) -> Particles | None:
        """How the particles of such calls run, if that is settled."""
        return runner.recordings.now.particles.get((self.written, self.is_open))

    def use(self, runner: Runner, way: Particles) -> None:
        """Settles how the particles of such calls run; how they are summed is settled beforehand."""
        self.now = way
        if not way.sums:
            runner.recordings.now.particles[self.written, self.is_open] = way

    def say(self, *texts: str) -> None:
        """Notes what was settled."""
        self.said = " ".join(texts)
        LOG.info("%s", self.said)

    def observe(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        """The runs of a step, and the signals of their sites."""
        runner.meet(program, mode)
        return _Step(self, runner, program, mode).taken()


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

    def taken(self) -> Observation:
        """The runs of the step, and the signals of their sites."""
        count, way = self.count, self.count.way(self.runner)
        if not count.is_open:
            return self._settled(way) if way else self._given()
        if way is None and not self.mode.settles:
            count.now = count.one
            return self._run(count.one)
        if self._sums():
            return self._summed()
        found = self._settled(way) if way else self._like_before() or self._first()
        self._plan_sums(found)
        return found

    def _run(self, way: Particles) -> Observation:
        return self.runner.staged(self.runner.observe(self.program, way, self.mode))

    def _back(self, draws: Draws, runs: Sequence[TracedRun] = ()) -> None:
        """Takes back what some runs have drawn and written; the programs run again."""
        draws.again(runs)
        self.runner.meet(self.program, self.mode)

    def _settled(self, way: Particles) -> Observation:
        """The step of particles that run in a settled way, as long as they can be computed from a recording."""
        self.count.now = way
        if not way.is_hidden:
            return self._run(way)
        count, draws = self.count, self.runner.recordings.mark()
        try:
            return self._run(way)
        except Uncut as error:
            self._back(draws)
            count.say(f"Particles do not run {way.way}: {error}.")
            return self._instead(count.one if count.is_open else replace(way, is_hidden=False))

    def _instead(self, way: Particles) -> Observation:
        """The step in another way, which is settled from now on."""
        self.count.use(self.runner, way)
        return self._run(way)

    # A number that the user has given.

    def _given(self) -> Observation:
        """Particles as the user has written; those that do not keep apart in a plate run in another way."""
        count, runner, way = self.count, self.runner, self.count.written
        draws = runner.recordings.mark()
        if way.has_plate and isinstance(poutine.unwrap(self.program.guide), Messenger):
            # Such guides of Pyro make parameters in the shape of their first run.
            with torch.no_grad():
                self._back(draws, [runner.trace(self.program, count.one, step=self.mode.num_steps, track=True)])
        found, mixed = self._settled(way), None
        # Without a score no particle is charged with the costs of others: they run as the user has written.
        if way.has_plate and found.runs[0].scored:
            mixed = found.runs[0].mixes
        if way.has_plate and runner.recordings.failed:
            mixed = "the program", runner.recordings.failed
        if mixed is None:
            if not self.mode.is_recorded:
                count.use(runner, count.now)
            return found
        cost, why = mixed
        reason = f"{cost} reads values of other particles"
        if why:
            reason = f"it is not known that particles stay apart in {cost}: it reads them by {why!r}"
        self._back(draws, found.runs)
        apart = replace(way, is_vectorized=False, nesting=count.nesting)
        hidden = None if found.runs[0].is_dear else self._tried(replace(apart, is_hidden=True))[0]
        now = "in one call, in a dimension that the program does not see" if hidden else "one after the other"
        count.say(f"{way.number} particles do not run in a plate: {reason}. They run {now}.")
        warnings.warn(
            f"Particles run {now}, because {reason}. Look at the dimensions in which the program of {cost} reduces or "
            "indexes, as by z.sum() or z[0]: those of particles and plates lie on the left.",
            BPQWarning,
            stacklevel=2,
        )
        return hidden or self._instead(apart)

    # A number that is left open.

    def _first(self) -> Observation:
        """The step of a call that looks new: one particle shows what number the program is good for."""
        count, runner = self.count, self.runner
        draws, call, count.now = runner.recordings.mark(), runner.recordings.call, count.one
        found = runner.observe(self.program, count.one, self.mode)
        self._plan_sums(found)
        number, why = (1, STEERED) if found.ordered else runner.good_for(found.runs[0])
        if self.mode.has_ranks:
            number, why = 1, "several processes learn"
        if number == 1 and not self._sums():
            count.use(runner, count.one)
            count.say(f"One particle runs, because {why}.")
            return runner.staged(found)
        is_summed = self._sums()
        self._back(draws, found.runs)
        if is_summed:
            return self._summed()
        one, refused = found.runs[0], list[str]()
        plate = Particles(number, True, False, 1 + self._nesting(one))
        hidden = Particles(min(number, MOST_PARTICLES), False, True, count.nesting)
        for way, where in ((plate, "in a plate"), (hidden, "in one call")):
            many, why = self._tried(way, (one, call))
            if many is not None:
                count.say(f"{way.number} particles run {way.way}.", *refused)
                return many
            refused.append(f"{way.number} particles do not run {where}: {why}.")
        count.say("One particle runs.", *refused)
        return self._instead(count.one)

    def _like_before(self) -> Observation | None:
        """The step of a call that looks new, with the particles of the last one, if its structure is no news."""
        way = self.count.now
        if not way.has_plate or way.sums or self.mode.is_recorded:
            return None
        return self._tried(way, known=set(self.runner.recordings.known))[0]

    def _tried(
        self, way: Particles, one: tuple[TracedRun, Call] | None = None, known: set[Any] | None = None
    ) -> tuple[Observation | None, str]:
        """The step of many particles in some way, settled from now on; or, with nothing drawn, why they do not run so.

        ``one`` is the run of one particle, and its call. The structure has to be one of those that are ``known``.
        """
        draws, params = self.runner.recordings.mark(), set(pyro.get_param_store().keys())
        runs: Sequence[TracedRun] = ()
        try:
            with warnings.catch_warnings():
                if known is None:  # a run of one particle has given our own warnings in the same step
                    warnings.simplefilter("ignore", BPQWarning)
                found = self._run(way)
            runs, reason = found.runs, "" if way.sums else self._differs(found, way, one, known)
            if not reason:
                self.count.use(self.runner, way)
                return found, ""
        except (StructureChangedError, TooManyOutcomesError):
            raise
        except Exception as error:  # a program may fail in any way at values of another shape
            text = str(error).split("\n")[0].rstrip(".")
            reason = text if way.sums or isinstance(error, ParticlesDifferError) else f"it failed: {text}"
        for name in set(pyro.get_param_store().keys()) - params:
            # They may have the shape of many particles.
            del pyro.get_param_store()[name]
        self._back(draws, runs)
        return None, reason

    def _differs(
        self, found: Observation, way: Particles, one: tuple[TracedRun, Call] | None, known: set[Any] | None
    ) -> str:
        """What tells a particle among others from one on its own; empty where nothing does."""
        run = found.runs[0] if found.runs else None
        is_known = known is None or (run is not None and run.key in known)
        if run is None or not is_known or (known and self.runner.good_for(run, way.number)[0] < way.number):
            return "it is another program"
        if run.mixes is not None:
            cost, why = run.mixes
            return f"{cost} reads them by {why!r}" if why else f"{cost} of a particle reads values of others"
        if self.runner.is_alike(run, way, one):
            return ""
        if way.is_hidden:
            return "its gradient is not that of its operators, as with hooks or torch.no_grad()"
        return "the costs of a particle depend on the particles that it runs with"

    def _nesting(self, one: TracedRun) -> float:
        """Bound on the number of nested plates, from a run of one particle."""
        found = max((cost.dim() for cost in one.run.costs.values()), default=0)
        return found if math.isinf(self.count.nesting) else self.count.nesting

    # Sums over all values.

    def _plan_sums(self, found: Observation) -> None:
        """Sums from a step on that is fixed beforehand, where the loss can be summed over all values."""
        mode, now, way = self.mode, self.runner.recordings.now, self.count.now
        is_asked = mode.learning and not (mode.is_recorded or mode.shows or mode.by_value or found.ordered)
        if not (is_asked and now.may_sum) or now.sums is not None:
            return
        run = found.runs[0]
        rows = self.runner.rows_for(run, way.in_call) if mode.may_order else 0
        now.may_sum = rows > 0
        if rows:
            nesting = way.nesting if way.has_plate else 1 + self._nesting(run)
            now.sums = Particles(rows, True, False, nesting, sums=True, is_compact=True)
            now.drawn = num_drawn_steps(run)

    def _sums(self) -> bool:
        """Whether the step is one of those that are summed."""
        now = self.runner.recordings.now
        return now.sums is not None and self.mode.num_steps >= now.drawn

    def _summed(self) -> Observation:
        """The step whose loss is summed over all values; particles are drawn where that fails."""
        count, mode, way = self.count, self.mode, self.runner.recordings.now.sums
        assert way is not None
        if mode.shows or mode.by_value or not mode.may_order:  # more than a loss and its gradient
            return self._run(count.one)
        before = count.now
        found, reason = self._tried(way)
        if found is not None:
            if not before.sums:
                count.say("All values run in one call, in a plate of their own.")
            return found
        now = self.runner.recordings.now
        now.sums = replace(way, is_compact=False) if way.is_compact else None
        now.may_sum = way.is_compact
        found = self.taken()
        if not way.is_compact:
            count.say(count.said, f"The loss is not summed over all values: {reason}.")
        return found
