"""Backprop-Q networks: the paper's cases, and set definitions on random graphs."""

from __future__ import annotations

import itertools
import pickle
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from tabular import MODES, WORKED, graph_of
from test_graph import graphs

from pyro_bpq.diagnostics.render import render_network, render_scg
from pyro_bpq.errors import BPQError, GraphError, OptionError, SiteNotFoundError
from pyro_bpq.graph.network import BackpropQNetwork, Reduction
from pyro_bpq.graph.scg import Plate, StochasticComputationGraph

build = BackpropQNetwork.build


def rule(network: BackpropQNetwork, name: str) -> str:
    """The rule of a Q-node as printed."""
    return network.rule_text(network.q_node(name))


# Worked cases of the paper.

CASE_1, CASE_2, CASE_3, CASE_4, _ = (graph_of(*case) for case in WORKED.values())


def layers(depth: int, letters: str = "xy") -> StochasticComputationGraph:
    """Fully connected layers with a cost on every node."""
    nodes = {f"{a}{t}": [f"{b}{t - 1}" for b in letters] if t > 1 else [] for t in range(1, depth + 1) for a in letters}
    return graph_of(nodes, {f"f_{name}": [name] for name in nodes})


@pytest.mark.parametrize("reduction", ["per_cost", "merged"])
def test_case_2_two_costs(reduction: Reduction) -> None:
    network = build(CASE_2, reduction, immediate="learned")
    assert network.q_node("y^f1").scope == ("y",)
    assert network.q_node("y^f2").scope == ("x", "y")
    assert network.q_node("z").scope == ("x", "z")
    if reduction == "merged":
        assert rule(network, "x") == "Q_y^f1 + (Q_y^f2 + Q_z)/2"
        assert network.children("x") == ("y^f1", "y^f2", "z")
    else:
        assert rule(network, "x^f1") == "Q_y^f1" and rule(network, "x^f2") == "(Q_y^f2 + Q_z)/2"


@pytest.mark.parametrize("immediate", ["exact", "learned"])
def test_case_3_siblings_are_averaged(immediate: str) -> None:
    network = build(CASE_3, "per_cost", immediate=immediate)
    assert rule(network, "x") == "(Q_y1 + Q_y2)/2"
    assert rule(network, "y1") == rule(network, "y2") == "Q_z"
    assert rule(network, "z") == ("f" if immediate == "learned" else "")
    assert [node.name for node in network.nodes] == ["z", "y2", "y1", "x"]


def test_case_4_chain_removes_bypasses_and_sums_sources() -> None:
    network = build(CASE_4, immediate="learned")
    assert [rule(network, f"x{t}") for t in (1, 2, 3, 4)] == ["Q_x2", "Q_x3", "fa + Q_x4", "fb"]
    assert network.q_node("x1").sources == ("fa", "fb")
    exact = build(CASE_4)
    assert [rule(exact, f"x{t}") for t in (1, 2, 3, 4)] == ["Q_x2", "Q_x3", "Q_x4", ""]
    assert exact.q_node("x3").immediate == ("fa",) and exact.q_node("x3").scope == ("x3",)


@pytest.mark.parametrize("letters", ["xy", "xyz"])
def test_case_5_layers_need_one_q_function_a_node(letters: str) -> None:
    depth, width = 4, len(letters)
    graph = layers(depth, letters)
    per_cost = build(graph, "per_cost", immediate="learned")
    for reduction in ("merged", "chain"):
        network = build(graph, reduction)
        for t, a in itertools.product(range(1, depth + 1), letters):
            assert len(per_cost.q_nodes(f"{a}{t}")) == (depth - t) * width + 1
            remote = [node for node in network.q_nodes(f"{a}{t}") if node.is_learned]
            if t == depth:
                assert remote == []
                continue
            (node,) = remote
            assert len(node.remote) == (depth - t) * width
            earlier = tuple(f"{b}{t - 1}" for b in letters) if t > 1 else ()
            # The value of the node itself and, as the bypass, the whole layer before it.
            assert node.scope == (*earlier, f"{a}{t}")


def test_merged_layers_match_by_hand() -> None:
    network = build(layers(3), "merged", immediate="learned")
    assert rule(network, "x2^f_x3,f_y3") == "Q_x3 + Q_y3"
    assert rule(network, "x2^f_x2") == "f_x2"
    assert rule(network, "x1") == "f_x1 + Q_x2^f_x2 + Q_y2^f_y2 + (Q_x2^f_x3,f_y3 + Q_y2^f_x3,f_y3)/2"


# Set definitions on random graphs.


def naive_children(network: BackpropQNetwork, reduction: Reduction) -> dict[str, dict[str, frozenset[str]]]:
    """For each site and cost downstream of it the kept children; empty where the cost is immediate."""
    graph = network.graph
    kept: dict[str, dict[str, frozenset[str]]] = {}
    for i, node in enumerate(graph.nodes):
        earlier = {n.name for n in graph.nodes[: i + 1]}
        known = graph.ancestors(node.name) | {node.name} if network.form == "ancestor" else earlier
        kept[node.name] = {}
        for cost in graph.downstream_costs(node.name):
            reads = set(graph.cost(cost).parents)
            ways = [child for child in graph.children(node.name) if cost in graph.downstream_costs(child)]
            if network.immediate == "exact" and node.name in reads and reads <= known:
                ways = []
            else:
                ways += [cost] if node.name in reads else []
                if reduction == "chain":
                    ways = ways[:1]
                if reduction == "tree":
                    ways = [min(ways, key=lambda child: _distance(graph, child, cost))]
            kept[node.name][cost] = frozenset(ways)
    return kept


@cache
def _distance(graph: StochasticComputationGraph, name: str, cost: str) -> float:
    if name == cost:
        return 0
    if name in graph.cost(cost).parents:
        return 1
    return 1 + min((_distance(graph, child, cost) for child in graph.children(name)), default=np.inf)


def naive_partition(
    graph: StochasticComputationGraph, kept: dict[str, dict[str, frozenset[str]]]
) -> dict[str, set[frozenset[str]]]:
    """Costs at a site are equivalent if their networks agree at every node upstream of it."""

    def upstream(site: str, cost: str) -> set[str]:
        direct = {w for w in graph.index if site in kept[w].get(cost, ())}
        return direct.union(*(upstream(w, cost) for w in direct))

    related = {(x, f, g): True for x in graph.index for f, g in itertools.product(graph.downstream_costs(x), repeat=2)}
    changed = True
    while changed:
        changed = False
        for x, f, g in [key for key, value in related.items() if value]:
            agrees = all(
                kept[w].get(f) == kept[w].get(g) and all(related[y, f, g] for y in kept[w][f] if y in graph.index)
                for w in upstream(x, f) | upstream(x, g)
            )
            if not agrees:
                related[x, f, g] = False
                changed = True
    return {
        x: {frozenset(g for g in graph.downstream_costs(x) if related[x, f, g]) for f in graph.downstream_costs(x)}
        for x in graph.index
    }


@settings(max_examples=150, deadline=None)
@given(graphs(max_nodes=6))
def test_networks_match_their_definitions(graph: StochasticComputationGraph) -> None:
    for reduction, form, immediate in MODES:
        network = build(graph, reduction, immediate=immediate, form=form)
        if reduction == "single":
            continue
        kept = naive_children(network, reduction)
        found = {x: {frozenset(node.sources) for node in network.q_nodes(x)} for x in graph.index}
        if reduction == "per_cost":
            assert found == {x: {frozenset([f]) for f in kept[x]} for x in graph.index}
        else:
            assert found == naive_partition(graph, kept)
        for node in network.nodes:
            for average in node.rule:
                carried = next(iter(average.children))
                costs = network.q_node(carried).sources if carried in network._by_name else (carried,)
                at = {c if c in graph.cost_index else network.q_node(c).site for c in average.children}
                assert all(kept[node.site][cost] == at for cost in costs)


@settings(max_examples=150, deadline=None)
@given(graphs(max_nodes=6))
def test_single_has_one_q_node_a_site(graph: StochasticComputationGraph) -> None:
    every = tuple(cost.name for cost in graph.costs if cost.parents)
    for immediate, form in itertools.product(("exact", "learned"), ("ancestor", "history")):
        network = build(graph, "single", immediate=immediate, form=form)
        sites = [node.name for node in reversed(graph.nodes) if graph.downstream_costs(node.name)]
        assert [node.name for node in network.nodes] == sites
        for node in network.nodes:
            if immediate == "learned":
                i = graph.index[node.site]
                before = set(graph.node_names(graph.known_bits(i, form))) - {node.site}
                known = {cost.name for cost in graph.costs if set(cost.parents) <= before}
                assert node.sources == tuple(name for name in every if name not in known)
                assert set(node.scope) == graph.scope(node.site, node.sources, form)
            assert sum(child in graph.index for child in network.children(node.name)) <= 1


# The rest of the interface.


def test_network_prints_an_aligned_table() -> None:
    assert repr(build(CASE_2, "merged")).splitlines() == [
        "Q-node  scope  immediate  rule",
        "z       x, z              f2",
        "y^f1           f1",
        "y^f2    x, y              f2",
        "x       x                 Q_y^f1 + (Q_y^f2 + Q_z)/2",
    ]


def test_long_cells_of_the_table_take_several_lines_and_lose_nothing() -> None:
    names = [f"cost_number_{k}" for k in range(12)]
    text = repr(build(graph_of({"x": [], "y": ["x"]}, {name: ["x", "y"] for name in names}), immediate="learned"))
    assert max(map(len, text.splitlines())) < 120 and all(name in text for name in names)


def test_network_is_a_value() -> None:
    network, twin = build(CASE_2, "merged"), build(CASE_2, "merged")
    restored = pickle.loads(pickle.dumps(network))
    assert network == twin == restored and hash(network) == hash(twin) == hash(restored)
    assert network != build(CASE_2, "merged", form="history")
    assert network.learned == tuple(node for node in network.nodes if node.name != "y^f1")


def test_long_source_lists_are_abbreviated_in_names() -> None:
    graph = graph_of(
        {"w": [], "x": ["w"], "y": ["w", "x"]}, {"a": ["w", "x"], **{f"f{k}": ["x", "y"] for k in range(9)}, "b": ["x"]}
    )
    names = [node.name for node in build(graph, "tree", immediate="learned").nodes]
    assert len(set(names)) == len(names)
    layered = build(layers(4), "merged", immediate="learned")
    assert {"x2^f_x2", "x2^f_x3,f_y3,+2"} == {node.name for node in layered.q_nodes("x2")}


def test_wrong_options_and_names_are_refused() -> None:
    with pytest.raises(OptionError, match=r"reduction='trees' is unknown; write one of 'per_cost'"):
        build(CASE_1, "trees")  # type: ignore[arg-type]
    for option in ("immediate", "form"):
        with pytest.raises(OptionError, match=f"{option}="):
            build(CASE_1, **{option: "past"})  # type: ignore[arg-type]
    with pytest.raises(SiteNotFoundError, match="no cost 'g'"):
        build(CASE_1, immediate=frozenset(["g"]))
    with pytest.raises(SiteNotFoundError, match="no Q-node 'w'"):
        build(CASE_1).q_node("w")
    with pytest.raises(SiteNotFoundError, match="no stochastic node 'w'"):
        build(CASE_1).q_nodes("w")
    clash = graph_of({"x": [], "x^f1": ["x"]}, {"f1": ["x", "x^f1"], "f2": ["x"]})
    with pytest.raises(GraphError, match="rename site"):
        build(clash, "per_cost")


@pytest.mark.parametrize("dense", [False, True])
def test_large_graphs_are_built(dense: bool) -> None:
    count = 1000
    nodes = {f"x{t}": [f"x{s}" for s in range(0 if dense else max(t - 1, 0), t)] for t in range(count)}
    graph = graph_of(nodes, {f"f{t}": [f"x{t}"] for t in range(count)})
    network = build(graph)
    assert len(network.learned) == count - 1
    assert rule(network, "x0") == "Q_x1" and network.q_node("x500").immediate == ("f500",)


# Drawings.


def test_drawings_are_dot_text_with_scopes_plates_and_colours(tmp_path: Path) -> None:
    graph = graph_of(
        {"x": [], 'y"': ["x"]}, {"f": ["x", 'y"'], "g": ["x"]}, {'y"': [Plate("data", -1), Plate("b", -2)]}
    )
    scg, both = render_scg(graph), render_network(build(graph, immediate="learned"))
    assert '"scg x" -> "scg y\\"";' in scg.dot
    assert scg.dot.index('"cluster scg b"') < scg.dot.index('"cluster scg b data"')
    assert '"q y\\"" [label="Q_y\\"(x, y\\")"' in both.dot and '"scg f"' in both.dot
    assert '"q x" -> "q y\\"" [dir="back", style="solid", color="#0072B2"];' in both.dot
    for text in (scg.dot, both.dot):
        assert text.count("{") == text.count("}") and str(scg) == scg.dot
    assert scg.save(tmp_path / "graph.dot").read_text() == scg.dot
    assert "dotted" in render_network(build(graph)).dot
    assert 'style="dashed"' in render_network(build(graph, "per_cost")).dot


def test_pictures_without_graphviz_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    drawing = render_scg(CASE_1)
    with pytest.raises(BPQError, match="program dot"):
        drawing.save(tmp_path / "graph.svg")
    with pytest.raises(BPQError, match="no ending"):
        drawing.save(tmp_path / "graph")
    assert drawing._repr_mimebundle_() == {"text/plain": drawing.dot}


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz")
def test_pictures_with_graphviz_are_svg_in_notebooks(tmp_path: Path) -> None:
    drawing = render_network(build(CASE_1))
    bundle = drawing._repr_mimebundle_()
    assert "<svg" in bundle["image/svg+xml"] and "Q_" in bundle["image/svg+xml"]
    assert drawing.save(tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BPQError, match="could not draw"):
        drawing.render("no such format")


def test_a_network_without_q_nodes_is_false_and_a_sentence() -> None:
    graph = StochasticComputationGraph.from_parents({"x": []}, {"f": ["x"]})
    empty = BackpropQNetwork(graph, ())
    assert not empty and str(empty).startswith("There is no Backprop-Q network: no site has a critic")
    assert BackpropQNetwork.build(graph)
