r"""How many particles run where the user leaves that open.

Leave-one-out needs particles, and particles that run in one vectorised call cost little beside Pyro's Python code. So
the first step runs one particle, to see the program's structure, and then as many together as the program is good for,
provided that it computes the same costs for a particle among others as for that particle on its own.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pyro
from torch import Tensor

from pyro_bpq.errors import BPQWarning, StructureChangedError
from pyro_bpq.graph.scg import Plate
from pyro_bpq.objectives.replayer import Staged, Transient
from pyro_bpq.objectives.staging import Staging
from pyro_bpq.plan.planner import Plan
from pyro_bpq.reruns.apart import Together, keeps_apart
from pyro_bpq.reruns.row_runs import is_due
from pyro_bpq.tracing.draws import Draws
from pyro_bpq.tracing.sandbox import LentBuffers
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.watch import samples

__all__ = ["OpenParticles", "num_particles_for"]

MOST_PARTICLES = 8
# A value of so many elements takes about as long as the Python code of a sample statement.
ELEMENTS = 1 << 16
# What torch, Pyro and this package raise where shapes do not fit; a program's own errors are left alone.
_DOES_NOT_FIT = (ValueError, RuntimeError, IndexError, TypeError, AssertionError, NotImplementedError)


def num_particles_for(plan: Plan, traced: TracedRun, particles: int = 1) -> int:
    r"""Number of particles that a program is good for.

        M = min(8, max(2, 65536 / n)),   n elements of the largest value of a particle

    where costs after a site of the default's choice are known of the sampled value alone, and differ from row to row
    of its plates; else one. Baselines from other particles know the row, those from other steps do not. Two, where
    :class:`~pyro_bpq.estimators.DebiasedStraightThrough` serves all such sites, which needs no baseline.

    Args:
        plan: The plan of a run.
        traced: The run.
        particles: Number of particles in it.

    Returns:
        The number ``M``.
    """
    if not plan.by_row or traced.user_costs or traced.untraced or traced.elimination is not None:
        return 1
    if plan.by_row <= set(plan.sloped):
        return 2
    values = [site["value"] for trace in (traced.guide_trace, traced.model_trace) for site in samples(trace).values()]
    largest = max(value.numel() for value in values if isinstance(value, Tensor))
    return min(MOST_PARTICLES, max(2, ELEMENTS * particles // max(largest, 1)))


class OpenParticles(Staging):
    """The part of an objective that settles the number of particles: ``num_particles=None``."""

    num_particles: int
    num_steps: int
    vectorize_particles: bool
    _is_open: bool
    _ranks: Any
    _alone: Any

    def _leave_open(self, is_open: bool) -> None:
        """Sets up the choice; called by the objective when its other options are known."""
        self._is_open = is_open
        self._given_nesting = self.max_plate_nesting
        # What the number was settled for; a run of many is compared with runs of one before it counts.
        self._settled = Transient()
        self._is_compared, self._together = False, Together()
        self._next: tuple[int, float] | None = None
        self._taken, self._sizes = self.num_particles, dict[Plate, int]()

    @property
    def _open_state(self) -> tuple[int, float] | None:
        if self._is_open and self.num_particles > 1:
            return self.num_particles, self.max_plate_nesting
        return self._next

    @_open_state.setter
    def _open_state(self, state: tuple[int, float] | None) -> None:
        if self._is_open:
            self._take(*(state or (1, self._given_nesting)))
            self._settled, self._is_compared = Transient(), False

    @contextlib.contextmanager
    def _one_if_open(self) -> Iterator[None]:
        """One particle for programs that nothing is settled for: those of an evaluation may be others."""
        before = self.num_particles, self.vectorize_particles, self.max_plate_nesting
        if self._is_open:
            self.num_particles, self.vectorize_particles, self.max_plate_nesting = 1, False, self._given_nesting
        try:
            yield
        finally:
            self.num_particles, self.vectorize_particles, self.max_plate_nesting = before

    def _ask_for_critics(self) -> None:
        """One particle from now on: with more, sites in rows of data would have none."""
        if self._is_open:
            self._open_state, self._is_open = None, False

    def _take(self, number: int, nesting: float) -> None:
        self.num_particles, self.vectorize_particles, self.max_plate_nesting = number, number > 1, nesting
        self._taken, self._next = number, None

    def _observe(
        self, model: Any, guide: Any, args: Any, kwargs: Any, learning: bool
    ) -> tuple[list[TracedRun], list[Staged]]:
        program = (model, guide, args, kwargs)
        # A number that was set since is no longer open.
        self._is_open = self._is_open and self.num_particles == self._taken
        if not self._is_open:
            return self._observe_given(program, learning)
        if self._next is not None and learning:
            self._take(*self._next)
        if self._settled.items not in ((), (model, guide)):
            self._open_state = None
        if self.num_particles > 1:
            before = self.num_particles, self.max_plate_nesting, self._settled, self._is_compared
            many, warning = self._observe_many(program, learning)
            if many is not None:
                return many
            try:
                found = super()._observe(model, guide, args, kwargs, learning)
            except BaseException:
                # With one particle it fails too: their number is not why.
                self._take(*before[:2])
                self._settled, self._is_compared = before[2:]
                raise
            if warning:
                warnings.warn(warning, BPQWarning, stacklevel=2)
            return found
        found = super()._observe(model, guide, args, kwargs, learning)
        if learning and not self._settled.items:
            self._settle(model, guide, found[0][0])
            if self._next is not None and self.num_steps == 0:
                # Adam long remembers a first gradient that is noisier than those that follow.
                self._take(*self._next)
                return self._observe_many(program, learning, is_first=True)[0] or found
        return found

    def _observe_given(self, program: Any, learning: bool) -> tuple[list[TracedRun], list[Staged]]:
        """The runs of a step with the number of particles that the user has given.

        Particles that are to run in one call, but do not keep apart there, run one after the other from now on.
        """
        model, guide, args, kwargs = program
        if not (self.vectorize_particles and self.num_particles > 1):
            return super()._observe(model, guide, args, kwargs, learning)
        draws, lends = Draws(), self._together.is_wanted(learning, self.num_steps) and self._has_buffers
        with LentBuffers() if lends else contextlib.nullcontext() as lent:
            found = super()._observe(model, guide, args, kwargs, learning)
            (together,) = self._arguments(*program)
            mixes = self._together.mixes(
                *(self._trace, (*self._alone(model, guide), args, kwargs), together, found[0][0], self.num_particles),
                *(int(self.max_plate_nesting), learning, self.num_steps, self._has_buffers),
            )
            if lent is not None and not mixes:
                lent.keep()
        if not mixes:
            return found
        draws.again()
        self.vectorize_particles, self.max_plate_nesting = False, self.max_plate_nesting - 1
        self._plans.last = None
        return super()._observe(model, guide, args, kwargs, learning)

    def _settle(self, model: Any, guide: Any, traced: TracedRun) -> None:
        """Settles the number for the steps to come."""
        structure, given = self._structure, self._given_nesting
        self._settled, self._is_compared = Transient((model, guide)), False
        is_fixed = not (structure.is_dynamic(traced) or structure.always_tracks or self._ranks is not None)
        number = num_particles_for(self._planned, traced) if is_fixed else 1
        if number > 1:
            # One particle may still have to be reckoned with in this step.
            self._next = number, 1 + (traced.batch_ndim if math.isinf(given) else given)
        self._sizes = dict(traced.plate_sizes)

    def _lower(self, traced: TracedRun) -> None:
        """Lets fewer particles run from the next step on, where plates have grown."""
        if traced.plate_sizes != self._sizes:
            self._sizes = dict(traced.plate_sizes)
            number = num_particles_for(self._planned, traced, self.num_particles)
            if 1 < number < self.num_particles:
                self._next = number, self.max_plate_nesting

    def _observe_many(
        self, program: Any, learning: bool, is_first: bool = False
    ) -> tuple[tuple[list[TracedRun], list[Staged]] | None, str]:
        """The runs of a step; ``None``, and one particle from now on, if the program does not run that way.

        Where it has made parameters, ``None`` too, but with one particle for this step alone. Also a warning, to be
        given if it runs with one; empty where none is due.
        """
        model, guide, args, kwargs = program
        was_compared, settled = self._is_compared and bool(self._settled.items), Transient((model, guide))
        # Programs change: into another mode, or with what they learn.
        is_checked_again = learning and is_due(self.num_steps)
        compares = not was_compared or is_checked_again or self._structure.wants_tracking()
        draws, reason = Draws(), ""
        number, nesting, known = self.num_particles, self.max_plate_nesting, set(pyro.get_param_store().keys())
        with LentBuffers() if compares and self._has_buffers else contextlib.nullcontext() as lent:
            try:
                found = super()._observe(model, guide, args, kwargs, learning)
                if compares and known.issuperset(pyro.get_param_store().keys()):
                    reason = self._difference(found[0][0], program, lent)
                    if lent is not None and not (reason or is_first):
                        # In the first step the run of one particle has written them.
                        lent.keep()
            except StructureChangedError:
                raise
            except _DOES_NOT_FIT as error:
                # An error that has another cause comes again.
                reason = f"it failed: {error}"
        created = set(pyro.get_param_store().keys()) - known
        if not (reason or created):
            self._settled, self._is_compared = settled, True
            if learning:
                self._lower(found[0][0])
            return found, ""
        draws.again()
        self._take(1, self._given_nesting)
        self._settled = settled
        for name in created:
            # Made from values of many particles, they might have the shape of those.
            del pyro.get_param_store()[name]
        if not reason:
            self._next, self._is_compared = (number, nesting), False
        elif was_compared:
            return None, (
                f"The program ran with {number} particles at once so far, but {reason}. From now on one "
                "particle runs; write num_particles=1 if that is what you want."
            )
        return None, ""

    @property
    def _has_buffers(self) -> bool:
        return self._plans.last is None or self._plans.last.plan.has_buffers

    def _difference(self, many: TracedRun, program: Any, lent: LentBuffers | None) -> str:
        """What tells a particle among others from one on its own; empty where nothing does."""
        if not self._keeps_apart(many, program):
            return "the costs of a particle depend on those it runs with"
        return "" if lent is None or lent.fit else "a buffer of a module takes the shape of the particles"

    def _keeps_apart(self, many: TracedRun, program: Any) -> bool | None:
        (together,) = self._arguments(*program)
        number, nesting, seed = self.num_particles, int(self.max_plate_nesting), self.num_steps
        is_first = not self._is_compared
        return keeps_apart(self._trace, program, together, many, number, nesting, seed, is_first, self._has_buffers)
