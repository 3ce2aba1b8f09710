"""Exact Q-functions by enumeration on 200 random graphs: rules, targets, graph-wise control variates."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import get_args

import pytest
import torch
from tables import TabularProgram
from tabular import FORMS, MODES, graph_of, largest, random_program, site_total
from torch import Tensor
from validation import validate_network

from pyro_bpq.graph.network import BackpropQNetwork, Reduction
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.targets.lambda_return import lambda_return

SEEDS = range(200)
ATOL = 1e-10
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
def test_expected_backup_of_exact_q_functions_is_the_q_function(
    reduction: Reduction, form: str, immediate: str
) -> None:
    for seed in SEEDS:
        program = random_program(seed)
        network = build(program.graph, reduction, form=form, immediate=immediate)
        assert target_error(program, network, 0.0, True) < ATOL, (seed, network)


@pytest.mark.parametrize(("reduction", "form", "immediate"), MODES)
def test_targets_of_exact_q_functions_are_unbiased(reduction: Reduction, form: str, immediate: str) -> None:
    for seed in range(0, 200, 5):
        program = random_program(seed)
        network = build(program.graph, reduction, form=form, immediate=immediate)
        for lam, is_expected in ((0.0, False), (0.6, True), (0.6, False), (1.0, True), (1.0, False)):
            assert target_error(program, network, lam, is_expected) < ATOL, (seed, lam, is_expected, network)


def test_backups_are_exact_where_some_costs_are_immediate() -> None:
    for seed, reduction in itertools.product(range(40), get_args(Reduction)):
        program = random_program(seed)
        network = build(program.graph, reduction, immediate=frozenset(list(program.costs)[::2]))
        validate_network(network)
        assert target_error(program, network, 0.0, True) < ATOL
        assert all(set(node.immediate) <= network.immediate for node in network.nodes)


def test_exact_q_functions_read_their_scope_only() -> None:
    for seed, form in itertools.product(SEEDS, FORMS):
        program = random_program(seed)
        network = build(program.graph, "merged", form=form)
        q = program.exact_q(network)
        for node in network.learned:
            assert largest(q[node.name] - program.expect(q[node.name], node.scope)) < ATOL


def test_backups_see_a_wrong_scope_and_a_wrong_rule() -> None:
    wrong_scope = wrong_rule = 0
    for seed in SEEDS:
        program = random_program(seed)
        network = build(program.graph, "merged", immediate="learned")
        for changed in broken(network, lambda n: {"scope": n.scope[:-1]} if len(n.scope) > 1 else {}):
            wrong_scope += target_error(program, changed, 0.0, True) > 1e-3
        for changed in broken(network, lambda n: {"rule": n.rule[1:]} if len(n.rule) > 1 else {}):
            wrong_rule += target_error(program, changed, 0.0, True) > 1e-3
    assert wrong_scope > 100 and wrong_rule > 100


def broken(network: BackpropQNetwork, change: Callable) -> Iterator[BackpropQNetwork]:
    """The network with the first Q-node that can be broken."""
    for i, node in enumerate(network.nodes):
        if changes := change(node):
            nodes = (*network.nodes[:i], dataclasses.replace(node, **changes), *network.nodes[i + 1 :])
            yield dataclasses.replace(network, nodes=nodes)
            return


# Graph-wise control variates: C_X - Q_X(x) - Σ_Y A_Y in every joint state.


def later_sites(graph: StochasticComputationGraph, site: str) -> list[str]:
    return [node.name for node in graph.nodes[graph.index[site] + 1 :]]


def variate(
    program: TabularProgram, network: BackpropQNetwork, q: dict[str, Tensor], site: str, costs: set[str] | None
) -> Tensor:
    """``A_Y`` of a site from those of its Q-functions whose costs are all in ``costs``; ``None`` for all."""
    expected = program.expected(network, q)
    total = torch.zeros(())
    for node in network.q_nodes(site):
        if costs is None or set(node.sources) <= costs:
            total = total + program.total(node, q) - expected[node.name]
    return total


def residuals(
    program: TabularProgram,
    network: BackpropQNetwork,
    *,
    counts_all: bool = False,
    later: Callable[[StochasticComputationGraph, str], list[str]] = later_sites,
    noise: float = 0.0,
) -> dict[str, Tensor]:
    """The corrected residual of each site; ``C_X`` is the sum of the costs that its Q-functions predict."""
    q = {name: (1.0 + noise) * table for name, table in program.exact_q(network).items()}
    found = {}
    for site in program.graph.index:
        costs = {cost for node in network.q_nodes(site) for cost in node.sources}
        if not costs:
            continue
        residual = sum((program.costs[c] for c in costs), torch.zeros(())) - site_total(program, network, q, site)
        for other in later(program.graph, site):
            residual = residual - variate(program, network, q, other, None if counts_all else costs)
        found[site] = residual
    return found


def worst(found: dict[str, Tensor]) -> float:
    return max((largest(residual) for residual in found.values()), default=0.0)


@pytest.mark.parametrize("immediate", ["exact", "learned"])
def test_residual_is_zero_with_the_costs_of_the_site_in_history_form(immediate: str) -> None:
    for seed in SEEDS:
        program = random_program(seed)
        network = build(program.graph, "per_cost", form="history", immediate=immediate)
        assert worst(residuals(program, network)) < ATOL, seed


def test_residual_is_zero_with_every_cost_that_is_not_known_before() -> None:
    # The superset: all costs whose last-sampled variable is X or later, and the total Q of each later site.
    for seed in SEEDS:
        program = random_program(seed)
        graph = program.graph
        network = build(graph, "single", form="history")
        for site in graph.index:
            costs = {cost for node in network.q_nodes(site) for cost in node.sources}
            last = {c.name: graph.last_variable(c.name) for c in graph.costs if c.parents}
            after = {c for c, name in last.items() if graph.index[name] >= graph.index[site]}
            assert not costs or costs == after
        assert worst(residuals(program, network, counts_all=True)) < ATOL, seed


def chain_program(seed: int) -> TabularProgram:
    generator = torch.Generator().manual_seed(seed)
    nodes = {f"x{t}": [f"x{t - 1}"] if t else [] for t in range(5)}
    costs = {f"f{t}": [f"x{t}"] if t % 2 else [f"x{s}" for s in (t - 1, t) if s >= 0] for t in range(5)}
    return TabularProgram.random(graph_of(nodes, costs), generator)


def test_residual_of_a_chain_is_zero_with_ancestor_scopes_and_totals() -> None:
    for seed, reduction in itertools.product(range(20), ("chain", "merged", "tree", "per_cost")):
        program = chain_program(seed)
        network = build(program.graph, reduction)
        found = residuals(program, network, later=lambda graph, site: sorted(graph.descendants(site)))
        assert worst(found) < ATOL


BREAKS = {
    "ancestor form": ({"form": "ancestor"}, {}),
    "costs of others": ({}, {"counts_all": True}),
    "descendants only": ({}, {"later": lambda graph, site: sorted(graph.descendants(site))}),
    "no correction": ({}, {"later": lambda graph, site: []}),
    "inexact Q-functions": ({}, {"noise": 0.1}),
}


@pytest.mark.parametrize("name", BREAKS)
def test_residual_is_not_zero_where_a_condition_is_broken(name: str) -> None:
    options, changes = BREAKS[name]
    broken_in = 0
    for seed in SEEDS:
        program = random_program(seed)
        network = build(program.graph, "per_cost", **{"form": "history", **options})
        broken_in += worst(residuals(program, network, **changes)) > 1e-2
    assert broken_in > 50


def test_residual_keeps_its_mean_where_a_condition_is_broken() -> None:
    # Broken conditions cost variance, never bias: given all that was known at X every A_Y has mean zero.
    for seed, (options, changes) in itertools.product(range(40), BREAKS.values()):
        program = random_program(seed)
        network = build(program.graph, "per_cost", **{"form": "history", **options})
        plain = residuals(program, network, **{**changes, "later": lambda graph, site: []})
        for site, residual in residuals(program, network, **changes).items():
            history = program.known(site, "history")
            assert largest(program.expect(residual - plain[site], history)) < ATOL
