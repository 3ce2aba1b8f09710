r"""Costs at other values of sites, and laws of their children, from one extra run of guide and model.

All other sites keep their values. The rows of the run are those of the extra run of the model
(:mod:`pyro_bpq.reruns.flipped_costs`), and run in the same ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions import MaskedDistribution
from torch import Tensor

from pyro_bpq.estimators.hindsight import Changes
from pyro_bpq.graph.scg import StochasticComputationGraph, cost_of_guide
from pyro_bpq.plan.held import HeldPlan
from pyro_bpq.reruns.apart import particle_of, value_alone
from pyro_bpq.reruns.flipped_costs import (
    add_costs,
    fixed_values,
    flipped,
    is_varied,
    latents_of,
    reduced,
    sampled_index,
    table,
    trace_at,
)
from pyro_bpq.reruns.row_runs import RowProgram, RowRuns, Rows, Way
from pyro_bpq.rollout.runs import Program, Rollout
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.watch import samples


@dataclass(frozen=True)
class HeldRun:
    """What an extra run needs to know.

    Args:
        plan: Which row flips which sites.
        graph: The graph.
        runs: Chooses the way in which the rows run.
        has_buffers: Whether the programs may call modules with buffers.
        learning: Whether this run counts as a use of that way.
        one: Model and guide for one particle, and their arguments; ``None`` where particles have no plate.
        is_checked: Whether the costs of the first row are compared with those of the step.
    """

    plan: HeldPlan
    graph: StochasticComputationGraph
    runs: RowRuns
    has_buffers: bool
    learning: bool
    one: Program | None
    is_checked: bool


def law_of(child: str) -> str:
    """Name of the log-probability of a child's value, neither scaled nor masked."""
    return f"law({child})"


def unmasked(fn: Any) -> Any:
    """The distribution that values are drawn from, without the mask that hides their log-probability."""
    while isinstance(fn, MaskedDistribution):
        fn = fn.base_dist
    return fn


def law_name(traced: TracedRun, child: str) -> str:
    """The cost that is the log-probability of the child's value, if it is neither scaled nor masked."""
    record, cost = traced.run.sites[child], cost_of_guide(child)
    is_plain = isinstance(record.scale, float) and record.scale == 1.0 and record.mask is None
    return cost if is_plain and cost in traced.run.costs and not traced.only_costs else law_of(child)


def joined(parts: Sequence[Changes]) -> Changes:
    """The changes of all particles, from those of each run."""
    return parts[0] if len(parts) == 1 else Changes(*map(torch.cat, zip(*parts, strict=True)))


@torch.no_grad()
def held_costs(
    run: HeldRun,
    traced: Sequence[TracedRun],
    programs: Sequence[Program],
    rollout: Rollout,
    drawn: Mapping[str, Tensor],
    particle: Tensor | None,
    group: Tensor | None,
) -> dict[str, Changes] | None:
    """Runs guide and model at other values of sites while all other sites keep their values.

    Args:
        run: What is run.
        traced: The runs of the step.
        programs: Model, guide and arguments of each.
        rollout: The tensors of these runs.
        drawn: The evaluated components ``(M, plates, n)`` of sites of which not all components are.
        particle: Index ``(1,)`` of the particle that is evaluated; ``None`` for all. The first dimension of ``drawn``
            and of the changes is then 1.
        group: Number, a scalar, of the only group of sites that takes other values (:attr:`HeldPlan.group_of`). The
            changes of other sites are then zero. ``None`` for all sites.

    Returns:
        The changes of each site, ``(M, plates, n, K)``; of drawn bits those of the other values, ``(M, plates, n)``.
        ``None`` if the programs do not run at other values.
    """
    pairs, number, index, nesting = list(zip(traced, programs, strict=True)), rollout.num_particles, None, 0
    if particle is not None and rollout.is_vectorized:
        assert run.one is not None
        pairs, number, index, nesting = [(traced[0], run.one)], 1, particle, rollout.plate_ndim + 1
    elif particle is not None:
        pairs = [pairs[int(particle)]]
    parts: dict[str, list[Changes]] = {name: [] for name in run.plan.sites}
    for i, (one, program) in enumerate(pairs):
        mine = drawn if len(pairs) == 1 else {name: own[i : i + 1] for name, own in drawn.items()}
        again = _Again(run, one, program, mine, group, index, nesting)
        rows = again.rows()
        if rows is None:
            return None
        for name in run.plan.sites:
            shape = rollout.batch_shape(run.graph.node(name).plates)
            shape = (number if rollout.is_vectorized else 1, *shape[1:])
            parts[name].append(again.tables(name, shape, rows))
    return {name: joined(found) for name, found in parts.items()}


def sums_of_costs(
    graph: StochasticComputationGraph, traced: Sequence[TracedRun], rollout: Rollout, name: str, costs: Sequence[str]
) -> Tensor:
    """The sum ``(M, plates)`` of costs that read a site, in nats."""
    plates = graph.node(name).plates
    shape = rollout.run_shape(plates)

    def of_run(one: TracedRun) -> Tensor:
        known = ((one.run.costs[cost].detach(), graph.cost(cost).plates) for cost in costs)
        none = one.run.loss.detach().new_zeros(shape)
        return sum((reduced(term.unsqueeze(0), own, plates, shape)[0] for term, own in known), none).expand(shape)

    return torch.cat([of_run(one) for one in traced])


def is_refused(plan: HeldPlan, traced: TracedRun, rollout: Rollout, runs: RowRuns) -> bool:
    """Whether guide and model were seen to run in no way at other values of the sites of a plan.

    Args:
        plan: Which row flips which sites.
        traced: A run of the step.
        rollout: The tensors of the step's runs.
        runs: Chooses the way in which the rows run.
    """
    return any(runs.way(_key(plan, traced, ndim)) is Way.NONE for ndim in (traced.batch_ndim, rollout.plate_ndim))


def _key(plan: HeldPlan, traced: TracedRun, batch_ndim: int) -> Any:
    return "held", traced.key, batch_ndim, tuple(plan.flips.start.items())


@dataclass(frozen=True, eq=False)
class _Again:
    """The extra run beside one run of the step.

    Args:
        run: What is run.
        traced: The run of the step.
        program: Model, guide and arguments.
        drawn: The evaluated components of sites of which not all components are.
        group: The only group of sites that takes other values; ``None`` for all sites.
        index: Index ``(1,)`` of the only particle that is evaluated, in a plate of particles; ``None`` for all.
        nesting: Bound on the number of nested plates, that of the particles included, where only one is evaluated.
    """

    run: HeldRun
    traced: TracedRun
    program: Program
    drawn: Mapping[str, Tensor]
    group: Tensor | None
    index: Tensor | None
    nesting: int

    def tables(self, name: str, shape: tuple[int, ...], rows: Mapping[str, Tensor]) -> Changes:
        """The tables of a site from the changes of costs in all rows."""
        graph, plan, traced = self.run.graph, self.run.plan, self.traced
        site, drawn, plates = plan.sites[name], self.drawn.get(name), graph.node(name).plates
        start = 0 if self.group is not None else plan.flips.start[name] - 1
        number = site.number * (site.components.cardinality - 1)
        like, has_bits = next(iter(rows.values())), drawn is not None and site.components.kind == "bernoulli"

        def changes(terms: Sequence[tuple[str, Any]]) -> Tensor:
            total = like.new_zeros((1 + number, *shape))
            for term, own in terms:
                total[1:] += reduced(rows[term][start : start + number], own, plates, shape)
            return total[1:].movedim(0, -1) if has_bits else table(total, index, site.components.cardinality)

        if not has_bits:
            value = self._value(samples(traced.guide_trace)[name])
            index = sampled_index(value, traced.run.sites[name].fn, site.components, shape)
            index = index if drawn is None else index.gather(-1, drawn)
        laws = [(law_name(traced, child), graph.node(child).plates) for child in site.children]
        immediate = [(cost, graph.cost(cost).plates) for cost in site.immediate]
        later = [(cost, graph.cost(cost).plates) for cost in site.costs if cost not in site.immediate]
        return Changes(changes(laws), changes(later), changes(immediate))

    def rows(self) -> dict[str, Tensor] | None:
        """How costs and laws change ``(rows, batch)`` in the extra run, by name."""
        run, traced, plan = self.run, self.traced, self.run.plan
        model, guide, args, kwargs = self.program
        sites = {n: (s["fn"], self._value(s)) for n, s in latents_of(traced).items() if is_varied(s)}
        moved = {name: self._moved(*sites[name], name) for name in plan.sites}
        children = dict.fromkeys(child for site in plan.sites.values() for child in site.children)
        laws = [child for child in children if law_name(traced, child) == law_of(child)]
        costs = dict.fromkeys(cost for site in plan.sites.values() for cost in site.costs)
        costs.update(dict.fromkeys(law_name(traced, child) for child in children if child not in laws))
        sampled = {name: self._cost(traced.run.costs[name]) for name in costs}
        for child in laws:
            record = traced.run.sites[child]
            sampled[law_of(child)] = self._cost(unmasked(record.fn).log_prob(record.value.detach()))

        def evaluated(values: Mapping[str, Any], rows: int | None) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            first = trace_at(values, guide, args, kwargs)
            add_costs(found, first, True, costs)
            for child in laws:
                site = first.nodes[child]
                found[law_of(child)] = unmasked(site["fn"]).log_prob(site["value"])
            if not traced.only_costs:
                second = trace_at(values, model, args, kwargs)
                if traced.elimination is not None:
                    wanted = [cost for cost in costs if cost not in found]
                    found |= traced.elimination.costs(second, wanted, rows, traced.batch_ndim)
                add_costs(found, second, False, costs)
            return found

        shapes = {name: cost.shape for name, cost in sampled.items()}
        batch_ndim = traced.batch_ndim if self.index is None else self.nesting - 1
        program = RowProgram(evaluated, sites, shapes, batch_ndim, traced.rng, run.has_buffers)
        key, fixed = _key(plan, traced, batch_ndim), fixed_values(traced, sites, moved)
        found = run.runs.unchecked(key, program, Rows(fixed, moved), run.learning, run.is_checked)
        if found is None and run.is_checked:
            # The sample itself is run, too: its costs have to be those of the step.
            more = {name: torch.cat((sites[name][1].unsqueeze(0).to(new), new)) for name, new in moved.items()}
            checked = run.runs.run(key, program, Rows(fixed, more), sampled, run.learning)
            found = None if checked is None else {name: cost[1:] for name, cost in checked.items()}
        return None if found is None else {name: cost - sampled[name] for name, cost in found.items()}

    def _value(self, site: Any) -> Tensor:
        """The value of a site, detached."""
        value: Tensor = site["value"].detach()
        return value if self.index is None else value_alone(site, value, self.index, self.nesting)

    def _cost(self, cost: Tensor) -> Tensor:
        """A cost, detached."""
        return cost.detach() if self.index is None else particle_of(cost.detach(), self.index, self.nesting)

    def _moved(self, fn: Any, value: Tensor, name: str) -> Tensor:
        """Values ``(rows, batch, event)``; each row sets one component to one of its other values."""
        plan, site, drawn = self.run.plan, self.run.plan.sites[name], self.drawn.get(name)
        split = site.components
        if drawn is None:
            return flipped(value, fn, split, plan.flips, name)[1:]
        index, others = split.index(value, fn), split.cardinality - 1
        at = drawn.reshape(*index.shape[:-1], site.number)
        number, start, step = plan.flips.rows - 1, plan.flips.start[name] - 1, torch.ones_like(at[..., :1])
        if self.group is not None:
            number, start, step = plan.rows_of_group, 0, (self.group == plan.group_of[name]).to(step)
        rows = index.expand(number, *index.shape).clone()
        for i in range(site.number):
            one = at[..., i : i + 1]
            for k in range(others):
                new = (index.gather(-1, one) + (k + 1) * step) % split.cardinality
                rows[start + i * others + k].scatter_(-1, one, new)
        return split.value(rows, fn).to(value.dtype).reshape(number, *value.shape)
