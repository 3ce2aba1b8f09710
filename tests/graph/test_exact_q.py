"""Exact Q-functions by enumeration on 200 random graphs: rules, targets, graph-wise control variates."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
from tables import TabularProgram
from tabular import FORMS, MODES, largest, random_program, site_total

from pyro_bpq.critics.targets import lambda_return
from pyro_bpq.graph.network import BackpropQNetwork, Reduction

SEEDS = range(200)
ATOL = 1e-10
# Weight of the lambda-return, and whether values of children are expectations; the backup comes first.
TARGETS = list(itertools.product((0.0, 0.6, 1.0), (True, False)))
build = BackpropQNetwork.build


def target_error(program: TabularProgram, network: BackpropQNetwork, lam: float, is_expected: bool) -> float:
    """Largest ``|E[target | Sc_X] - Q_X|``; co-parents and whatever else is outside of Sc_X are averaged."""
    q = program.exact_q(network)
    expected = program.expected(network, q) if is_expected else None
    targets = lambda_return(network, q, program.costs, lam, 1.0, expected)
    return max((largest(program.expect(targets[n.name], n.scope) - q[n.name]) for n in network.learned), default=0.0)


def test_random_graphs_have_what_they_are_to_test() -> None:
    programs = [random_program(seed) for seed in SEEDS]
    assert {len(p.graph.nodes) for p in programs} == {2, 3, 4, 5, 6, 7}
    assert {size for p in programs for size in p.joint.shape} == {2, 3}
    assert sum(len(p.graph.costs) > 1 for p in programs) > 100
    scopes = [node for p in programs for node in build(p.graph).learned if len(node.scope) > 1]
    averages = [a for p in programs for n in build(p.graph, "merged").nodes for a in n.rule if len(a.children) > 1]
    assert len(scopes) > 200 and len(averages) > 200


@pytest.mark.parametrize(("reduction", "form", "immediate"), MODES)
def test_expected_backup_of_exact_q_functions_is_the_q_function(reduction: Any, form: str, immediate: str) -> None:
    """So it is of targets of all kinds, on every fifth graph."""
    for seed in SEEDS:
        program = random_program(seed)
        network = build(program.graph, reduction, form=form, immediate=immediate)
        for lam, is_expected in TARGETS[: 1 if seed % 5 else None]:
            assert target_error(program, network, lam, is_expected) < ATOL, (seed, lam, is_expected, network)


def test_backups_are_exact_where_some_costs_are_immediate() -> None:
    for seed, reduction in itertools.product(range(40), get_args(Reduction)):
        program = random_program(seed)
        network = build(program.graph, reduction, immediate=frozenset(list(program.costs)[::2]))
        assert target_error(program, network, 0.0, True) < ATOL
        assert all(set(node.immediate) <= network.immediate for node in network.nodes)


def test_exact_q_functions_read_their_scope_only() -> None:
    for seed, form in itertools.product(SEEDS, FORMS):
        program = random_program(seed)
        network = build(program.graph, "merged", form=form)
        q = program.exact_q(network)
        for node in network.learned:
            assert largest(q[node.name] - program.expect(q[node.name], node.scope)) < ATOL


@pytest.mark.parametrize("immediate", ["exact", "learned"])
def test_exact_control_variates_of_later_sites_leave_nothing(immediate: str) -> None:
    """Graph-wise: ``C_X - Q_X(x) - Σ_Y A_Y`` is zero in every joint state, over Q-functions of the costs of X."""
    for seed in SEEDS:
        program = random_program(seed)
        network = build(program.graph, "per_cost", form="history", immediate=immediate)
        q, sites = program.exact_q(network), list(program.graph.index)
        expected = program.expected(network, q)
        for i, site in enumerate(sites):
            costs = {cost for node in network.q_nodes(site) for cost in node.sources}
            residual = sum((program.costs[cost] for cost in costs), -site_total(program, network, q, site))
            for node in itertools.chain(*map(network.q_nodes, sites[i + 1 :])):
                if costs.issuperset(node.sources):
                    residual = residual - (program.total(node, q) - expected[node.name])
            assert largest(residual) < ATOL, seed
