r"""The network of a program that is steered by sampled values: one Q-node per site, in program order.

The values sampled before a site must determine whether it has a critic, and the inputs of that critic. Frontiers
and merged costs depend on later parts of the program. So each Q-function conditions on the history, predicts every
cost that is not settled yet, and backs up from the next site.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyro_bpq.graph.network import Average, BackpropQNetwork, QNode
from pyro_bpq.graph.scg import StochasticComputationGraph


def sequence_network(graph: StochasticComputationGraph, immediate: Mapping[str, tuple[str, ...]]) -> BackpropQNetwork:
    r"""Builds the network with ``Q_t = immediate + Σ_{f last reads X_t} f + Q_{t+1}``."""
    settled: dict[str, list[str]] = {node.name: [] for node in graph.nodes}
    for cost in graph.costs:
        last = graph.last_variable(cost.name)
        if last is not None:
            settled[last].append(cost.name)
    names = [node.name for node in graph.nodes]
    nodes: list[QNode] = []
    sources = 0
    for t in reversed(range(len(names))):
        name, exact = names[t], immediate.get(names[t], ())
        roots = tuple(cost for cost in settled[name] if cost not in exact)
        averages = tuple(Average((child,)) for child in (*roots, *names[t + 1 : t + 2]))
        sources |= graph.cost_bits_of((*exact, *roots))
        scope = graph.node_names((1 << t + 1) - 1)
        nodes.append(QNode(name, name, scope, graph.cost_names(sources), tuple(exact), averages))
    every = frozenset(cost for exact in immediate.values() for cost in exact)
    return BackpropQNetwork(graph, tuple(nodes), "single", "history", every, discounted=True)
