r"""How many particles run where the user leaves that open.

Leave-one-out needs particles, and particles that run in one vectorised call cost little beside Pyro's Python code. So
the first step takes one particle as Pyro's ELBOs do; from then on as many run together as the program is good for,
provided that it computes the same costs for a particle among others as for that particle on its own.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_bpq.errors import BPQWarning, StructureChangedError
from pyro_bpq.immediate import same_costs
from pyro_bpq.plan import Plan
from pyro_bpq.replayer import Staged, Transient
from pyro_bpq.sandbox import Sandbox
from pyro_bpq.staging import Staging
from pyro_bpq.substitute import Substitute
from pyro_bpq.tracing import PARTICLES, TracedRun
from pyro_bpq.watch import samples

__all__ = ["OpenParticles", "num_particles_for"]

MOST_PARTICLES = 8
# A value of so many elements takes about as long as the Python code of a sample statement.
ELEMENTS = 1 << 16


def num_particles_for(plan: Plan, traced: TracedRun) -> int:
    r"""Number of particles that a program is good for.

        M = min(8, max(2, 65536 / n)),   n elements of the largest value of a particle

    where costs after a site of the default's choice are known of the sampled value alone, and differ from row to row
    of its plates; else one. Baselines from other particles know the row, those from other steps do not. Two, where
    :class:`~pyro_bpq.estimators.DebiasedStraightThrough` serves all such sites, which needs no baseline.

    Args:
        plan: The plan for one particle.
        traced: Its run.

    Returns:
        The number ``M``.
    """
    if not plan.by_row or traced.user_costs or traced.untraced or traced.elimination is not None:
        return 1
    if plan.by_row <= set(plan.sloped):
        return 2
    values = [site["value"] for trace in (traced.guide_trace, traced.model_trace) for site in samples(trace).values()]
    largest = max(value.numel() for value in values if isinstance(value, Tensor))
    return min(MOST_PARTICLES, max(2, ELEMENTS // max(largest, 1)))


class OpenParticles(Staging):
    """The part of an objective that settles the number of particles: ``num_particles=None``."""

    num_particles: int
    vectorize_particles: bool
    _is_open: bool
    _ranks: Any

    def _leave_open(self, is_open: bool) -> None:
        """Sets up the choice; called by the objective when its other options are known."""
        self._is_open = is_open
        self._given_nesting = self.max_plate_nesting
        # What the number was settled for; a run of many is compared with runs of one before it counts.
        self._settled = Transient()
        self._is_compared = False
        self._next: tuple[int, float] | None = None

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
        self._next = None

    def _observe(
        self, model: Any, guide: Any, args: Any, kwargs: Any, learning: bool
    ) -> tuple[list[TracedRun], list[Staged]]:
        program = (model, guide, args, kwargs)
        if not self._is_open:
            return super()._observe(model, guide, args, kwargs, learning)
        if self._next is not None and learning:
            self._take(*self._next)
        if self._settled.items not in ((), (model, guide)):
            self._open_state = None
        if self.num_particles > 1:
            found = self._observe_many(program, learning)
            if found is not None:
                return found
        found = super()._observe(model, guide, args, kwargs, learning)
        if learning and not self._settled.items:
            self._settle(model, guide, found[0][0])
        return found

    def _settle(self, model: Any, guide: Any, traced: TracedRun) -> None:
        """Settles the number for the steps to come."""
        structure, given = self._structure, self._given_nesting
        self._settled, self._is_compared = Transient((model, guide)), False
        is_fixed = not (structure.is_dynamic(traced) or structure.always_tracks or self._ranks is not None)
        number = num_particles_for(self._last_plan[3], traced) if is_fixed else 1
        if number > 1:
            # Of this step, one particle is still to be reckoned with.
            self._next = number, 1 + (traced.batch_ndim if math.isinf(given) else given)

    def _observe_many(self, program: Any, learning: bool) -> tuple[list[TracedRun], list[Staged]] | None:
        """The runs of a step; ``None``, and one particle from now on, if the program does not run that way."""
        model, guide, args, kwargs = program
        was_compared, settled = self._is_compared and bool(self._settled.items), Transient((model, guide))
        compares = not was_compared or self._structure.wants_tracking()
        start = torch.get_rng_state() if compares else None
        reason = "the costs of a particle depend on those it runs with"
        try:
            found = super()._observe(model, guide, args, kwargs, learning)
            if not compares or all(self._is_same(found[0][0], program, i) for i in (0, self.num_particles - 1)):
                self._settled, self._is_compared = settled, True
                return found
        except StructureChangedError:
            raise
        except Exception as error:
            # Whatever the program raises when it does not broadcast; an error of another kind comes again.
            reason = f"it failed: {error}"
        if start is not None:
            torch.set_rng_state(start)
        if was_compared:
            warnings.warn(
                f"The program ran with {self.num_particles} particles at once so far, but {reason}. From now on one "
                "particle runs; write num_particles=1 if that is what you want.",
                BPQWarning,
                stacklevel=2,
            )
        self._take(1, self._given_nesting)
        self._settled = settled
        return None

    def _is_same(self, many: TracedRun, program: Any, index: int) -> bool:
        """Whether a particle has the same costs on its own."""
        model, guide, args, kwargs = program
        nesting = int(self.max_plate_nesting)
        values: dict[str, Any] = {}
        for trace in (many.model_trace, many.guide_trace):
            for name, site in samples(trace).items():
                if not site["is_observed"]:
                    values[name] = _alone(site, index, nesting)
        put = Substitute(values | dict(many.subsamples))
        with Sandbox(int(self._noise().initial_seed())), pyro.validation_enabled(False), torch.no_grad():
            alone = self._trace(put(model), put(guide), args, kwargs, track=False).run.costs
        among = {name: _particle(cost.detach(), index, nesting) for name, cost in many.run.costs.items()}
        return alone.keys() == among.keys() and same_costs([among[name] for name in alone], list(alone.values()))


def _particle(tensor: Tensor, index: int, nesting: int, event_ndim: int = 0) -> Tensor:
    """What a tensor holds of one particle; all of it where it does not depend on particles."""
    return tensor[index] if tensor.dim() - event_ndim >= nesting and tensor.shape[0] > 1 else tensor


def _alone(site: Any, index: int, nesting: int) -> Tensor:
    """The value of a site in one particle, of the shape that it has in a run without others."""
    event_ndim = len(site["fn"].event_shape)
    value = _particle(site["value"].detach(), index, nesting, event_ndim)
    plates = max((-f.dim for f in site["cond_indep_stack"] if f.vectorized and f.name != PARTICLES), default=0)
    while value.dim() - event_ndim > plates and value.shape[0] == 1:
        value = value[0]
    return value
