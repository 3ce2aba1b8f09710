"""The graph of a traced run."""

from __future__ import annotations

from collections.abc import Mapping

from pyro_bpq.graph import CostNode, StochasticComputationGraph, StochasticNode
from pyro_bpq.tracing import TracedRun, cost_of_guide

__all__ = ["build_graph", "dense_graph"]


def dense_graph(traced: TracedRun) -> StochasticComputationGraph:
    """The graph in which every site reads every earlier one, and every cost of the model all of them.

    It is a superset of any graph that the program can have: right whatever the program does, at the
    price of more variance.
    """
    earlier: list[str] = []
    reads: dict[str, frozenset[str]] = {}
    for cost in traced.run.costs:
        name = _guide_site(cost, traced)
        if name is not None:
            earlier.append(name)
        reads[cost] = frozenset(earlier)
    return build_graph(traced, reads)


def _guide_site(cost: str, traced: TracedRun) -> str | None:
    name = cost[len("log q(") : -1]
    return name if cost.startswith("log q(") and name in traced.run.sites else None


def build_graph(traced: TracedRun, reads: Mapping[str, frozenset[str]]) -> StochasticComputationGraph:
    """The graph of a run whose sites and costs read what ``reads`` says.

    Args:
        traced: The run.
        reads: For each cost the latent sites that it reads; a site's parents are what its ``log q`` reads.

    Returns:
        The graph: stochastic nodes in the guide's order, costs of the guide, then of the model.
    """
    order = {name: i for i, name in enumerate(traced.run.sites)}
    plates = {entry[0]: entry[1] for entry in reversed(traced.key)}
    nodes = []
    for name in order:
        parents = sorted(_until(name, reads[cost_of_guide(name)], order) - {name}, key=order.__getitem__)
        nodes.append(StochasticNode(name, tuple(parents), plates[name], traced.infos[name].has_rsample))
    costs = []
    for (name, where, *_), cost in zip(traced.key, traced.run.costs, strict=True):
        if traced.only_costs and cost not in traced.user_costs:
            continue
        site = _guide_site(cost, traced)
        members = reads[cost] if site is None else _until(site, reads[cost], order)
        costs.append(CostNode(cost, tuple(sorted(members, key=order.__getitem__)), where, name))
    return StochasticComputationGraph(tuple(nodes), tuple(costs))


def _until(site: str, sources: frozenset[str], order: Mapping[str, int]) -> frozenset[str]:
    """A site and what was drawn before it: a draw, and its ``log q``, read nothing later.

    A view of a table may count with what later views of it were chosen by.
    """
    return frozenset(source for source in sources if order[source] < order[site]) | {site}
