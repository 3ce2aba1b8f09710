"""The copulas of ARMS by simulation, and its limit of two samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pyro_bpq.errors import OptionError
from pyro_bpq.estimators import ARMS, DirichletCopula, DisARM, DisARMTree, RotationCopula, UnorderedSet
from pyro_bpq.estimators.distinct_values import _orders
from pyro_bpq.testing.contract import Problem, with_statistics

COPULAS = [DirichletCopula(), RotationCopula()]


@pytest.mark.parametrize("samples", [2, 3, 5])
@pytest.mark.parametrize("copula", COPULAS, ids=repr)
def test_copula_is_uniform_and_repels_as_it_says(copula: Any, samples: int) -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.rand(300_000, generator=generator)
    u = torch.cat((first.unsqueeze(0), copula.complete(first, samples, generator)))
    assert u.shape[0] == samples and float(u.min()) >= 0 and float(u.max()) <= 1
    for p in (0.1, 0.3, 0.5):
        below = (u < p).double()
        assert float((below.mean(1) - p).abs().max()) < 5e-3
        both = copula.both(torch.tensor(p), samples)
        for i in range(samples):
            for j in range(i):
                assert abs(float((below[i] * below[j]).mean()) - float(both)) < 4e-3


def test_rotation_repels_most() -> None:
    p = torch.linspace(0.01, 0.5, 50)
    for samples in (3, 4, 7):
        rotation, dirichlet = RotationCopula().both(p, samples), DirichletCopula().both(p, samples)
        assert bool((rotation <= dirichlet + 1e-12).all())


class Recording:
    """A program that notes which values are asked for."""

    def __init__(self, program: Any) -> None:
        self.program, self.value, self.generator, self.rows_meet = program, program.value, program.generator, False
        self.from_index = program.from_index
        self.partners: list[torch.Tensor] = []

    def cost(self, value: torch.Tensor) -> torch.Tensor:
        self.partners.append(value)
        return self.program.cost(value)


@pytest.mark.parametrize("estimator", [*(ARMS(2, copula) for copula in COPULAS), DisARMTree()], ids=repr)
def test_two_samples_are_disarm(estimator: Any) -> None:
    # Given the pair, both are functions of it; draw the noise until both have the same partner.
    problem = Problem("bernoulli", size=1, is_scalar=True, sites=1, particles=1)
    rows = {}
    for chosen in (DisARM(), estimator):
        made, leaf = problem.context((400,), seed=3)
        recording = Recording(made.program)
        term = chosen(with_statistics(chosen, replace(made, signals={"program": recording})))
        (gradient,) = torch.autograd.grad(term.surrogate.sum(), leaf)
        rows[chosen] = (made.index.reshape(-1), recording.partners[0].reshape(-1), gradient.reshape(-1, 2))
    (b, c, g), (b2, c2, g2) = rows.values()
    assert torch.equal(b, b2)
    same = c == c2
    assert int((same & (b != c)).sum()) > 50
    torch.testing.assert_close(g[same], g2[same])


def test_options_are_checked() -> None:
    for wrong in ({"samples": 1}, {"copula": DirichletCopula}):
        with pytest.raises(OptionError, match="write"):
            ARMS(**wrong)
    with pytest.raises(OptionError, match="from 2 to 6"):
        UnorderedSet(samples=7)


def test_orders_of_three_by_hand() -> None:
    q = torch.tensor([0.5, 0.3, 0.1])
    first, second = _orders(q)

    def order(a: float, b: float, c: float) -> float:
        return a * b / (1 - a) * c / (1 - a - b)

    weights = [order(0.5, 0.3, 0.1) + order(0.5, 0.1, 0.3), order(0.3, 0.5, 0.1) + order(0.3, 0.1, 0.5)]
    weights.append(order(0.1, 0.5, 0.3) + order(0.1, 0.3, 0.5))
    expected = torch.tensor(weights) / sum(weights)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second[0, 1], torch.tensor(order(0.5, 0.3, 0.1) / weights[0]))
    assert float(second.diagonal().abs().max()) == 0.0


def test_orders_bear_a_value_that_cannot_occur() -> None:
    first, second = _orders(torch.tensor([1.0, 0.0, 0.0]))
    assert bool(first.isfinite().all()) and bool(second.isfinite().all())
    torch.testing.assert_close(first, torch.tensor([1.0, 0.0, 0.0]))
