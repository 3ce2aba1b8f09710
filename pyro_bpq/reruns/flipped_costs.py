r"""Immediate costs of finite sites at all of their values, from one extra run of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_bpq.plan.extra_run import FlipPlan
from pyro_bpq.plan.plan import Plan
from pyro_bpq.reruns.row_runs import RowProgram, RowRuns, Rows
from pyro_bpq.rollout.features import Components
from pyro_bpq.rollout.runs import Program, Rollout, sum_to_plates
from pyro_bpq.tracing.config import cost_options
from pyro_bpq.tracing.cost_statement import SkipCosts
from pyro_bpq.tracing.substitute import Substitute
from pyro_bpq.tracing.traced_run import TracedRun, cost_of_site
from pyro_bpq.tracing.watch import is_enumerated, samples


@torch.no_grad()
def flipped_costs(
    plan: Plan,
    traced: Sequence[TracedRun],
    rollout: Rollout,
    program: Program,
    runs: RowRuns,
    learning: bool,
    is_checked: bool = True,
) -> dict[str, Tensor] | None:
    """Runs the model at flipped values and collects the immediate costs.

    Args:
        plan: The plan of the structure.
        traced: The runs of the step.
        rollout: The tensors of these runs.
        program: Model, guide and arguments. If only cost statements count, the guide is the whole program.
        runs: Chooses the way in which the rows run.
        learning: Whether this run counts as a use of that way.
        is_checked: Whether the costs of the first row are compared with those of the step.

    Returns:
        The immediate costs of each flipped site in nats, ``(M, plate dims, D, K)``. ``None`` if the model cannot run
        at other values.
    """
    graph, flips = plan.graph, plan.flips
    assert flips is not None
    tables: dict[str, list[Tensor]] = {name: [] for name in plan.components}
    for run in traced:
        rows = _run_flipped(plan, run, program, runs, learning, is_checked)
        if rows is None:
            return None
        for name, split in plan.components.items():
            plates = graph.node(name).plates
            shape = rollout.run_shape(plates)
            costs = [reduced(rows[cost], graph.cost(cost).plates, plates, shape) for cost in flips.costs[name]]
            total = sum(costs, next(iter(rows.values())).new_zeros(()))
            index = sampled_index(run.run.sites[name].value, run.run.sites[name].fn, split, shape)
            start = flips.start[name]
            moved = total[start : start + split.size * (split.cardinality - 1)]
            tables[name].append(table(torch.cat((total[:1], moved)), index, split.cardinality))
    return {name: torch.cat(parts) for name, parts in tables.items()}


def _run_flipped(
    plan: Plan, traced: TracedRun, program: Program, runs: RowRuns, learning: bool, is_checked: bool
) -> dict[str, Tensor] | None:
    """The costs ``(rows, batch)`` of the extra run, by name."""
    flips, records = plan.flips, traced.run.sites
    assert flips is not None
    model, guide, args, kwargs = program
    part = guide if traced.only_costs else model
    moved = {
        name: flipped(records[name].value, records[name].fn, split, flips, name)
        for name, split in plan.components.items()
    }
    sites = {n: (s["fn"], s["value"].detach()) for n, s in latents_of(traced).items() if is_varied(s)}
    wanted = tuple(dict.fromkeys(cost for costs in flips.costs.values() for cost in costs))
    sampled = {name: traced.run.costs[name].detach() for name in wanted}

    def costs(values: Mapping[str, Any], rows: int | None) -> dict[str, Tensor]:
        trace, found = trace_at(values, part, args, kwargs), dict[str, Tensor]()
        if traced.elimination is not None:
            found = traced.elimination.costs(trace, wanted, rows, traced.batch_ndim)
        add_costs(found, trace, False, sampled)
        return found

    shapes = {name: cost.shape for name, cost in sampled.items()}
    again = RowProgram(costs, sites, shapes, traced.batch_ndim, traced.rng, plan.has_buffers)
    rows = Rows(fixed_values(traced, sites, moved), moved)
    return runs.run((traced.key, traced.batch_ndim), again, rows, sampled, learning, is_checked)


def trace_at(values: Mapping[str, Any], program: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The trace of a program at values of its sites, without the costs that may not be computed once more."""
    return poutine.trace(SkipCosts(exact=True)(Substitute(values)(program))).get_trace(*args, **kwargs)


def add_costs(found: dict[str, Tensor], trace: Any, is_guide: bool, wanted: Mapping[str, Any]) -> None:
    """Adds those of the wanted costs that a trace of guide or model has, and that are not found yet."""
    for site in samples(trace).values():
        name = cost_of_site(site, is_guide)
        if name in wanted and name not in found:
            sign = 1.0 if is_guide and cost_options(site) is None else -1.0
            cost = site["fn"].log_prob(site["value"])
            found[name] = sign * scale_and_mask(cost, site["scale"], site["mask"])


def latents_of(traced: TracedRun) -> dict[str, Any]:
    """The latent sites of guide and model, by name."""
    return {
        name: site
        for trace in (traced.guide_trace, traced.model_trace)
        for name, site in samples(trace).items()
        if not site["is_observed"]
    }


def is_varied(site: Any) -> bool:
    """Whether comparisons of runs also change the value of a latent site."""
    return isinstance(site["value"], Tensor) and not is_enumerated(site)


def fixed_values(traced: TracedRun, sites: Mapping[str, Any], moved: Mapping[str, Tensor]) -> dict[str, Any]:
    """The values that are the same in all rows: of varied ``sites`` that are not ``moved``, and of everything else."""
    own = {name: value for name, (_, value) in sites.items() if name not in moved}
    rest = {name: site["value"] for name, site in latents_of(traced).items() if not is_varied(site)}
    return {**own, **rest, **traced.subsamples}


def flipped(value: Tensor, fn: Any, split: Components, plan: FlipPlan, name: str) -> Tensor:
    """Values ``(rows, batch, event)``; each row sets one component to one of its other values."""
    delta = plan.steps(name, split, value.device)
    if split.kind == "bernoulli":
        shape = (plan.rows, *(1,) * (value.dim() - split.value_ndim), *split.event_shape)
        return torch.where(delta.reshape(shape) > 0, 1 - value, value)
    index = split.index(value, fn)
    delta = delta.reshape(plan.rows, *(1,) * (index.dim() - 1), split.size)
    return split.value((index + delta) % split.cardinality, fn).to(value.dtype)


def reduced(cost: Tensor, source: Sequence[Any], target: Sequence[Any], shape: tuple[int, ...]) -> Tensor:
    """Sums costs ``(rows, batch)`` over all dimensions but the plates of a site; ``(rows, M, plates)``."""
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
