r"""The recording in force of a step with the tensors of its runs, and its costs at other values of sites, in rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bpq.graph.scg import Plate
from pyro_bpq.plan.flips import ALL, Flips, Moves, Terms
from pyro_bpq.plan.plan import Plan
from pyro_bpq.record.key import Call
from pyro_bpq.record.recorded import Bound, Recorded
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.rollout.features import Components
from pyro_bpq.rollout.runs import Rollout, sum_to_plates

Plates = Sequence[Plate]


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


# Costs where sites take other values while all others keep theirs.


class Rows(NamedTuple):
    """Costs and laws of a run ``(rows, batch)``, the first row at the values of the run, by name."""

    traced: TracedRun
    bound: Bound
    costs: Mapping[str, Tensor]

    @staticmethod
    def of(flips: Flips, traced: TracedRun, bound: Bound, moves: Moves, wanted: Sequence[str]) -> Rows:
        """Evaluates what is wanted, where components of sites take other values."""
        recorded, sites = bound.recorded, traced.run.sites
        values = {name: bound.tensors[recorded.drawn[name].value] for name in flips.sites}
        moved = {name: flips.moved(name, value, sites[name].fn, moves) for name, value in values.items()}
        return Rows(traced, bound, bound.at_rows(wanted, moved))

    def sampled(self, name: str, split: Components, shape: tuple[int, ...]) -> Tensor:
        """Index ``(M, plates, D)`` of the sampled value of each component of a site."""
        value = self.bound.tensors[self.bound.recorded.drawn[name].value]
        return split.index(value, self.traced.run.sites[name].fn).expand(*shape, -1)


@torch.no_grad()
def flipped_costs(plan: Plan, values: Values, rollout: Rollout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The immediate costs of each flipped site.

    Args:
        plan: The plan of the structure.
        values: The recording, and the runs of the step.
        rollout: The tensors of these runs.

    Returns:
        The costs at all values in nats, ``(M, plate dims, D, K)``; and how much the recording gives for the sample
        itself beyond what the run has cost, ``(M, plate dims)``: zero while the recording is not outdated.
    """
    flips = plan.flips
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in flips.sites}
    for traced, bound in zip(values.traced, values.bound, strict=True):
        rows = Rows.of(flips, traced, bound, ALL, flips.wanted)
        for name, site in flips.sites.items():
            plates, split, start = plan.graph.node(name).plates, site.components, flips.start[name]
            shape, own = rollout.run_shape(plates), slice(start, start + site.rows)
            kept = ((torch.cat((rows.costs[c][:1], rows.costs[c][own])), each) for c, each in site.costs.items())
            total = summed(kept, plates, shape, traced.run.loss)
            costs = table(total[:1], total[1:], rows.sampled(name, split, shape), split.cardinality)
            found[name].append((costs, -excess(traced.run.costs, rows.costs, site.costs, plates, shape)))
    tables, shifts = ({name: torch.cat([part[i] for part in own]) for name, own in found.items()} for i in (0, 1))
    return tables, shifts


def summed(terms: Iterable[tuple[Tensor, Plates]], plates: Plates, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The sum ``(rows, M, plates)`` of costs ``(rows, batch)`` over all dimensions but the plates of a site."""
    parts = [_reduced(cost, own, plates, shape) for cost, own in terms]
    return sum(parts[1:], parts[0]) if parts else like.new_zeros(1, *shape)


def excess(
    costs: Mapping[str, Tensor], rows: Mapping[str, Tensor], wanted: Terms, plates: Plates, shape: tuple[int, ...]
) -> Tensor:
    """How much more costs ``(batch)`` were in the run than the first of the rows gives, ``(M, plates)``.

    ``wanted`` are their plates by name. Costs that are infinite in both are equal.
    """
    more = (((costs[c].detach() - rows[c][0]).nan_to_num(0.0).unsqueeze(0), own) for c, own in wanted.items())
    return summed(more, plates, shape, next(iter(costs.values())).detach())[0].expand(shape)


def _reduced(cost: Tensor, source: Plates, target: Plates, shape: tuple[int, ...]) -> Tensor:
    missing = len(shape) + 1 - cost.dim()
    if missing < 0:
        cost, missing = cost.sum(tuple(range(1, 1 - missing))), 0
    cost = sum_to_plates(cost.reshape(cost.shape[0], *(1,) * missing, *cost.shape[1:]), source, target)
    extra = [i + 1 for i, size in enumerate(shape) if size == 1 and cost.shape[i + 1] != 1]
    return cost.sum(extra, keepdim=True) if extra else cost


def table(sample: Tensor, others: Tensor, index: Tensor, cardinality: int) -> Tensor:
    """Turns costs by row into costs by component and value.

    Args:
        sample: Costs ``(1, M, plates)`` of the sample.
        others: Costs ``(D (K - 1), M, plates)`` of each step from the sample of each component.
        index: Sampled values ``(M, plates, D)``.
        cardinality: Number of values ``K``.

    Returns:
        Costs ``(M, plates, D, K)``.
    """
    size = index.shape[-1]
    others = others.reshape(size, cardinality - 1, *others.shape[1:])
    sample = sample.unsqueeze(0).expand(size, 1, *sample.shape[1:])
    relative = torch.cat((sample, others), 1).movedim((0, 1), (-2, -1))
    relative = relative.expand(*index.shape, cardinality)
    values = torch.arange(cardinality, device=index.device)
    return relative.gather(-1, (values - index.unsqueeze(-1)) % cardinality)
