"""Tabular critics get to the exact Q-functions at the rate of their noise; the benchmark's code on fewer programs."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from steps import benchmark

ROLLOUTS = (100, 300, 1000, 3000, 10_000, 30_000)


@pytest.fixture(scope="module")
def convergence() -> ModuleType:
    return benchmark("convergence")


def error(
    convergence: ModuleType, method: str, is_wrong: bool, programs: int, rollouts: tuple[int, ...]
) -> list[float]:
    runs = [
        convergence.errors(convergence.random_program(p), method, 100 + p, is_wrong, rollouts) for p in range(programs)
    ]
    return torch.tensor(runs).mean(0).sqrt().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sampled TD", "expected TD", "Monte Carlo"])
def test_error_falls_with_the_root_of_the_rollouts(convergence: ModuleType, method: str) -> None:
    found = error(convergence, method, False, 12, ROLLOUTS)
    assert abs(convergence.slope(ROLLOUTS, found) + 0.5) < 0.1
    assert found[-1] < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sampled TD", "expected TD", "Monte Carlo"])
def test_error_stays_where_the_scope_is_wrong(convergence: ModuleType, method: str) -> None:
    found = error(convergence, method, True, 12, ROLLOUTS)
    assert abs(convergence.slope(ROLLOUTS, found) + 0.5) > 0.1
    assert found[-1] > 0.1


def test_tables_are_averages_of_their_targets(convergence: ModuleType) -> None:
    program = convergence.random_program(0)
    network = convergence.BackpropQNetwork.build(program.graph)
    for method in convergence.METHODS:
        tables = convergence.Tables(program, network, method)
        tables.update(200, torch.Generator().manual_seed(0))
        for name, visits in tables.visits.items():
            assert float(visits.sum()) == 200.0
            assert tables.total[name].shape == program.expect(torch.zeros(()), network.q_node(name).scope).shape
    # A step of Monte Carlo regression: the mean cost-to-go of the rollouts that visited the cell.
    tables, generator = convergence.Tables(program, network, "Monte Carlo"), torch.Generator().manual_seed(1)
    values = program.sample(500, torch.Generator().manual_seed(1))
    tables.update(500, generator)
    node = network.learned[0]
    cost = sum(program.at(program.costs[c].expand(program.joint.shape), values, 500) for c in node.remote)
    cell = {name: int(values[name][0]) for name in node.scope}
    hit = torch.stack([values[name] == value for name, value in cell.items()]).all(0)
    index = tuple(cell.get(name, 0) for name in program.graph.index)
    torch.testing.assert_close(tables.q[node.name][index], cost[hit].mean())


def test_rollouts_have_the_frequencies_of_the_tables(convergence: ModuleType) -> None:
    program = convergence.random_program(1)
    values = program.sample(20_000, torch.Generator().manual_seed(0))
    cells = program.cells(program.joint, values, 20_000)
    frequency = torch.bincount(cells, minlength=program.joint.numel()) / 20_000
    joint = program.joint.reshape(-1)
    z = (frequency - joint) / (joint * (1 - joint) / 20_000).sqrt()
    assert float(z.abs().max()) < 5.0 and float((frequency - joint.roll(1)).abs().max()) > 0.01
