"""Graph-wise control variates count the costs of the site that they correct, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import trained

from pyro_bpq import AllAction, TabularCritic, TraceBackpropQ_ELBO
from pyro_bpq.batching.layout import Layout
from pyro_bpq.testing import assert_unbiased, expected_moments

SHARED = 0.2 * torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SHARED += torch.tensor([0.0, 1.5, -2.0], dtype=torch.float64)
OWN = torch.tensor([-4.0, 5.0, 1.0], dtype=torch.float64)


def model() -> None:
    """Two sites that do not read each other, a cost that reads both, and a loud one of the second alone."""
    x, w, v = (pyro.sample(name, dist.Categorical(logits=torch.zeros(3))) for name in "xwv")
    pyro.factor("shared", -(SHARED[x, w] + 0.5 * SHARED[x, v]))
    pyro.factor("own", -OWN[w] * v)


def guide() -> None:
    pyro.sample("x", dist.Categorical(logits=pyro.param("q_x", torch.tensor([0.4, -0.3, 0.1]))))
    w = pyro.sample("w", dist.Categorical(logits=pyro.param("q_w", torch.tensor([0.1, -0.3, 0.4]))))
    pyro.sample("v", dist.Categorical(logits=pyro.param("q_v", 0.3 * SHARED.clone())[w]))


def train(steps: int = 20, **options: Any) -> TraceBackpropQ_ELBO:
    return trained(TraceBackpropQ_ELBO(critic=TabularCritic(), **options), model, guide, steps=steps).eval()


def variance(elbo: TraceBackpropQ_ELBO) -> float:
    moments = expected_moments(elbo, model, guide)
    return float(moments.variance["q_x"].sum())


@pytest.fixture
def whole_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(Layout, "is_split", lambda self, column: False)


@pytest.mark.parametrize(
    ("reduction", "estimator"),
    [("per_cost", AllAction()), ("per_cost", AllAction(trace=0.9)), ("chain", AllAction(exact=True))],
)
def test_unbiased_with_parts_of_later_sites(reduction: Any, estimator: AllAction) -> None:
    elbo = train(reduction=reduction, estimator=estimator)
    layout = next(iter(elbo.runner.plans.plans.values())).layout
    assert any(layout.is_split(c) for c in range(len(layout.classes)))
    assert_unbiased(elbo, model, guide, atol=1e-10)


def test_costs_of_others_stay_out_and_variance_falls(whole_only: Callable[[], None]) -> None:
    elbo = train(400, reduction="per_cost", estimator=AllAction(adaptive=False))
    split = variance(elbo)
    whole_only()
    assert split < 0.8 * variance(elbo)
