r"""The stochastic computation graph of a run, from what its sites and costs read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyro_bpq.graph.bitsets import Reads, named
from pyro_bpq.graph.scg import CostNode, StochasticComputationGraph, StochasticNode, cost_of_guide
from pyro_bpq.record.traced_run import TracedRun


def dense_graph(traced: TracedRun) -> StochasticComputationGraph:
    """The dense graph: every site reads all earlier sites, and every cost of the model reads all sites.

    It is a superset of any graph that the program can have. So it is right whatever the program does, at the price of
    more variance.
    """
    names, bits, earlier = tuple(traced.run.sites), dict[str, int](), 0
    position = {name: i for i, name in enumerate(names)}
    for (name, *_), cost in zip(traced.entries, traced.run.costs, strict=True):
        if cost == cost_of_guide(name):
            # The log-probability of a latent site's own draw. Data of the guide have no position.
            earlier |= 1 << position[name] if name in position else 0
        bits[cost] = earlier
    return build_graph(traced, Reads(names, bits))


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
        members = until.get(name, bits[cost]) if cost == cost_of_guide(name) else bits[cost]
        costs.append(CostNode(cost, named(sites, members), where, name, cost in traced.of_guide))
    return StochasticComputationGraph(tuple(nodes), tuple(costs))


def merged_graph(traced: TracedRun, graphs: Sequence[StochasticComputationGraph]) -> StochasticComputationGraph:
    """Returns the union of the graphs of runs that have the key of ``traced``."""
    bits = dict[str, int]()
    for graph in graphs:
        read = {cost_of_guide(node.name): node.parents for node in graph.nodes}
        for name, parents in (*read.items(), *((cost.name, cost.parents) for cost in graph.costs)):
            bits[name] = bits.get(name, 0) | graph.bits_of(parents)
    return build_graph(traced, Reads(tuple(traced.run.sites), bits))
