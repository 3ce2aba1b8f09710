"""What replay stores and redraws: worked case 7 of the design, and redrawn targets against exact Q-functions."""

from __future__ import annotations

import itertools

import torch
from tabular import FORMS, REDUCTIONS, graph_of, largest, random_program

from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.graph.replay_plan import ReplayChild, replay_plan
from pyro_bpq.targets.lambda_return import td_target
from pyro_bpq.testing import TabularProgram

build = BackpropQNetwork.build
CASE_7 = graph_of(
    {"a": [], "b1": [], "b2": [], "x": ["a"], "y1": ["x", "b1"], "y2": ["x", "a", "b2"]}, {"f1": ["y1"], "f2": ["y2"]}
)
NETWORK_7 = build(CASE_7, "chain", immediate="learned")


def test_case_7_tuples_by_hand() -> None:
    # The edge Q_Y2 -> Q_A is removed.
    assert NETWORK_7.rule_text(NETWORK_7.q_node("a")) == "Q_x"
    plan = replay_plan(NETWORK_7, "x")
    assert plan.scope == ("a", "x")
    assert plan.stale_stored == ("a", "b1", "b2", "x") and plan.stale_redrawn == ("y1", "y2")
    assert plan.children == (ReplayChild("y1", "y1", ("b1",), ()), ReplayChild("y2", "y2", ("a", "b2"), ()))
    # Better: b1 and b2 lie outside of the scope and come from the current guide too.
    assert plan.redrawn == ("b1", "b2", "y1", "y2") and set(plan.stale_stored) > set(plan.scope)


def test_case_7_has_four_kinds_of_tuples() -> None:
    stored = {name: replay_plan(NETWORK_7, name).stale_stored for name in ("b1", "b2", "x", "a")}
    assert stored == {"b1": ("b1", "x"), "b2": ("a", "b2", "x"), "x": ("a", "b1", "b2", "x"), "a": ("a",)}
    assert replay_plan(NETWORK_7, "y1").redrawn == () and replay_plan(NETWORK_7, "y1").stale_stored == ("y1",)


def test_case_7_loss_by_hand() -> None:
    # One stored tuple (x, a, b1, b2), y1 and y2 drawn twice.
    q_x, y1, y2 = torch.tensor(4.0), torch.tensor([1.0, 3.0]), torch.tensor([2.5, 2.0])
    target = td_target(NETWORK_7, {"x": q_x, "y1": y1, "y2": y2}, {"f1": torch.zeros(2), "f2": torch.zeros(2)})["x"]
    assert target.tolist() == [3.5, 5.0]
    assert float((target - q_x).square().mean()) == (0.5**2 + 1.0**2) / 2


def test_case_7_with_exact_immediate_costs_reads_the_costs() -> None:
    plan = replay_plan(build(CASE_7), "x")
    assert plan.redrawn == ("b1", "b2", "y1", "y2") and plan.scope == ("a", "x")


def test_roots_and_what_a_child_reads_are_in_the_plan() -> None:
    # f reads x, y and w, which is sampled between them and no parent of y.
    graph = graph_of({"x": [], "w": [], "y": ["x"]}, {"f": ["x", "w", "y"], "g": ["x", "w"]})
    plan = replay_plan(build(graph, "per_cost", immediate="learned", form="history"), "x^f")
    assert ReplayChild("f", None, (), ("w", "y")) in plan.children
    assert plan.redrawn == ("w", "y") and plan.stale_stored == ("x", "w") and plan.stale_redrawn == ("y",)


def redrawn_target(program: TabularProgram, network: BackpropQNetwork, name: str, redrawn: tuple[str, ...]) -> float:
    """Largest ``|E_redrawn[target] - Q_X|``, where only ``redrawn`` is drawn, each site from its conditional."""
    q = program.exact_q(network)
    value = td_target(network, q, program.costs)[name]
    for site in reversed(redrawn):
        axis = program.graph.index[site]
        value = (program.conditionals[site] * value).sum(axis, keepdim=True)
    return largest(value - q[name])


def test_redrawing_gives_the_q_function_on_every_scope() -> None:
    stale = 0
    for seed, reduction, form in itertools.product(range(60), REDUCTIONS, FORMS):
        program = random_program(seed)
        network = build(program.graph, reduction, form=form)
        for node in network.learned:
            plan = replay_plan(network, node.name)
            given = set(plan.scope) | set(plan.redrawn)
            assert not set(plan.scope) & set(plan.redrawn)
            assert all(set(program.graph.parents(site)) <= given for site in plan.redrawn)
            assert redrawn_target(program, network, node.name, plan.redrawn) < 1e-10, (seed, network, plan)
            # Without what the paper stores from an older guide the target depends on more than the scope.
            assert set(plan.stale_redrawn) <= set(plan.redrawn)
            if set(plan.redrawn) - set(plan.stale_redrawn):
                stale += redrawn_target(program, network, node.name, plan.stale_redrawn) > 1e-3
    assert stale > 50
