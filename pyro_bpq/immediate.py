r"""Immediate costs of finite sites, evaluated exactly by one extra run of the model.

Every component of a site is set to each of its other values in a dimension of its own, to the left of all
plates, while everything else keeps its sampled value. Sites that no evaluated cost reads together are
flipped in the same rows; the others get rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_bpq.cost_statement import SkipCosts
from pyro_bpq.features import Components
from pyro_bpq.graph import StochasticComputationGraph
from pyro_bpq.rollout import Rollout, sum_to_plates
from pyro_bpq.row_runs import RowProgram, RowRuns
from pyro_bpq.substitute import Substitute
from pyro_bpq.tracing import TracedRun, cost_of_guide, cost_of_model, cost_of_site
from pyro_bpq.watch import is_enumerated

__all__ = ["FlipPlan", "flip_plan", "immediate_costs", "immediate_model_costs"]


@dataclass(frozen=True)
class FlipPlan:
    """Which rows of the extra run flip which site.

    Args:
        start: First row of each flipped site; row 0 is the sample.
        rows: Number of rows in all.
        costs: For each flipped site the model's sites whose costs are read off.
    """

    start: Mapping[str, int]
    rows: int
    costs: Mapping[str, tuple[str, ...]]
    _steps: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def steps(self, name: str, split: Components, device: torch.device) -> Tensor:
        """How far each row moves each component of a site, ``(rows, D)``: the same in every step."""
        key = (name, split.size, split.cardinality, device)
        if key not in self._steps:
            others = split.cardinality - 1
            step = torch.arange(split.size * others)
            delta = torch.zeros(self.rows, split.size, dtype=torch.long if others >> 15 else torch.int16)
            delta[self.start[name] + step, step // others] = (step % others + 1).to(delta.dtype)
            self._steps[key] = delta.to(device)
        return self._steps[key]


def immediate_costs(graph: StochasticComputationGraph) -> dict[str, tuple[str, ...]]:
    """For each stochastic node the costs that read nothing sampled later, in history form."""
    found: dict[str, list[str]] = {node.name: [] for node in graph.nodes}
    for cost in graph.costs:
        last = graph.last_variable(cost.name)
        if last is not None:
            found[last].append(cost.name)
    return {name: tuple(costs) for name, costs in found.items()}


def immediate_model_costs(graph: StochasticComputationGraph) -> dict[str, tuple[str, ...]]:
    """For each stochastic node its immediate costs of the model that can be read off row by row.

    They are immediate, belong to another site of the model, and have all plates of the node: flipping
    all its plate rows at once then leaves each row's cost its own.
    """
    found = {}
    for name, costs in immediate_costs(graph).items():
        plates = set(graph.node(name).plates)
        own = (cost_of_guide(name), cost_of_model(name))
        found[name] = tuple(
            cost
            for cost in costs
            if cost not in own
            and not cost.startswith(("log q(", "E[log q("))
            and plates <= set(graph.cost(cost).plates)
        )
    return found


def flip_plan(
    graph: StochasticComputationGraph,
    components: Mapping[str, Components],
    costs: Mapping[str, tuple[str, ...]],
) -> FlipPlan:
    """Assigns rows to sites by greedy colouring.

    Args:
        graph: The graph.
        components: Finite components of the sites to flip.
        costs: For each of them the costs to evaluate.

    Returns:
        The plan.
    """
    colours: list[list[str]] = []
    # The members of each colour, and what their costs read, as bits.
    taken: list[tuple[int, int]] = []
    for name in components:
        own, reads = 1 << graph.index[name], graph.cost_set_bits(costs[name])
        for k, (inside, read) in enumerate(taken):
            if not inside & reads and not own & read:
                colours[k].append(name)
                taken[k] = inside | own, read | reads
                break
        else:
            colours.append([name])
            taken.append((own, reads))
    start, rows = {}, 1
    for members in colours:
        for name in members:
            start[name] = rows
        rows += max(components[m].size * (components[m].cardinality - 1) for m in members)
    return FlipPlan(start, rows, {name: tuple(costs[name]) for name in components})


@torch.no_grad()
def flipped_costs(
    plan: FlipPlan,
    components: Mapping[str, Components],
    traced: Sequence[TracedRun],
    rollout: Rollout,
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    graph: StochasticComputationGraph,
    runs: RowRuns,
    has_buffers: bool = True,
    learning: bool = True,
) -> dict[str, Tensor] | None:
    """Runs the model with flipped values and reads the immediate costs off.

    Args:
        plan: The rows.
        components: Finite components of the flipped sites.
        traced: The runs of the step.
        rollout: Their tensors.
        model: The model.
        args: Its arguments.
        kwargs: Its keyword arguments.
        graph: The graph.
        runs: Decides in which way the rows run.
        has_buffers: Whether the model may call modules with buffers.
        learning: Whether this counts as a use of it.

    Returns:
        For each flipped site its immediate costs in nats, ``(M, plate dims, D, K)``; ``None`` if there is no way to
        run the model at other values.
    """
    tables: dict[str, list[Tensor]] = {name: [] for name in components}
    for run in traced:
        rows = _run_flipped(plan, components, run, model, args, kwargs, runs, has_buffers, learning)
        if rows is None:
            return None
        for name, split in components.items():
            shape = rollout.batch_shape(graph.node(name).plates)
            if not rollout.is_vectorized:
                shape = (1, *shape[1:])
            total = next(iter(rows.values())).new_zeros(())
            for cost in plan.costs[name]:
                plates = graph.node(name).plates
                total = total + _reduce(rows[cost], graph.cost(cost).plates, plates, len(shape))
            index = split.index(run.run.sites[name].value, run.run.sites[name].fn)
            index = index.reshape(*(1,) * (len(shape) + 1 - index.dim()), *index.shape)
            tables[name].append(_table(total, index.expand(*shape, -1), split, plan.start[name]))
    return {name: torch.cat(parts) for name, parts in tables.items()}


def _run_flipped(
    plan: FlipPlan,
    components: Mapping[str, Components],
    traced: TracedRun,
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    runs: RowRuns,
    has_buffers: bool,
    learning: bool,
) -> dict[str, Tensor] | None:
    """Costs ``(rows, batch)`` of the extra run, by name."""
    sites = {
        name: (site["fn"], site["value"].detach())
        for trace in (traced.guide_trace, traced.model_trace)
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not site["is_observed"] and not is_enumerated(site)
    }
    flipped = {}
    for name, split in components.items():
        record = traced.run.sites[name]
        flipped[name] = _flip(record.value, record.fn, split, plan, name)
    fixed = {name: value for name, (_, value) in sites.items() if name not in flipped}
    fixed |= {
        name: site["value"]
        for trace in (traced.guide_trace, traced.model_trace)
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and is_enumerated(site)
    }
    wanted = tuple(dict.fromkeys(cost for costs in plan.costs.values() for cost in costs))
    sampled = {name: traced.run.costs[name].detach() for name in wanted}

    def costs(values: Mapping[str, Any], rows: int | None) -> dict[str, Tensor]:
        program = SkipCosts(exact=True)(Substitute(values)(model))
        trace = poutine.trace(program).get_trace(*args, **kwargs)
        if traced.elimination is not None:
            found = traced.elimination.costs(trace, wanted, rows, traced.batch_ndim)
        else:
            found = {}
        site: Any
        for site in trace.nodes.values():
            if site["type"] != "sample" or cost_of_site(site, False) not in sampled.keys() - found.keys():
                continue
            cost = site["fn"].log_prob(site["value"])
            found[cost_of_site(site, False)] = -scale_and_mask(cost, site["scale"], site["mask"])
        return found

    shapes = {name: cost.shape for name, cost in sampled.items()}
    program = RowProgram(costs, shapes, traced.batch_ndim, traced.rng, has_buffers)
    key = traced.key, traced.batch_ndim
    return runs.run(key, program, sites, {**fixed, **traced.subsamples}, flipped, sampled, learning)


def _flip(value: Tensor, fn: Any, split: Components, plan: FlipPlan, name: str) -> Tensor:
    """Values ``(rows, batch, event)``: one component after the other set to its other values."""
    delta = plan.steps(name, split, value.device)
    if split.kind == "bernoulli":
        shape = (plan.rows, *(1,) * (value.dim() - split.value_ndim), *split.event_shape)
        return torch.where(delta.reshape(shape) > 0, 1 - value, value)
    index = split.index(value, fn)
    delta = delta.reshape(plan.rows, *(1,) * (index.dim() - 1), split.size)
    return split.value((index + delta) % split.cardinality, fn).to(value.dtype)


def _reduce(cost: Tensor, source: Sequence[Any], target: Sequence[Any], ndim: int) -> Tensor:
    """Brings a cost ``(rows, batch)`` to ``(rows, M, plates)`` with the plates of the site."""
    cost = cost.reshape(cost.shape[0], *(1,) * (ndim + 1 - cost.dim()), *cost.shape[1:])
    return sum_to_plates(cost, source, target)


def _table(cost: Tensor, index: Tensor, split: Components, start: int) -> Tensor:
    """From costs by row to costs by component and value, ``(M, plates, D, K)``."""
    others = split.cardinality - 1
    flipped = cost[start : start + split.size * others]
    flipped = flipped.reshape(split.size, others, *cost.shape[1:])
    sample = cost[:1].unsqueeze(0).expand(split.size, 1, *cost.shape[1:])
    relative = torch.cat((sample, flipped), 1).movedim((0, 1), (-2, -1))
    relative = relative.expand(*index.shape, split.cardinality)
    values = torch.arange(split.cardinality, device=index.device)
    return relative.gather(-1, (values - index.unsqueeze(-1)) % split.cardinality)
