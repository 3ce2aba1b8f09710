"""Moments of distributions: what centres a critic of values without finite support."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import pytest
import torch

from pyro_bpq.rollout.features import has_moments, standardise


def test_a_value_without_variance_has_no_powers() -> None:
    fn = dist.Delta(torch.tensor([1.5, -2.0], dtype=torch.float64, requires_grad=True))
    found = standardise(fn.sample(), fn.mean, fn.variance)
    assert not found.powers.any() and bool(found.spread.eq(1.0).all())
    found.expected.sum().backward()


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (dist.Normal(torch.zeros(2), 1.0), True),
        (dist.Normal(torch.zeros(2), 1.0).to_event(1).mask(torch.tensor(True)), True),
        (dist.Poisson(torch.tensor(3.0)), True),
        (dist.Geometric(torch.tensor(0.3)), True),
        (dist.Gamma(2.0, 1.0), True),
        (dist.MultivariateNormal(torch.zeros(2), torch.eye(2)), True),
        (dist.Cauchy(0.0, 1.0), False),
        (dist.StudentT(1.5), False),
        (dist.TransformedDistribution(dist.Normal(0.0, 1.0), [dist.transforms.ExpTransform()]), False),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, bool) else "",
)
def test_has_moments(fn: Any, expected: bool) -> None:
    assert has_moments(fn) is expected
