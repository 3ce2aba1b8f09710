r"""Checks a Backprop-Q network against the definitions, with sets instead of the builder's bits.

For networks that are written by hand, and for tests: what the builder returns satisfies all of it.
"""

from __future__ import annotations

from pyro_bpq.errors import GraphError
from pyro_bpq.graph.network import Average, BackpropQNetwork, QNode
from pyro_bpq.graph.scg import StochasticComputationGraph

__all__ = ["validate_network"]


def validate_network(network: BackpropQNetwork) -> None:
    """Checks that every source of every Q-node counts exactly once at ``γ = 1``.

    Names are unique and children come before the nodes whose rules read them. The children of an average
    have the same sources, and the averages of a rule divide the remote sources among them. A child sits
    at a child of the site in the graph. Immediate costs read the site and else only what its Q-function
    conditions on. The scope is the frontier for the remote sources. The Q-nodes of a site have disjoint
    sources that cover its downstream costs.

    Args:
        network: The network.

    Raises:
        GraphError: If one of these does not hold; the text names the Q-node.
    """
    graph = network.graph
    sources = {cost.name: frozenset([cost.name]) for cost in graph.costs}
    sites: dict[str, str] = {}
    for node in network.nodes:
        if node.name in sources:
            raise GraphError(f"two are called {node.name!r}")
        _check_immediate(network, node)
        _check_rule(node, sources)
        _check_children(graph, node, sites)
        _check_scope(network, node)
        sources[node.name], sites[node.name] = frozenset(node.sources), node.site
    for site in graph.index:
        _check_sources(network, site)


def _known(network: BackpropQNetwork, site: str) -> frozenset[str]:
    if network.form == "ancestor":
        return network.graph.ancestors(site) | {site}
    return frozenset(node.name for node in network.graph.nodes[: network.graph.index[site] + 1])


def _check_immediate(network: BackpropQNetwork, node: QNode) -> None:
    known = _known(network, node.site)
    for cost in node.immediate:
        reads = frozenset(network.graph.cost(cost).parents)
        if cost not in node.sources or node.site not in reads or not reads <= known:
            raise GraphError(f"{cost!r} is not immediate at {node.name!r}, which knows {sorted(known)}")


def _check_rule(node: QNode, sources: dict[str, frozenset[str]]) -> None:
    counted: list[str] = []
    for average in node.rule:
        unknown = [child for child in average.children if child not in sources]
        if unknown:
            raise GraphError(f"the rule of {node.name!r} reads {unknown}, which do not precede it")
        counted += _common_sources(node, average, sources)
    if sorted(counted) != sorted(node.remote):
        raise GraphError(f"of {node.name!r} {sorted(node.remote)} are to be counted once, not {sorted(counted)}")


def _common_sources(node: QNode, average: Average, sources: dict[str, frozenset[str]]) -> frozenset[str]:
    carried = {sources[child] for child in average.children}
    if len(carried) != 1 or len(set(average.children)) < len(average.children):
        raise GraphError(f"{node.name!r} averages {average.children}, which have no equal sources")
    return carried.pop()


def _check_children(graph: StochasticComputationGraph, node: QNode, sites: dict[str, str]) -> None:
    children = set(graph.children(node.site))
    for average in node.rule:
        strangers = [c for c in average.children if c in sites and sites[c] not in children]
        if strangers:
            raise GraphError(f"{strangers} are not among the children of {node.site!r}, {sorted(children)}")


def _check_scope(network: BackpropQNetwork, node: QNode) -> None:
    scope = network.graph.frontier(_known(network, node.site), node.remote)
    if frozenset(node.scope) != scope:
        raise GraphError(f"the scope of {node.name!r} is {node.scope}, the frontier {sorted(scope)}")


def _check_sources(network: BackpropQNetwork, site: str) -> None:
    found = [cost for node in network.q_nodes(site) for cost in node.sources]
    missing = set(network.graph.downstream_costs(site)) - set(found)
    if missing or len(set(found)) < len(found):
        raise GraphError(f"the Q-nodes of {site!r} have the sources {sorted(found)}, and lack {sorted(missing)}")
