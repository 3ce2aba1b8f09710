"""Targets by hand numbers (the worked cases of DESIGN section 3), and the identities between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from tabular import WORKED, graph_of, numbers
from torch import Tensor

from pyro_bpq.critics.targets import lambda_return, network_rules, solve_rules
from pyro_bpq.errors import OptionError
from pyro_bpq.graph.network import Average, BackpropQNetwork
from pyro_bpq.graph.scg import StochasticComputationGraph


def floats(found: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items()}


# Worked case 3: X1 -> Y1, X1 -> Y2, both -> Z -> f.

CASE_3 = BackpropQNetwork.build(graph_of(*WORKED["siblings"]), "merged", immediate="learned")
Q_3 = {"x": 1.0, "y1": 2.0, "y2": 4.0, "z": 5.0}
F_3 = {"f": 7.0}


def test_lambda_return_of_worked_case_3_in_numbers() -> None:
    found = floats(lambda_return(CASE_3, numbers(Q_3), numbers(F_3), 0.5, 0.5))
    # d_z = 3.5 - 5 = -1.5; d_y1 = 2.5 - 2 - .375; d_y2 = 2.5 - 4 - .375; d_x = 1.5 - 1 + .25 * (-.875)
    assert found == pytest.approx({"z": 3.5, "y1": 2.125, "y2": 2.125, "x": 1.28125})


# Worked case 4: X1 -> X2 -> X3 -> X4, f_a(X2, X3), f_b(X3, X4), bypass edges removed.

CASE_4 = BackpropQNetwork.build(graph_of(*WORKED["chain"]), "chain", immediate="learned")
Q_4 = {"x1": 1.0, "x2": 2.0, "x3": 3.5, "x4": 4.0}
F_4 = {"fa": 10.0, "fb": 20.0}


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.5])
def test_lambda_return_of_worked_case_4(gamma: float) -> None:
    assert [node.name for node in CASE_4.nodes] == ["x4", "x3", "x2", "x1"]
    full = floats(lambda_return(CASE_4, numbers(Q_4), numbers(F_4), 1.0, gamma))
    assert full["x1"] == pytest.approx(gamma**3 * 10.0 + gamma**4 * 20.0)
    assert full["x3"] == pytest.approx(gamma * 10.0 + gamma**2 * 20.0)
    short = floats(lambda_return(CASE_4, numbers(Q_4), numbers(F_4), 0.0, gamma))
    # At x3 the two sources are summed: one at its root, one through x4.
    assert short == pytest.approx(
        {"x1": gamma * 2.0, "x2": gamma * 3.5, "x3": gamma * 10.0 + gamma * 4.0, "x4": gamma * 20.0}
    )


reals = st.floats(-5, 5)


def random_network(draw: Any, discounted: bool = False) -> BackpropQNetwork:
    size = draw(st.integers(1, 5))
    nodes = {f"x{i}": [f"x{j}" for j in range(i) if draw(st.booleans())] for i in range(size)}
    costs = {
        f"f{k}": draw(st.lists(st.sampled_from(sorted(nodes)), min_size=1, max_size=3, unique=True))
        for k in range(draw(st.integers(1, 4)))
    }
    reduction = draw(st.sampled_from(["per_cost", "merged", "tree", "chain", *([] if discounted else ["single"])]))
    immediate = draw(st.sampled_from(["exact", "learned"]))
    graph = graph_of(nodes, costs)
    return BackpropQNetwork.build(graph, reduction, immediate=immediate, discounted=discounted)


def drawn(data: st.DataObject, network: BackpropQNetwork) -> tuple[Any, ...]:
    """A network, and costs, learned parts and expectations."""
    names = [[own.name for own in part] for part in (network.graph.costs, network.learned, network.nodes)]
    return network, *(numbers({name: data.draw(reals) for name in part}) for part in names)


@hypothesis.given(st.data())
def test_lambda_one_is_monte_carlo_for_any_critic(data: st.DataObject) -> None:
    gamma = data.draw(st.floats(0.1, 1))
    network, costs, q, _ = drawn(data, random_network(data.draw, gamma < 1.0))
    expected = lambda_return(network, {}, costs, 1.0, gamma)
    assert floats(lambda_return(network, q, costs, 1.0, gamma)) == pytest.approx(floats(expected), abs=1e-9)
    for node in network.nodes:
        total = sum(gamma ** edges_to(network.graph, node.site, name) * float(costs[name]) for name in node.remote)
        assert float(expected[node.name]) == pytest.approx(total, abs=1e-9)


def edges_to(graph: StochasticComputationGraph, site: str, cost: str) -> int:
    """The number of edges on the longest way, from its definition; 0 where there is none or nothing is discounted."""
    if cost not in graph.downstream_costs(site):
        return 0
    below = [edges_to(graph, child, cost) for child in graph.children(site)]
    return 1 + max(below, default=0)


# Discounts below 1: one meaning for every reduction, for exact and for learned immediate costs.

BYPASS = graph_of(*WORKED["bypass"])
FOUR = CASE_4.graph
DISCOUNTED = ("per_cost", "merged", "tree", "chain")


@pytest.mark.parametrize("reduction", DISCOUNTED)
@pytest.mark.parametrize("immediate", ["exact", "learned"])
def test_discounts_do_not_depend_on_the_reduction(reduction: Any, immediate: Any) -> None:
    # By hand. Bypass: x -> y -> f has two edges. Case 4: three edges from x1 to fa and four to fb.
    network = BackpropQNetwork.build(BYPASS, reduction, immediate=immediate, discounted=True)
    assert float(lambda_return(network, {}, numbers({"f": 1.0}), 1.0, 0.5)["x"]) == 0.25
    network = BackpropQNetwork.build(FOUR, reduction, immediate=immediate, discounted=True)
    found = lambda_return(network, {}, numbers(F_4), 1.0, 0.5)
    assert sum(float(found[node.name]) for node in network.q_nodes("x1")) == 10.0 / 8 + 20.0 / 16
    # 0.5 * 20 + 0.5 ** 2 * 10 of the costs that x2 is two and three edges from: 10 / 4 + 20 / 8.
    assert sum(float(found[node.name]) for node in network.q_nodes("x2")) == 5.0


def test_an_edge_that_passes_levels_by_is_discounted_as_often() -> None:
    network = BackpropQNetwork.build(BYPASS, "per_cost", immediate="learned", discounted=True)
    assert network.q_node("x").rule == (Average(("y", "f"), (1, 2)),)
    found = lambda_return(network, numbers({"y": 4.0, "x": 0.0}), numbers({"f": 2.0}), 0.0, 0.5)
    assert floats(found) == {"y": 1.0, "x": (0.5 * 4.0 + 0.25 * 2.0) / 2}
    with pytest.raises(OptionError, match=r"'per_cost', discounted=True"):
        lambda_return(BackpropQNetwork.build(BYPASS, "per_cost", immediate="learned"), {}, numbers({"f": 2.0}), 0, 0.5)


def test_costs_whose_edges_pass_different_levels_are_not_merged() -> None:
    # From x three edges to f through b and a, two to g through a or b: a's Q-function of f counts one level less.
    graph = graph_of({"x": [], "a": ["x"], "b": ["x"], "c": ["b"]}, {"f": ["a", "c"], "g": ["a", "b"]})
    plain = BackpropQNetwork.build(graph, "merged", immediate="learned")
    network = BackpropQNetwork.build(graph, "merged", immediate="learned", discounted=True)
    assert [node.name for node in plain.q_nodes("a")] == ["a"]
    assert [node.name for node in network.q_nodes("a")] == ["a^f", "a^g"]
    assert network.q_node("x").rule == (Average(("a^f", "b^f"), (2, 1)), Average(("a^g", "b^g")))
    found = lambda_return(network, {}, numbers({"f": 8.0, "g": 4.0}), 1.0, 0.5)
    assert float(found["x"]) == 8.0 / 8 + 4.0 / 4


def test_the_sum_of_all_costs_has_no_discount() -> None:
    with pytest.raises(OptionError, match="reduction='chain'"):
        BackpropQNetwork.build(BYPASS, "single", discounted=True)
    with pytest.raises(OptionError, match=r"gamma=0\.5"):
        lambda_return(BackpropQNetwork.build(BYPASS, "single"), {}, numbers({"f": 2.0}), 1.0, 0.5)


@hypothesis.given(st.data())
def test_lambda_zero_is_td(data: st.DataObject) -> None:
    network, costs, q, expected = drawn(data, random_network(data.draw))
    for more in ({}, {"expected": expected}):
        found = floats(lambda_return(network, q, costs, 0.0, 1.0, **more))
        for node in network.nodes:
            total = 0.0
            for average in node.rule:
                children = []
                for child in average.children:
                    if child in costs:
                        children.append(float(costs[child]))
                    elif more and child in q:
                        children.append(float(expected[child]))
                    else:
                        immediate = sum(float(costs[c]) for c in network.q_node(child).immediate)
                        children.append(immediate + float(q.get(child, found[child])))
                total += sum(children) / len(children)
            assert found[node.name] == pytest.approx(total, abs=1e-9)


def test_lambda_return_is_detached() -> None:
    q = {name: value.requires_grad_() for name, value in numbers(Q_3).items()}
    costs = {name: value.requires_grad_() for name, value in numbers(F_3).items()}
    assert not any(value.requires_grad for value in lambda_return(CASE_3, q, costs, 0.5, 1.0, q).values())


@hypothesis.given(st.data())
def test_solve_equals_the_backward_pass(data: st.DataObject) -> None:
    lam, gamma = data.draw(st.floats(0, 1)), data.draw(st.floats(0.1, 1))
    network = random_network(data.draw, gamma < 1.0)
    gamma = 1.0 if network.skips_levels else gamma
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def draw(size: int) -> Tensor:
        return torch.randn(size, 2, 3, generator=generator, dtype=torch.float64)

    rules, stacked = network_rules(network, torch.zeros((), dtype=torch.float64)), draw(len(network.graph.costs))
    costs = dict(zip(network.graph.cost_index, stacked, strict=True))
    size, is_learned = len(rules.order), torch.zeros(len(rules.order), 1, 1)
    for node in network.learned:
        is_learned[rules.order[node.name]] = 1.0
    mean, learned, weight = is_learned * draw(size), is_learned * draw(size), torch.ones(size)
    weight = torch.where(is_learned.flatten() > 0.0, lam, weight)
    q = {node.name: learned[rules.order[node.name]] for node in network.learned}
    known = {node.name: gamma * sum(costs[name] for name in node.immediate) for node in network.learned}
    expected = {name: mean[rules.order[name]] + more for name, more in known.items()}
    found = solve_rules(rules, stacked, mean, learned, weight, gamma)
    for name, value in lambda_return(network, q, costs, lam, gamma, expected).items():
        torch.testing.assert_close(found[rules.order[name]], value.expand(2, 3), rtol=1e-8, atol=1e-8)
