"""Theorem 2 and two sharper bounds hold on chains, by enumeration; with exact critics the theorem's does not vanish."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from tables import TabularProgram
from torch import Tensor

from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.graph.scg import StochasticComputationGraph

DEPTH = 6


def chain(depth: int, seed: int) -> tuple[TabularProgram, BackpropQNetwork]:
    """A chain with random tables and a cost of variance 1 at its end, and its network with every Q learned."""
    names = [f"x{depth - i}" for i in range(depth)]
    parents = {name: names[i - 1 : i] if i else [] for i, name in enumerate(names)}
    graph = StochasticComputationGraph.from_parents(parents, {"f": ["x1"]})
    program = TabularProgram.random(graph, torch.Generator().manual_seed(seed), sizes=(2,))
    cost = program.costs["f"] - (program.joint * program.costs["f"]).sum()
    cost = cost / (program.joint * cost.square()).sum().sqrt()
    program = TabularProgram(graph, program.conditionals, {"f": cost})
    return program, BackpropQNetwork.build(graph, immediate="learned")


def deviations(program: TabularProgram, network: BackpropQNetwork, q: Mapping[str, Tensor]) -> list[list[float]]:
    """Mean squared differences of a critic, the nearest to the cost first, exact by enumeration.

    They are from the next critic at the drawn value, from its expectation, and from the exact Q-function.
    """
    exact, above, found = program.exact_q(network), program.costs["f"], []
    for name in (f"x{distance}" for distance in range(1, len(q) + 1)):
        mean = program.expect(above, program.known(name, network.form))
        found.append([float((program.joint * (q[name] - x).square()).sum()) for x in (above, mean, exact[name])])
        above = q[name]
    return [list(part) for part in zip(*found, strict=True)]


def theorem(sampled: list[float], distance: int) -> float:
    """The bound of Theorem 2 at a distance from the cost."""
    return (3.0 * 2.0 ** (distance - 1) - 2.0) * max(sampled[:distance])


def by_expectation(expected: list[float], distance: int) -> float:
    """The bound by expected differences."""
    return sum(max(d, 0.0) ** 0.5 for d in expected[:distance]) ** 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0])
def test_bounds_hold_for_any_critics(seed: int, spread: float) -> None:
    program, network = chain(DEPTH, seed)
    generator = torch.Generator().manual_seed(seed)
    exact = program.exact_q(network)
    q = {name: t + spread * torch.randn(t.shape, generator=generator) for name, t in exact.items()}
    sampled, expected, error = deviations(program, network, q)
    for distance in range(1, DEPTH + 1):
        bound = by_expectation(expected, distance)
        assert error[distance - 1] <= min(bound, theorem(sampled, distance)) + 1e-12
        # By the triangle inequality.
        assert bound <= distance**2 * max(sampled[:distance]) + 1e-12
    # At the node before the cost, which the cost reads, the bound is the error itself.
    assert error[0] == pytest.approx(theorem(sampled, 1), abs=1e-12)
    # With exact critics the theorem's bound does not vanish: its differences have the noise of a draw.
    assert error[-1] > 1e-6 or (spread == 0.0 and max(sampled) > 1e-3 and by_expectation(expected, DEPTH) < 1e-20)
