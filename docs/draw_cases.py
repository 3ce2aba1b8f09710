"""Draws the worked cases of ``concepts.md``; needs Graphviz: ``python docs/draw_cases.py``."""

from __future__ import annotations

from pathlib import Path

from pyro_bpq.diagnostics.render import render_network
from pyro_bpq.graph.network import BackpropQNetwork, Reduction
from pyro_bpq.graph.scg import StochasticComputationGraph

graph_of = StochasticComputationGraph.from_parents

LAYERS = {f"{a}{t}": [f"{b}{t - 1}" for b in "xy"] if t > 1 else [] for t in (1, 2, 3) for a in "xy"}
CASES: dict[str, tuple[StochasticComputationGraph, Reduction]] = {
    "case_1": (graph_of({"x": [], "y": ["x"]}, {"f": ["x", "y"]}), "per_cost"),
    "case_2": (graph_of({"x": [], "y": ["x"], "z": ["x"]}, {"f1": ["y"], "f2": ["y", "z"]}), "merged"),
    "case_3": (graph_of({"x1": [], "y1": ["x1"], "y2": ["x1"], "z": ["y1", "y2"]}, {"f": ["z"]}), "per_cost"),
    "case_4": (
        graph_of({"x1": [], "x2": ["x1"], "x3": ["x2"], "x4": ["x3"]}, {"fa": ["x2", "x3"], "fb": ["x3", "x4"]}),
        "chain",
    ),
    "case_6": (graph_of({"x": [], "y1": ["x"], "y2": ["x"]}, {"f1": ["y1"], "f2": ["y2"]}), "merged"),
    "case_7": (
        graph_of(
            {"a": [], "b1": [], "b2": [], "x": ["a"], "y1": ["x", "b1"], "y2": ["x", "a", "b2"]},
            {"f1": ["y1"], "f2": ["y2"]},
        ),
        "chain",
    ),
    "case_5": (graph_of(LAYERS, {f"f_{name}": [name] for name in LAYERS}), "chain"),
}


def main() -> None:
    """Writes one SVG per case to ``_static``; the fifth with exact immediate costs, the others with all learned."""
    for name, (graph, reduction) in CASES.items():
        network = BackpropQNetwork.build(graph, reduction, immediate="exact" if name == "case_5" else "learned")
        render_network(network).save(Path(__file__).parent / "_static" / f"{name}.svg")


if __name__ == "__main__":
    main()
