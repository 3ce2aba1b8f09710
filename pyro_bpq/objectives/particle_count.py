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
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger

from pyro_bpq.errors import BPQWarning, ParticlesDifferError, StructureChangedError, TooManyOutcomesError
from pyro_bpq.objectives.observation import STEERED, Mode, Observation, Runner
from pyro_bpq.plan.particles import num_drawn_steps
from pyro_bpq.record.key import Call
from pyro_bpq.record.recording import Uncut
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
        is_drawn = self._way(runner) is not None and not now.may_sum
        return not self.is_open or is_drawn or (now.sums is not None and self.now is now.sums)

    def _way(self, runner: Runner) -> Particles | None:
        """How the particles of such calls run, if that is settled."""
        return runner.recordings.now.particles.get((self.written, self.is_open))

    def _use(self, runner: Runner, way: Particles) -> None:
        """Settles how the particles of such calls run."""
        self.now = runner.recordings.now.particles[self.written, self.is_open] = way

    def _say(self, *texts: str) -> None:
        self.said = " ".join(texts)
        LOG.info("%s", self.said)

    def observe(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        """The runs of a step, and the signals of their sites."""
        runner.meet(program, mode)
        way = self._way(runner)
        if not self.is_open:
            return self._settled(runner, program, way, mode) if way else self._given(runner, program, mode)
        if way is None and not mode.settles:
            self.now = self.one
            return runner.observe(program, self.now, mode)
        if self._sums(runner, mode):
            return self._summed(runner, program, mode)
        if way is not None:
            found = self._settled(runner, program, way, mode)
        else:
            found = self._like_before(runner, program, mode) or self._first(runner, program, mode)
        self._plan_sums(runner, found, mode)
        return found

    def _settled(self, runner: Runner, program: Program, way: Particles, mode: Mode) -> Observation:
        """The step of particles that run in a settled way, as long as they can be computed from a recording."""
        self.now, draws = way, runner.recordings.mark() if way.is_hidden else None
        try:
            return runner.observe(program, way, mode)
        except Uncut as error:
            assert draws is not None
            draws.again()
            self._say(f"Particles do not run {way.way}: {error}.")
            return self._instead(runner, program, self.one if self.is_open else replace(way, is_hidden=False), mode)

    def _instead(self, runner: Runner, program: Program, way: Particles, mode: Mode) -> Observation:
        """The step in another way, which is settled from now on."""
        runner.meet(program, mode)
        self._use(runner, way)
        return runner.observe(program, way, mode)

    # A number that the user has given.

    def _given(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        """Particles as the user has written; those that do not keep apart in a plate run in another way."""
        draws, way = runner.recordings.mark(), self.written
        if way.has_plate and isinstance(poutine.unwrap(program.guide), Messenger):
            # Such guides of Pyro make parameters in the shape of their first run.
            make_parameters(runner, program, self.one, mode.num_steps)
            runner.meet(program, mode)
        found, mixed = self._settled(runner, program, way, mode), None
        # Without a score no particle is charged with the costs of others: they run as the user has written.
        if way.has_plate and any(record.score is not None for record in found.runs[0].run.sites.values()):
            mixed = found.runs[0].mixes
        if way.has_plate and runner.recordings.failed:
            mixed = "the program", runner.recordings.failed
        if mixed is None:
            if not mode.is_recorded:
                self._use(runner, self.now)
            return found
        cost, why = mixed
        reason = f"{cost} reads values of other particles"
        if why:
            reason = f"it is not known that particles stay apart in {cost}: it reads them by {why!r}"
        draws.again()
        runner.forget_last()
        apart = replace(way, is_vectorized=False, nesting=self.nesting)
        hidden = None
        if not found.runs[0].is_dear:
            hidden, _ = self._tried(runner, program, replace(apart, is_hidden=True), mode)
        now = "in one call, in a dimension that the program does not see" if hidden else "one after the other"
        self._say(f"{way.number} particles do not run in a plate: {reason}. They run {now}.")
        warnings.warn(
            f"Particles run {now}, because {reason}. Look at the dimensions in which the program of {cost} reduces or "
            "indexes, as by z.sum() or z[0]: those of particles and plates lie on the left.",
            BPQWarning,
            stacklevel=2,
        )
        return hidden or self._instead(runner, program, apart, mode)

    # A number that is left open.

    def _first(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        """The step of a call that looks new: one particle shows what number the program is good for."""
        draws, call, self.now = runner.recordings.mark(), runner.recordings.call, self.one
        found = runner.observe(program, self.one, replace(mode, looks=True))
        self._plan_sums(runner, found, mode)
        if self._sums(runner, mode):
            _undo(found.runs)
            draws.again()
            return self._summed(runner, program, mode)
        number, why = (1, STEERED) if found.ordered else runner.good_for(found.runs[0])
        if mode.has_ranks:
            number, why = 1, "several processes learn"
        if number == 1:
            self._use(runner, self.one)
            self._say(f"One particle runs, because {why}.")
            return runner.staged(found)
        _undo(found.runs)
        one, refused = found.runs[0], list[str]()
        plate = Particles(number, True, False, 1 + self._nesting(one))
        hidden = Particles(number, False, True, self.nesting)
        draws.again()
        for way, where in ((plate, "in a plate"), (hidden, "in one call")):
            many, why = self._tried(runner, program, way, mode, (one, call))
            if many is not None:
                self._say(f"{number} particles run {way.way}.", *refused)
                return many
            refused.append(f"{number} particles do not run {where}: {why}.")
        self._say("One particle runs.", *refused)
        return self._instead(runner, program, self.one, mode)

    def _like_before(self, runner: Runner, program: Program, mode: Mode) -> Observation | None:
        """The step of a call that looks new, with the particles of the last one, if its structure is no news."""
        if not self.now.has_plate or self.now.sums or mode.is_recorded:
            return None
        found, _ = self._tried(runner, program, self.now, mode, is_known=True)
        if found is None:
            runner.meet(program, mode)
        return found

    def _tried(
        self,
        runner: Runner,
        program: Program,
        way: Particles,
        mode: Mode,
        one: tuple[TracedRun, Call] | None = None,
        is_known: bool = False,
    ) -> tuple[Observation | None, str]:
        """The step of many particles in some way, settled from now on; or, with nothing drawn, why they do not run so.

        ``one`` is the run of one particle, and its call. With ``is_known`` the structure has to be known.
        """
        created, known = set(pyro.get_param_store().keys()), {*runner.recordings.known}
        runner.meet(program, mode)

        def differs(found: Observation) -> str:
            """What tells a particle among others from one on its own; empty where nothing does."""
            run = found.runs[0] if found.runs else None
            if run is None or (is_known and (run.key not in known or runner.good_for(run, way.number)[0] < way.number)):
                return "it is another program"
            if run.mixes is not None:
                cost, why = run.mixes
                return f"{cost} reads them by {why!r}" if why else f"{cost} of a particle reads values of others"
            if runner.is_alike(run, way, one):
                return ""
            if way.is_hidden:
                return "its gradient is not that of its operators, as with hooks or torch.no_grad()"
            return "the costs of a particle depend on the particles that it runs with"

        found, reason = _attempt(runner, program, way, mode, differs, warns=is_known)
        if found is not None:
            self._use(runner, way)
            return found, ""
        for name in set(pyro.get_param_store().keys()) - created:
            # They may have the shape of many particles.
            del pyro.get_param_store()[name]
        return None, reason

    def _nesting(self, one: TracedRun) -> float:
        """Bound on the number of nested plates, from a run of one particle."""
        return one.batch_ndim if math.isinf(self.nesting) else self.nesting

    # Sums over all values.

    def _plan_sums(self, runner: Runner, found: Observation, mode: Mode) -> None:
        """Sums from a step on that is fixed beforehand, where the loss can be summed over all values."""
        now, way = runner.recordings.now, self.now
        is_asked = mode.learning and not (mode.is_recorded or mode.shows or mode.by_value or found.ordered)
        if not (is_asked and now.may_sum) or now.sums is not None:
            return
        run = found.runs[0]
        rows = runner.rows_for(run, way.in_call) if mode.may_order else 0
        now.may_sum = rows > 0
        if rows:
            nesting = way.nesting if way.has_plate else 1 + self._nesting(run)
            now.sums = Particles(rows, True, False, nesting, sums=True, is_compact=True)
            now.drawn = num_drawn_steps(run)

    def _sums(self, runner: Runner, mode: Mode) -> bool:
        """Whether a step is one of those that are summed."""
        return runner.recordings.now.sums is not None and mode.num_steps >= runner.recordings.now.drawn

    def _summed(self, runner: Runner, program: Program, mode: Mode) -> Observation:
        """The step whose loss is summed over all values; particles are drawn where that fails."""
        way, before = runner.recordings.now.sums, self.now
        assert way is not None
        if mode.shows or mode.by_value or not mode.may_order:  # more than a loss and its gradient
            return runner.observe(program, self.one, mode)
        found, reason = _attempt(runner, program, way, mode)
        if found is not None:
            self.now = way
            if not before.sums:
                self._say("All values run in one call, in a plate of their own.")
            return found
        now = runner.recordings.now
        now.sums = replace(way, is_compact=False) if way.is_compact else None
        now.may_sum = way.is_compact
        found = self.observe(runner, program, mode)
        if not way.is_compact:
            self._say(self.said, f"The loss is not summed over all values: {reason}.")
        return found


def _attempt(
    runner: Runner,
    program: Program,
    way: Particles,
    mode: Mode,
    differs: Callable[[Observation], str] = lambda found: "",
    warns: bool = False,
) -> tuple[Observation | None, str]:
    """A step in some way; or, with nothing drawn, why it does not count: ``differs`` says something, or it fails."""
    draws = runner.recordings.mark()
    try:
        with warnings.catch_warnings():
            if not warns:  # a run of one particle has given our own warnings in the same step
                warnings.simplefilter("ignore", BPQWarning)
            found = runner.observe(program, way, mode)
        reason = differs(found)
        if not reason:
            return found, ""
        _undo(found.runs)
    except (StructureChangedError, TooManyOutcomesError):
        raise
    except Exception as error:  # a program may fail in any way at values of another shape
        text = str(error).split("\n")[0].rstrip(".")
        reason = text if way.sums or isinstance(error, ParticlesDifferError) else f"it failed: {text}"
    draws.again()
    return None, reason


def make_parameters(runner: Runner, program: Program, one: Particles, num_steps: int) -> None:
    """Runs one particle for the parameters that it makes, in its shape. Its draws come again in the next run."""
    draws = runner.recordings.mark()
    with torch.no_grad():
        _undo([runner.trace(program, one, step=num_steps, track=True)])
    draws.again()


def _undo(runs: Sequence[TracedRun]) -> None:
    """Gives tensors that the first of some runs has written into what was in them before."""
    for run in runs[:1]:
        if run.recorded is not None:
            run.recorded.recording.undo()
