r"""Builds the graph of a run from what its costs read."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

from pyro_bpq.graph.bitsets import Reads, named
from pyro_bpq.graph.scg import CostNode, StochasticComputationGraph, StochasticNode, cost_of_guide
from pyro_bpq.tracing.traced_run import TracedRun


def dense_graph(traced: TracedRun) -> StochasticComputationGraph:
    """The dense graph: every site reads all earlier sites, and every cost of the model reads all sites.

    It is a superset of any graph that the program can have. So it is right whatever the program does, at the price of
    more variance.
    """
    names, bits, earlier = tuple(traced.run.sites), dict[str, int](), 0
    position = {name: i for i, name in enumerate(names)}
    for (name, *_), cost in zip(traced.entries, traced.run.costs, strict=True):
        if _is_of_draw(cost, name, traced):
            earlier |= 1 << position[name]
        bits[cost] = earlier
    return build_graph(traced, Reads(names, bits))


def _is_of_draw(cost: str, site: str, traced: TracedRun) -> bool:
    """Whether a cost is the log-probability ``log q`` of a latent site's own draw."""
    return site in traced.run.sites and cost == cost_of_guide(site)


def build_graph(traced: TracedRun, reads: Mapping[str, frozenset[str]]) -> StochasticComputationGraph:
    """The graph of a run whose sites and costs read what ``reads`` says."""
    sites = tuple(traced.run.sites)
    bits, nodes = Reads.over(sites, reads).bits, []
    until: dict[str, int] = {}
    for i, name in enumerate(sites):
        # A draw and its log q read no later site. The mask drops sites that only chose later views of the same table.
        before = bits[cost_of_guide(name)] & (1 << i) - 1
        until[name] = before | 1 << i
        nodes.append(StochasticNode(name, named(sites, before), traced.plates[name]))
    costs = []
    for (name, where, *_), cost in zip(traced.entries, traced.run.costs, strict=True):
        if traced.only_costs and cost not in traced.user_costs:
            continue
        members = until[name] if _is_of_draw(cost, name, traced) else bits[cost]
        costs.append(CostNode(cost, named(sites, members), where, name, cost in traced.of_guide))
    return StochasticComputationGraph(tuple(nodes), tuple(costs))


def merged_graph(traced: TracedRun, graphs: Sequence[StochasticComputationGraph]) -> StochasticComputationGraph:
    """Returns the union of the graphs of runs that have the key of ``traced``."""
    first, sites = graphs[0], tuple(traced.run.sites)

    def either(sets: Iterable[int]) -> int:
        return functools.reduce(operator.or_, sets)

    reads = {cost_of_guide(n.name): either(g.bits_of(g.node(n.name).parents) for g in graphs) for n in first.nodes}
    reads |= {cost.name: either(g.bits_of(g.cost(cost.name).parents) for g in graphs) for cost in first.costs}
    return build_graph(traced, Reads(sites, reads))
