"""Theorem 2 and two sharper bounds hold on chains, by enumeration; with exact critics the theorem's does not vanish."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from tables import TabularProgram
from torch import Tensor

from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.graph.scg import StochasticComputationGraph

DEPTH = 6


class Deviations(NamedTuple):
    """Mean squared differences by distance from the cost, the nearest first.

    Args:
        sampled: ``e_l``, between a critic and the next one at the drawn value.
        expected: ``d_l``, between a critic and the expectation of the next one.
        error: ``h_l``, between a critic and the exact Q-function.
    """

    sampled: tuple[float, ...]
    expected: tuple[float, ...]
    error: tuple[float, ...]

    def theorem(self, distance: int) -> float:
        """The bound of Theorem 2 on ``h`` at a distance."""
        return (3.0 * 2.0 ** (distance - 1) - 2.0) * max(self.sampled[:distance])

    def triangle(self, distance: int) -> float:
        """The bound by the triangle inequality."""
        return float(distance) ** 2 * max(self.sampled[:distance])

    def by_expectation(self, distance: int) -> float:
        """The bound by expected differences."""
        return sum(max(d, 0.0) ** 0.5 for d in self.expected[:distance]) ** 2


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


def deviations(program: TabularProgram, network: BackpropQNetwork, q: Mapping[str, Tensor]) -> Deviations:
    """All differences of critics on a chain, exact by enumeration."""
    exact, joint = program.exact_q(network), program.joint
    sampled, expected, error = [], [], []
    upstream = program.costs["f"]
    for distance in range(1, len(q) + 1):
        own = q[f"x{distance}"]
        mean = program.expect(upstream, program.known(f"x{distance}", network.form))
        sampled.append(float((joint * (own - upstream).square()).sum()))
        expected.append(float((joint * (own - mean).square()).sum()))
        error.append(float((joint * (own - exact[f"x{distance}"]).square()).sum()))
        upstream = own
    return Deviations(tuple(sampled), tuple(expected), tuple(error))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0])
def test_bounds_hold_for_any_critics(seed: int, spread: float) -> None:
    program, network = chain(DEPTH, seed)
    generator = torch.Generator().manual_seed(seed)
    exact = program.exact_q(network)
    q = {name: t + spread * torch.randn(t.shape, generator=generator) for name, t in exact.items()}
    found = deviations(program, network, q)
    for distance in range(1, DEPTH + 1):
        error = found.error[distance - 1]
        assert error <= found.by_expectation(distance) + 1e-12
        assert found.by_expectation(distance) <= found.triangle(distance) + 1e-12
        assert error <= found.theorem(distance) + 1e-12
    # At the node before the cost, which the cost reads, the bound is the error itself.
    assert found.error[0] == pytest.approx(found.theorem(1), abs=1e-12)
    assert found.error[-1] > 1e-6 or spread == 0.0


def test_the_bound_of_exact_critics_is_the_variance_of_a_draw() -> None:
    """Its epsilon is the largest ``E Var[Q_Y | X]``: training does not remove it."""
    program, network = chain(DEPTH, 0)
    exact = program.exact_q(network)
    found = deviations(program, network, exact)
    assert max(found.error) < 1e-20 and found.by_expectation(DEPTH) < 1e-20
    squares = [float((program.joint * exact[f"x{i}"].square()).sum()) for i in range(1, DEPTH + 1)]
    variances = [above - own for above, own in pairwise(squares)]
    assert max(found.sampled) == pytest.approx(max(variances), abs=1e-12) and max(variances) > 1e-3
    assert found.theorem(DEPTH) == pytest.approx((3 * 2 ** (DEPTH - 1) - 2) * max(variances), abs=1e-12)
