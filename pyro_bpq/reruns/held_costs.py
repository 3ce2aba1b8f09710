r"""Costs at other values of sites, and laws of their children, from the recording at rows of values.

All other sites keep their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pyro.distributions import MaskedDistribution
from torch import Tensor

from pyro_bpq.estimators.hindsight import Changes
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.plan.held import HeldPlan
from pyro_bpq.record.recorded import Bound, Recorded
from pyro_bpq.reruns.flipped_costs import Plates, excess, flipped, sampled_index, summed, table
from pyro_bpq.reruns.values import Values
from pyro_bpq.rollout.runs import Rollout
from pyro_bpq.tracing.traced_run import TracedRun


def unmasked(fn: Any) -> Any:
    """The distribution that values are drawn from, without the mask that hides their log-probability."""
    while isinstance(fn, MaskedDistribution):
        fn = fn.base_dist
    return fn


def joined(parts: Sequence[Changes]) -> Changes:
    """The changes of all particles, from those of each run."""
    return parts[0] if len(parts) == 1 else Changes(*map(torch.cat, zip(*parts, strict=True)))


@torch.no_grad()
def held_costs(
    plan: HeldPlan,
    graph: StochasticComputationGraph,
    values: Values,
    rollout: Rollout,
    drawn: Mapping[str, Tensor],
    particle: Tensor | None,
    group: Tensor | None,
) -> tuple[dict[str, Changes], dict[str, tuple[Tensor, ...]]]:
    """What other values of sites change while all other sites keep their values.

    Args:
        plan: Which row flips which sites.
        graph: The graph.
        values: The recording, and the runs of the step.
        rollout: The tensors of these runs.
        drawn: The evaluated components ``(M, plates, n)`` of sites of which not all components are.
        particle: Index ``(1,)`` of the particle that is evaluated; ``None`` for all. The first dimension of ``drawn``
            and of the changes is then 1.
        group: Number, a scalar, of the only group of sites that takes other values (:attr:`HeldPlan.group_of`). The
            changes of other sites are then zero. ``None`` for all sites.

    Returns:
        The changes of each site, ``(M, plates, n, K)``; of drawn bits those of the other values, ``(M, plates, n)``.
        And how much more its later and its immediate costs were in the runs than in the recording, ``(M, plates)``
        each; empty if the runs were recorded.
    """
    number, runs = rollout.num_particles, [*zip(values.traced, values.bound, strict=True)]
    costs = [{name: cost.detach() for name, cost in traced.run.costs.items()} for traced in values.traced]
    if particle is not None and rollout.is_vectorized:
        number, runs = 1, [(values.traced[0], values.of_particle(particle))]
        costs = [{name: values.particle_of(cost, particle) for name, cost in costs[0].items()}]
    elif particle is not None:
        runs, costs = [runs[int(particle)]], [costs[int(particle)]]
    parts: dict[str, list[Changes]] = {name: [] for name in plan.sites}
    more: dict[str, list[list[Tensor]]] = {name: [] for name in plan.sites}
    for i, (traced, bound) in enumerate(runs):
        mine = drawn if len(runs) == 1 else {name: own[i : i + 1] for name, own in drawn.items()}
        rows = _costs_and_laws(plan, traced, bound, mine, group)
        for name in plan.sites:
            shape = rollout.batch_shape(graph.node(name).plates)
            shape = (number if rollout.is_vectorized else 1, *shape[1:])
            parts[name].append(_tables(plan, graph, bound, traced, name, shape, rows, mine.get(name), group))
            if values.is_outdated:
                sides = (_sides(plan, graph, name)[side] for side in ("later", "immediate"))
                more[name].append([excess(costs[i], rows, own, graph.node(name).plates, shape) for own in sides])
    joint = {name: tuple(map(torch.cat, zip(*found, strict=True))) for name, found in more.items() if found}
    return {name: joined(found) for name, found in parts.items()}, joint


def _sides(plan: HeldPlan, graph: StochasticComputationGraph, name: str) -> dict[str, dict[str, Plates]]:
    """The plates of the laws and costs that other values of a site change, by name."""
    site = plan.sites[name]
    later = (cost for cost in site.costs if cost not in site.immediate)
    return {
        "law": {Recorded.law(child): graph.node(child).plates for child in site.children},
        "later": {cost: graph.cost(cost).plates for cost in later},
        "immediate": {cost: graph.cost(cost).plates for cost in site.immediate},
    }


def _costs_and_laws(
    plan: HeldPlan,
    traced: TracedRun,
    bound: Bound,
    drawn: Mapping[str, Tensor],
    group: Tensor | None,
) -> dict[str, Tensor]:
    """Costs and laws ``(rows, batch)``, the first row at the values of the run, by name."""
    recorded, moved = bound.recorded, {}
    for name in plan.sites:
        fn, value = traced.run.sites[name].fn, bound.tensors[recorded.drawn[name].value]
        new = _moved(plan, fn, value, name, drawn.get(name), group)
        moved[name] = torch.cat((value.unsqueeze(0).to(new), new))
    children = dict.fromkeys(child for site in plan.sites.values() for child in site.children)
    costs = dict.fromkeys(cost for site in plan.sites.values() for cost in site.costs)
    costs.update(dict.fromkeys(recorded.law(child) for child in children))
    return recorded.at_rows(tuple(costs), bound, moved)


def _tables(
    plan: HeldPlan,
    graph: StochasticComputationGraph,
    bound: Bound,
    traced: TracedRun,
    name: str,
    shape: tuple[int, ...],
    rows: Mapping[str, Tensor],
    drawn: Tensor | None,
    group: Tensor | None,
) -> Changes:
    """The tables of a site from the changes of costs in all rows."""
    site, plates, recorded = plan.sites[name], graph.node(name).plates, bound.recorded
    value = bound.tensors[recorded.drawn[name].value]
    start = 0 if group is not None else plan.flips.start[name] - 1
    number = site.number * (site.components.cardinality - 1)
    like, has_bits = traced.run.loss.detach(), drawn is not None and site.components.kind == "bernoulli"
    if not has_bits:
        index = sampled_index(value, traced.run.sites[name].fn, site.components, shape)
        index = index if drawn is None else index.gather(-1, drawn)

    def changes(terms: Mapping[str, Plates]) -> Tensor:
        kept = ((rows[term][1 + start : 1 + start + number] - rows[term][:1], own) for term, own in terms.items())
        total = like.new_zeros((1 + number, *shape))
        total[1:] += summed(kept, plates, shape, like)
        return total[1:].movedim(0, -1) if has_bits else table(total, index, site.components.cardinality)

    return Changes(**{side: changes(terms) for side, terms in _sides(plan, graph, name).items()})


def _moved(plan: HeldPlan, fn: Any, value: Tensor, name: str, drawn: Tensor | None, group: Tensor | None) -> Tensor:
    """Values ``(rows, batch, event)``; each row sets one component to one of its other values."""
    site = plan.sites[name]
    split = site.components
    if drawn is None:
        return flipped(value, fn, split, plan.flips, name)[1:]
    index, others = split.index(value, fn), split.cardinality - 1
    at = drawn.reshape(*index.shape[:-1], site.number)
    number, start, step = plan.flips.rows - 1, plan.flips.start[name] - 1, torch.ones_like(at[..., :1])
    if group is not None:
        number, start, step = plan.rows_of_group, 0, (group == plan.group_of[name]).to(step)
    rows = index.expand(number, *index.shape).clone()
    for i in range(site.number):
        one = at[..., i : i + 1]
        for k in range(others):
            new = (index.gather(-1, one) + (k + 1) * step) % split.cardinality
            rows[start + i * others + k].scatter_(-1, one, new)
    return split.value(rows, fn).to(value.dtype).reshape(number, *value.shape)


def sums_of_costs(
    graph: StochasticComputationGraph, traced: Sequence[TracedRun], rollout: Rollout, name: str, costs: Sequence[str]
) -> Tensor:
    """The sum ``(M, plates)`` of costs that read a site, in nats."""
    plates = graph.node(name).plates
    shape, own = rollout.run_shape(plates), {cost: graph.cost(cost).plates for cost in costs}

    def of_run(one: TracedRun) -> Tensor:
        known = ((one.run.costs[cost].detach().unsqueeze(0), each) for cost, each in own.items())
        return summed(known, plates, shape, one.run.loss.detach())[0].expand(shape)

    return torch.cat([of_run(one) for one in traced])
