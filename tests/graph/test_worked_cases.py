"""Remarks of the paper, proved on random graphs: virtual roots, shared parameters, layers of any size."""

from __future__ import annotations

import itertools

import torch
from tabular import FORMS, graph_of, random_graph, random_program
from torch import Tensor

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


def test_shared_parameters_need_nothing_special() -> None:
    # One parameter in every conditional and every cost: exact Q-functions at each node, gradients summed.
    for seed in range(30):
        program = random_program(seed, 5)
        graph = program.graph
        if not any(cost.parents for cost in graph.costs):
            continue
        network = build(graph)
        theta = torch.tensor([0.3, -0.7], requires_grad=True)

        def tilt(table: Tensor, scale: float, theta: Tensor = theta) -> Tensor:
            steps = torch.arange(table.numel(), dtype=table.dtype).reshape(table.shape)
            return theta[0] * torch.sin(steps + scale) + theta[1] * torch.cos(2.0 * steps)

        conditionals = {
            name: (table.log() + tilt(table, 0.0)).softmax(graph.index[name])
            for name, table in program.conditionals.items()
        }
        costs = {name: table + tilt(table, 1.0) for name, table in program.costs.items()}
        joint = torch.ones(())
        for table in conditionals.values():
            joint = joint * table
        (exact,) = torch.autograd.grad((joint * sum(costs.values())).sum(), theta, retain_graph=True)
        found = type(program)(
            graph, {n: t.detach() for n, t in conditionals.items()}, {n: t.detach() for n, t in costs.items()}
        )
        q = found.exact_q(network)
        surrogate = sum((found.joint * table).sum() for table in costs.values())
        for node in network.nodes:
            local = found.total(node, q)
            surrogate = surrogate + (found.joint * local * conditionals[node.site].log()).sum()
        (summed,) = torch.autograd.grad(surrogate, theta)
        torch.testing.assert_close(summed, exact, rtol=0.0, atol=1e-12)
        assert float(exact.abs().max()) > 1e-3
