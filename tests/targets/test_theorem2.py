"""Theorem 2 and two sharper bounds hold on chains, by enumeration; with exact critics the theorem's does not vanish."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from steps import benchmark

DEPTH = 6


@pytest.fixture(scope="module")
def theorem2() -> ModuleType:
    return benchmark("theorem2")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0])
def test_bounds_hold_for_any_critics(theorem2: ModuleType, seed: int, spread: float) -> None:
    program, network = theorem2.chain(DEPTH, seed)
    generator = torch.Generator().manual_seed(seed)
    exact = program.exact_q(network)
    q = {name: t + spread * torch.randn(t.shape, generator=generator) for name, t in exact.items()}
    found = theorem2.deviations(program, network, q)
    for distance in range(1, DEPTH + 1):
        error = found.error[distance - 1]
        assert error <= found.by_expectation(distance) + 1e-12
        assert found.by_expectation(distance) <= found.triangle(distance) + 1e-12
        assert error <= found.theorem(distance) + 1e-12
    # At the node before the cost, which the cost reads, the bound is the error itself.
    assert found.error[0] == pytest.approx(found.theorem(1), abs=1e-12)
    assert found.error[-1] > 1e-6 or spread == 0.0


def test_the_bound_of_exact_critics_is_the_variance_of_a_draw(theorem2: ModuleType) -> None:
    """Its epsilon is the largest ``E Var[Q_Y | X]``: training does not remove it."""
    program, network = theorem2.chain(DEPTH, 0)
    exact = program.exact_q(network)
    found = theorem2.deviations(program, network, exact)
    assert max(found.error) < 1e-20 and found.by_expectation(DEPTH) < 1e-20
    variances = []
    for distance in range(2, DEPTH + 1):
        above, own = exact[f"x{distance - 1}"], exact[f"x{distance}"]
        variances.append(float((program.joint * (above.square() - own.square())).sum()))
    assert max(found.sampled) == pytest.approx(max(variances), abs=1e-12) and max(variances) > 1e-3
    assert found.theorem(DEPTH) == pytest.approx((3 * 2 ** (DEPTH - 1) - 2) * max(variances), abs=1e-12)


def test_learned_critics_keep_the_bounds(theorem2: ModuleType) -> None:
    program, network = theorem2.chain(3, 1)
    found = theorem2.deviations(program, network, theorem2.learned(program, network, 300, 0))
    assert 0.0 < found.error[-1] <= found.by_expectation(3) < found.theorem(3)
