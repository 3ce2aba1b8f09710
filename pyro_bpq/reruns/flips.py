"""Costs and laws where sites take other values while all others keep theirs, from the recording in rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_bpq.graph.scg import Plate
from pyro_bpq.plan.flips import ALL, Flips, Moves, Terms
from pyro_bpq.plan.plan import Plan
from pyro_bpq.record.recorded import Bound
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.reruns.values import Values
from pyro_bpq.rollout.features import Components
from pyro_bpq.rollout.runs import Rollout, sum_to_plates

Plates = Sequence[Plate]


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
