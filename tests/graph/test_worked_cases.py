"""A remark of the paper, proved on random graphs: virtual roots."""

from __future__ import annotations

import itertools

import torch
from tabular import FORMS, graph_of, random_graph

from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.graph.scg import StochasticComputationGraph

build = BackpropQNetwork.build


def with_virtual_roots(graph: StochasticComputationGraph) -> StochasticComputationGraph:
    """Each cost reads one virtual node, which collects its variables."""
    nodes = {node.name: node.parents for node in graph.nodes}
    costs = {cost.name: [f"v_{cost.name}"] if cost.parents else [] for cost in graph.costs}
    virtual = {f"v_{cost.name}": cost.parents for cost in graph.costs if cost.parents}
    return graph_of({**nodes, **virtual}, costs)


def test_a_cost_on_several_variables_is_a_cost_on_a_virtual_node() -> None:
    several = 0
    for seed in range(200):
        graph = random_graph(torch.Generator().manual_seed(seed))
        virtual = with_virtual_roots(graph)
        several += sum(len(cost.parents) > 1 for cost in graph.costs)
        for form, cost in itertools.product(FORMS, graph.costs):
            for name in graph.index:
                assert graph.scope(name, [cost.name], form) == virtual.scope(name, [cost.name], form)
        for form in FORMS:
            plain = build(graph, "per_cost", form=form, immediate="learned")
            rooted = build(virtual, "per_cost", form=form, immediate="learned")
            for node in plain.nodes:
                twin = next(n for n in rooted.q_nodes(node.site) if n.sources == node.sources)
                assert twin.scope == node.scope
                # The root takes the place of the virtual node's Q-function.
                assert {c.removeprefix("v_") for c in rooted.children(twin.name)} == set(plain.children(node.name))
    assert several > 200
