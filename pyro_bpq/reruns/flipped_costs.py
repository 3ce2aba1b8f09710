r"""Immediate costs of finite sites at all of their values, from the recording at rows of values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.graph.scg import Plate
from pyro_bpq.plan.extra_run import FlipPlan
from pyro_bpq.plan.plan import Plan
from pyro_bpq.reruns.values import Values
from pyro_bpq.rollout.features import Components
from pyro_bpq.rollout.runs import Rollout, sum_to_plates

Plates = Sequence[Plate]


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
    graph, flips = plan.graph, plan.flips
    assert flips is not None
    wanted = tuple(dict.fromkeys(cost for costs in flips.costs.values() for cost in costs))
    tables: dict[str, list[Tensor]] = {name: [] for name in plan.components}
    shifts: dict[str, list[Tensor]] = {name: [] for name in plan.components}
    for traced, bound in zip(values.traced, values.bound, strict=True):
        run = traced.run
        moved = {
            n: flipped(run.sites[n].value, run.sites[n].fn, split, flips, n) for n, split in plan.components.items()
        }
        rows = bound.recorded.at_rows(wanted, bound, moved)
        for name, split in plan.components.items():
            plates, start = graph.node(name).plates, flips.start[name]
            shape, number = rollout.run_shape(plates), split.size * (split.cardinality - 1)
            costs = {cost: graph.cost(cost).plates for cost in flips.costs[name]}
            kept = ((torch.cat((rows[c][:1], rows[c][start : start + number])), own) for c, own in costs.items())
            index = sampled_index(run.sites[name].value, run.sites[name].fn, split, shape)
            tables[name].append(table(summed(kept, plates, shape, run.loss), index, split.cardinality))
            shifts[name].append(-excess(run.costs, rows, costs, plates, shape))
    return {n: torch.cat(own) for n, own in tables.items()}, {n: torch.cat(own) for n, own in shifts.items()}


def flipped(value: Tensor, fn: Any, split: Components, plan: FlipPlan, name: str) -> Tensor:
    """Values ``(rows, batch, event)``; each row sets one component to one of its other values."""
    delta, value = plan.steps(name, split, value.device), value.detach()
    if split.kind == "bernoulli":
        shape = (plan.rows, *(1,) * (value.dim() - split.value_ndim), *split.event_shape)
        return torch.where(delta.reshape(shape) > 0, 1 - value, value)
    index = split.index(value, fn)
    delta = delta.reshape(plan.rows, *(1,) * (index.dim() - 1), split.size)
    return split.value((index + delta) % split.cardinality, fn).to(value.dtype)


def summed(terms: Iterable[tuple[Tensor, Plates]], plates: Plates, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The sum ``(rows, M, plates)`` of costs ``(rows, batch)`` over all dimensions but the plates of a site."""
    parts = [_reduced(cost, own, plates, shape) for cost, own in terms]
    return sum(parts[1:], parts[0]) if parts else like.new_zeros(1, *shape)


def excess(
    costs: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
    wanted: Mapping[str, Plates],
    plates: Plates,
    shape: tuple[int, ...],
) -> Tensor:
    """How much more costs ``(batch)`` were in the run than the first of the rows gives, ``(M, plates)``.

    ``wanted`` are their plates by name. Costs that are infinite in both are equal.
    """
    more = (((costs[c].detach() - rows[c][0]).nan_to_num(0.0).unsqueeze(0), own) for c, own in wanted.items())
    return summed(more, plates, shape, next(iter(rows.values())))[0].expand(shape)


def _reduced(cost: Tensor, source: Plates, target: Plates, shape: tuple[int, ...]) -> Tensor:
    missing = len(shape) + 1 - cost.dim()
    if missing < 0:
        cost, missing = cost.sum(tuple(range(1, 1 - missing))), 0
    cost = sum_to_plates(cost.reshape(cost.shape[0], *(1,) * missing, *cost.shape[1:]), source, target)
    extra = [i + 1 for i, size in enumerate(shape) if size == 1 and cost.shape[i + 1] != 1]
    return cost.sum(extra, keepdim=True) if extra else cost


def sampled_index(value: Tensor, fn: Any, split: Components, shape: tuple[int, ...]) -> Tensor:
    """Index ``(M, plates, D)`` of the sampled value of each component."""
    return split.index(value, fn).expand(*shape, -1)


def table(cost: Tensor, index: Tensor, cardinality: int) -> Tensor:
    """Turns costs by row into costs by component and value.

    Args:
        cost: Costs ``(1 + D (K - 1), M, plates)``: of the sample, then of each step from the sample of each component.
        index: Sampled values ``(M, plates, D)``.
        cardinality: Number of values ``K``.

    Returns:
        Costs ``(M, plates, D, K)``.
    """
    size = index.shape[-1]
    others = cost[1:].reshape(size, cardinality - 1, *cost.shape[1:])
    sample = cost[:1].unsqueeze(0).expand(size, 1, *cost.shape[1:])
    relative = torch.cat((sample, others), 1).movedim((0, 1), (-2, -1))
    relative = relative.expand(*index.shape, cardinality)
    values = torch.arange(cardinality, device=index.device)
    return relative.gather(-1, (values - index.unsqueeze(-1)) % cardinality)
