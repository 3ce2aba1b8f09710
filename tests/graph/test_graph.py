"""Graph queries by hand numbers and, on random graphs, against their definitions by sets and paths."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tabular import WORKED, graph_of

from pyro_bpq.errors import GraphError, SiteNotFoundError
from pyro_bpq.graph.relations import crossed
from pyro_bpq.graph.scg import CostNode, Plate, StochasticComputationGraph, StochasticNode


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int = 7, max_costs: int = 4) -> StochasticComputationGraph:
    """Random graphs; costs may read nothing, nodes may lead nowhere."""
    count = draw(st.integers(1, max_nodes))
    names = [f"x{i}" for i in range(count)]
    nodes = {name: draw(_subset(names[:i])) for i, name in enumerate(names)}
    costs = {f"f{k}": draw(_subset(names)) for k in range(draw(st.integers(1, max_costs)))}
    return StochasticComputationGraph.from_parents(nodes, costs)


def _subset(names: list[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(names), unique=True) if names else st.just([])


def naive_ancestors(graph: StochasticComputationGraph, name: str) -> set[str]:
    """Closure of the parents."""
    node = graph.node(name) if name in graph.index else graph.cost(name)
    found = set(node.parents)
    for parent in node.parents:
        found |= naive_ancestors(graph, parent)
    return found


def naive_frontier(graph: StochasticComputationGraph, inside: set[str], costs: set[str]) -> set[str]:
    """Members of ``inside`` with a path to a cost whose inner nodes are outside."""

    def reaches(name: str) -> bool:
        if any(name in graph.cost(cost).parents for cost in costs):
            return True
        return any(reaches(node.name) for node in graph.nodes if name in node.parents and node.name not in inside)

    return {name for name in inside if reaches(name)}


@given(graphs())
def test_ancestors_descendants_and_downstream_costs_match_their_definitions(graph: StochasticComputationGraph) -> None:
    for name in graph.index:
        assert graph.ancestors(name) == naive_ancestors(graph, name)
        assert graph.descendants(name) == {m for m in graph.index if name in naive_ancestors(graph, m)}
        assert graph.parents(name) == tuple(sorted(graph.node(name).parents, key=graph.index.__getitem__))
        assert graph.children(name) == tuple(n.name for n in graph.nodes if name in n.parents)
        below = {c.name for c in graph.costs if name in naive_ancestors(graph, c.name)}
        assert set(graph.downstream_costs(name)) == below
    for cost in graph.costs:
        assert graph.ancestors(cost.name) == naive_ancestors(graph, cost.name)
        assert graph.parents(cost.name) == tuple(sorted(cost.parents, key=graph.index.__getitem__))
        assert graph.last_variable(cost.name) == max(cost.parents, key=graph.index.__getitem__, default=None)


@given(st.data())
def test_frontier_matches_its_definition(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    inside = set(data.draw(_subset(list(graph.index))))
    costs = set(data.draw(_subset(list(graph.cost_index))))
    assert graph.frontier(inside, costs) == naive_frontier(graph, inside, costs)
    union = set().union(*(graph.frontier(inside, [cost]) for cost in costs))
    assert graph.frontier(inside, costs) == union


@given(st.data())
def test_scope_matches_its_definition_in_both_forms(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    costs = set(data.draw(_subset(list(graph.cost_index))))
    for i, node in enumerate(graph.nodes):
        lineage = naive_ancestors(graph, node.name) | {node.name}
        assert graph.scope(node.name, costs) == naive_frontier(graph, lineage, costs)
        history = {n.name for n in graph.nodes[: i + 1]}
        assert graph.scope(node.name, costs, "history") == naive_frontier(graph, history, costs)


@settings(max_examples=20)
@given(graphs())
def test_graph_is_a_value(graph: StochasticComputationGraph) -> None:
    twin = StochasticComputationGraph(graph.nodes, graph.costs)
    assert hash(graph) == hash(twin) and graph.downstream_bits == twin.downstream_bits
    restored = pickle.loads(pickle.dumps(graph))
    assert set(vars(restored)) == {"nodes", "costs"}
    assert graph == twin == restored
    assert hash(graph) == hash(twin) == hash(restored)
    assert graph != StochasticComputationGraph((*graph.nodes, StochasticNode("new")), graph.costs)


def test_graph_prints_an_aligned_table() -> None:
    graph = StochasticComputationGraph.from_parents(
        {"x": [], "y": ["x"]}, {"f": ["x", "y"]}, {"y": [Plate("data", -1)]}
    )
    assert repr(graph).splitlines() == ["site  parents  plates", "x", "y     x        data:-1", "[f]   x, y"]


@pytest.mark.parametrize(
    ("nodes", "costs", "text"),
    [
        ([("x", ()), ("x", ())], [], "'x' occurs twice"),
        ([("x", ("y",)), ("y", ())], [], "'x' has the parents"),
        ([("x", ())], [("f", ("y",))], "'f' has the parents"),
        ([("x", ())], [("f", ()), ("f", ())], "'f' occurs twice"),
        ([("x", ())], [("x", ())], "'x' occurs twice"),
    ],
)
def test_malformed_graphs_are_refused(nodes: list[Any], costs: list[Any], text: str) -> None:
    with pytest.raises(GraphError, match=text):
        StochasticComputationGraph([StochasticNode(*own) for own in nodes], [CostNode(*own) for own in costs])


def test_unknown_names_are_named() -> None:
    graph = graph_of(*WORKED["siblings"])
    with pytest.raises(SiteNotFoundError, match="no stochastic node 'w'"):
        graph.node("w")
    with pytest.raises(SiteNotFoundError, match="no cost 'h'"):
        graph.frontier(["x"], ["h"])
    with pytest.raises(GraphError, match=r"\['w'\]"):
        StochasticComputationGraph.from_parents({"x": []}, {}, {"w": [Plate("data", -1)]})


def test_a_row_affects_others_through_sites_outside_of_its_plate() -> None:
    """``a`` and ``b`` have rows; ``top`` reads all rows of ``b``, and ``c`` reads ``top``."""
    rows = (Plate("rows", -1),)
    nodes = [
        StochasticNode("a", (), rows),
        StochasticNode("b", ("a",), rows),
        StochasticNode("top", ("b",)),
        StochasticNode("alone", (), rows),
    ]
    costs = [CostNode("f", ("b",), rows), CostNode("g", ("top",), rows), CostNode("h", ("alone",), rows)]
    graph = StochasticComputationGraph(nodes, costs)
    others = 1 << graph.cost_index["g"]
    assert crossed(graph, True) == [others, others, 0, 0]
    everything = [graph.downstream_bits[graph.index[name]] for name in ("a", "b", "alone")]
    assert crossed(graph, False) == [*everything[:2], 0, everything[2]]
