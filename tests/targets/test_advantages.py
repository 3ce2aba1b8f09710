"""Advantages: worked case 6 of the design by hand numbers. That they add no bias is tested with their estimator."""

from __future__ import annotations

import pytest
import torch
from tabular import graph_of, numbers

from pyro_bpq.critics.targets import advantages, lambda_return
from pyro_bpq.errors import PlateError
from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.graph.scg import Plate, StochasticComputationGraph

build = BackpropQNetwork.build


def parents(text: str) -> dict[str, list[str]]:
    pairs = (part.partition(":") for part in text.split())
    return {name: read.split(",") if read else [] for name, _, read in pairs}


def drawn(text: str) -> StochasticComputationGraph:
    """A graph: ``"x y:x | f:x,y"`` has two sites, the second of which reads the first, and a cost that reads both."""
    sites, costs = text.split("|")
    return graph_of(parents(sites), parents(costs))


def found(graph: StochasticComputationGraph, q: dict[str, float], **options: float) -> dict[str, float]:
    """Advantages in a network with every Q learned, as in the paper; costs are 0 unless given."""
    network = build(graph, "merged", immediate="learned")
    costs = {cost.name: torch.tensor(options.pop(cost.name, 0.0)) for cost in graph.costs}
    return {name: float(a) for name, a in advantages(network, numbers(**q), costs, **options).items()}


# Sites, and costs, with what they read; Q-functions; advantages.
CASE_6: dict[str, tuple[str, dict[str, float], dict[str, float]]] = {
    "single parent": ("x y:x | f:y", {"x": 3, "y": 5}, {"x": 3, "y": 5 - 3}),
    "two parents": ("x1 x2 y:x1,x2 | f:y", {"x1": 3, "x2": 1, "y": 5}, {"y": 5 - (3 + 1) / 2}),
    "siblings": ("x y1:x y2:x | f1:y1 f2:y2", {"x": 10, "y1": 4, "y2": 7}, {"y1": 4 - (10 - 7), "y2": 7 - (10 - 4)}),
    "parents and siblings": (
        "x1 x2 y1:x1 y2:x1,x2 y3:x2 | f1:y1 f2:y2 f3:y3",
        {"x1": 10, "x2": 6, "y1": 4, "y2": 7, "y3": 1.5},
        {"y1": 4 - (10 - 7), "y2": 7 - ((10 - 4) + (6 - 1.5)) / 2, "y3": 1.5 - (6 - 7)},
    ),
    # Averaged children are no siblings.
    "averaged": (
        "x y1:x y2:x z:y1,y2 | f:z",
        {"x": 1, "y1": 2, "y2": 4, "z": 5},
        {"x": 1, "y1": 1, "y2": 3, "z": 5 - (2 + 4) / 2},
    ),
    # Nor are ancestors: the target of Q_X is Q_Y1^f1 + (Q_Y1^f2 + Q_Y2) / 2; for y2 the first of them is drawn before.
    "ancestors": (
        "x y1:x y2:x,y1 | f1:y1 f2:y2",
        {"x": 10, "y1^f1": 4, "y1^f2": 6.5, "y2": 7},
        {"y2": 7 - (10 + 6.5) / 2},
    ),
    # Worked case 2: the target of Q_X is Q_Y^f1 + (Q_Y^f2 + Q_Z) / 2.
    "Q-nodes of a site": (
        "x y:x z:x | f1:y f2:y,z",
        {"x": 9, "y^f1": 3, "y^f2": 5, "z": 8},
        {"y": 3 + 5 - 9, "z": 8 - (9 - 3)},
    ),
}


@pytest.mark.parametrize("name", CASE_6)
def test_case_6(name: str) -> None:
    text, q, expected = CASE_6[name]
    a = found(drawn(text), q)
    assert {site: a[site] for site in expected} == pytest.approx(expected)


def test_case_6_siblings_that_descend_from_each_other_are_dropped() -> None:
    graph = drawn("x y1:x y2:x,y1 | f1:y1 f2:x,y2")
    network = build(graph, "chain", immediate="learned")
    assert network.rule_text(network.q_node("x")) == "Q_y1"
    network = build(graph, "tree", immediate="learned")
    assert network.rule_text(network.q_node("x")) == "Q_y1^f1 + f2"
    q = numbers(**{"x": 10.0, "y1^f1": 4.0, "y1^f2": 6.5, "y2": 7.0})
    a = advantages(network, q, numbers(f1=1.0, f2=2.0))
    # f2 reads y2, which descends from y1; for y1 it is dropped.
    assert float(a["y1"]) == 4.0 + 6.5 - 10.0


def test_a_cost_that_the_reader_sums_is_a_sibling() -> None:
    graph = drawn("x y:x | fx:x fy:y")
    assert found(graph, {"x": 9.0, "y": 5.0}, fx=3.0)["y"] == 5.0 - (9.0 - 3.0)
    # Used as it is: it was never in the learned part of Q_X.
    network = build(graph)
    a = advantages(network, numbers(x=6.0), numbers(fx=3.0, fy=5.0))
    assert float(a["y"]) == 5.0 - 6.0


CHAIN = drawn("x1 x2:x1 x3:x2 | f:x3")
Q = {"x1": 1.0, "x2": 2.5, "x3": 4.0}


@pytest.mark.parametrize(("lam", "gamma"), [(0.0, 1.0), (0.4, 0.9), (1.0, 1.0)])
def test_advantage_of_a_chain_is_the_lambda_error_of_the_parent(lam: float, gamma: float) -> None:
    network = build(CHAIN, immediate="learned")
    a = found(CHAIN, Q, f=7.0, lam=lam, gamma=gamma)
    returns = lambda_return(network, numbers(**Q), numbers(f=7.0), lam, gamma)
    for site, parent in (("x2", "x1"), ("x3", "x2")):
        assert a[site] == pytest.approx(float(returns[parent]) - Q[parent])
    if lam == gamma == 1.0:
        assert a["x2"] == 7.0 - Q["x1"] and a["x3"] == 7.0 - Q["x2"]


def plated(**costs: list[str]) -> BackpropQNetwork:
    """A site ``g`` above a site ``z`` in three rows; the costs read ``z``, and those named ``all`` all of its rows."""
    rows = [Plate("rows", -1)]
    graph = StochasticComputationGraph.from_parents(
        {"g": [], "z": ["g"]}, costs, {name: rows for name in ("z", *costs) if name != "all"}
    )
    return build(graph, immediate="learned")


def test_rows_of_a_plate_are_siblings() -> None:
    z = torch.tensor([3.0, 1.0, 5.0])
    a = advantages(plated(f=["z"]), {"g": torch.tensor([10.0]), "z": z}, {"f": torch.zeros(3)})
    assert a["z"].tolist() == [3.0 - (10.0 - 6.0), 1.0 - (10.0 - 8.0), 5.0 - (10.0 - 4.0)]


def test_rows_that_share_a_cost_are_refused() -> None:
    with pytest.raises(PlateError, match=r"'z' lies in the plates \['rows'\].*LeaveOneOut"):
        advantages(plated(all=["z"]), {"g": torch.ones(1), "z": torch.zeros(3)}, {"all": torch.zeros(1)})


def test_rows_above_a_site_are_parents() -> None:
    rows = [Plate("rows", -1)]
    graph = StochasticComputationGraph.from_parents({"x": [], "y": ["x"]}, {"f": ["y"]}, {"x": rows})
    q = {"x": torch.tensor([1.0, 2.0, 6.0]), "y": torch.tensor([7.0])}
    a = advantages(build(graph, immediate="learned"), q, {"f": torch.zeros(1)})
    assert a["y"].tolist() == [7.0 - 3.0]


def test_a_parent_that_nobody_learned_gives_no_baseline() -> None:
    # Its return contains y itself.
    assert found(drawn("x y:x | f:y"), {"y": 5.0}, f=9.0)["y"] == 5.0


def test_a_sibling_with_nothing_to_learn_counts_as_it_is() -> None:
    graph = drawn("x y1:x y2:x z:y1 | f1:z f2:y2")
    a = advantages(build(graph), numbers(x=10.0, y1=4.0), numbers(f1=1.0, f2=7.0))
    assert float(a["y1"]) == 4.0 - (10.0 - 7.0)


def test_what_nobody_learned_is_its_return() -> None:
    assert found(drawn("x y:x | f:y"), {"x": 5.0}, f=9.0, lam=1.0)["y"] == 9.0 - 5.0
