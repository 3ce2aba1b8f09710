r"""The recording in force of a step, with the tensors of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.record.key import Call
from pyro_bpq.record.recorded import Bound, Recorded
from pyro_bpq.record.traced_run import TracedRun


@dataclass(frozen=True, eq=False)
class Values:
    """What costs at other values are computed from.

    Args:
        recorded: The recording of each run.
        alone: That of a run of one particle; ``None`` if all particles run in one call and none has run alone.
        traced: The runs of the step.
        call: What the call of the programs looks like.
        nesting: Number of batch dimensions where all particles run in one call, that of the particles included.
    """

    recorded: tuple[Recorded, ...]
    alone: Recorded | None
    traced: tuple[TracedRun, ...]
    call: Call
    nesting: int = 0

    @cached_property
    def bound(self) -> tuple[Bound, ...]:
        """The tensors of each run."""
        return tuple(run.bound(own, self.call) for own, run in zip(self.recorded, self.traced, strict=True))

    @property
    def is_outdated(self) -> bool:
        """Whether costs come from an earlier run than the step's own."""
        return any(run.recorded is None for run in self.traced)

    def of_runs(self, particle: Tensor | None) -> list[tuple[TracedRun, Bound, Mapping[str, Tensor]]]:
        """Each run of the step, its tensors and its costs; those of one particle, whose number ``(1,)`` is given."""
        runs = [(run, own, run.run.costs) for run, own in zip(self.traced, self.bound, strict=True)]
        if particle is None:
            return runs
        if not self.nesting:
            return [runs[int(particle)]]
        costs = {name: self.particle_of(cost, particle) for name, cost in runs[0][2].items()}
        return [(self.traced[0], self.of_particle(particle), costs)]

    def of_particle(self, index: Tensor) -> Bound:
        """The tensors of one of the particles that ran in one call, by its number ``(1,)``."""
        assert self.alone is not None
        (run,), alone = self.traced, self.alone
        values = {}
        for name, record in run.run.sites.items():
            own = self.particle_of(record.value, index, len(record.fn.event_shape))
            # A value may stand for a whole plate.
            shape = record.fn.shape()[len(record.fn.batch_shape) == self.nesting :]
            values[name] = own.expand(shape).reshape(alone.recording.shapes[alone.drawn[name].value])
        weights = {name: tuple(self.particle_of(part, index) for part in pair) for name, pair in run.weights.items()}
        return alone.bound(values, run.subsamples, self.call, weights)

    def particle_of(self, item: Any, index: Tensor, event_ndim: int = 0) -> Any:
        """The entry of one particle; the whole if it does not depend on the particle."""
        if not isinstance(item, Tensor) or item.dim() - event_ndim < self.nesting or item.shape[0] == 1:
            return item
        return item.index_select(0, index)[0]


@torch.no_grad()
def is_alike(values: Values, number: int) -> bool:
    """Whether the particle of that number, which ran among others, has cost what it costs alone.

    A program may read a shape, as of ``z.mean()``. Numbers that are nearly equal are computed again in double.
    """
    (run,), (recorded,), (among,), index = values.traced, values.recorded, values.bound, torch.tensor([number])
    alone = values.of_particle(index)
    own = alone.recorded
    names = [name for name in own.costs if name in recorded.costs and own.can_compute(name) and not own.draws(name)]
    found = alone.again(names)
    if all(_is_close(found[name], values.particle_of(run.run.costs[name], index)) for name in names):
        return True
    names = [name for name in names if recorded.can_compute(name)]
    try:
        found, many = alone.again(names, in_double=True), among.again(names, in_double=True)
    except RuntimeError:  # an operator of single precision
        return False
    return all(_is_close(found[name], values.particle_of(many[name], index), 5e-8) for name in names)


def _is_close(first: Tensor, second: Tensor, tolerance: float = 5e-5) -> bool:
    if first.numel() != second.numel():
        first, second = torch.broadcast_tensors(first, second)
    return torch.allclose(first.reshape(-1), second.reshape(-1), rtol=tolerance, atol=tolerance)
