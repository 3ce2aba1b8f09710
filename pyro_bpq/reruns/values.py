r"""The recording in force of a step, with the tensors of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.record.recorded import Bound, Recorded
from pyro_bpq.rollout.runs import Program
from pyro_bpq.tracing.traced_run import TracedRun


@dataclass(frozen=True, eq=False)
class Values:
    """What costs at other values are computed from.

    Args:
        recorded: The recording of a run as it ran in the step.
        alone: That of a run of one particle; ``None`` if all particles run in one call and none has run alone.
        traced: The runs of the step.
        programs: Model, guide and arguments of each.
        nesting: Number of batch dimensions where all particles run in one call, that of the particles included.
    """

    recorded: Recorded
    alone: Recorded | None
    traced: tuple[TracedRun, ...]
    programs: tuple[Program, ...]
    nesting: int = 0

    @cached_property
    def bound(self) -> tuple[Bound, ...]:
        """The tensors of each run."""
        return tuple(_bound(self.recorded, run, program) for run, program in zip(self.traced, self.programs, strict=True))

    def of_particle(self, index: Tensor) -> Bound:
        """The tensors of one of the particles that ran in one call, by its number ``(1,)``."""
        assert self.alone is not None
        (run,), (program,) = self.traced, self.programs
        return _bound(self.alone, run, program, lambda value, name: self._alone(run, name, value, index))

    def _alone(self, run: TracedRun, name: str, value: Tensor, index: Tensor) -> Tensor:
        """The value of a site in one particle, in the shape of a run of that particle alone."""
        own = self.alone.recording.shapes[self.alone.drawn[name].value]  # type: ignore[union-attr]
        event_ndim = len(run.run.sites[name].fn.event_shape)
        if value.dim() - event_ndim >= self.nesting and value.shape[0] > 1:
            value = value.index_select(0, index)
        return value.reshape(own)

    def particle_of(self, cost: Tensor, index: Tensor) -> Tensor:
        """The entry of one particle; the whole tensor if it does not depend on the particle."""
        return cost if cost.dim() < self.nesting or cost.shape[0] == 1 else cost.index_select(0, index)[0]


def _bound(recorded: Recorded, run: TracedRun, program: Program, change: Any = lambda value, name: value) -> Bound:
    values = {name: change(record.value, name) for name, record in run.run.sites.items()}
    return recorded.bound(values, run.subsamples, (program.args, program.kwargs), run.weights)
