"""Graph-wise control variates count the costs of the site that they correct, and no others."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import trained

from pyro_bpq import AllAction, TabularCritic, TraceBackpropQ_ELBO
from pyro_bpq.graph.relations import later_within
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.testing import assert_unbiased

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


def of_whole_sites(graph: StochasticComputationGraph, parts: list[tuple[int, int]], is_steered: bool) -> list[int]:
    """Control variates count where all costs downstream of their site do."""
    return later_within(graph, [(j, graph.downstream_bits[j]) for j, _ in parts], is_steered)


def count_only_whole_sites(elbo: TraceBackpropQ_ELBO, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether that makes a difference."""
    layout = next(iter(elbo.runner.plans.plans.values())).layout
    before = layout.__dict__.pop("predicted").sets
    monkeypatch.setattr("pyro_bpq.step.layout.later_within", of_whole_sites)
    return bool(before != layout.predicted.sets)


@pytest.mark.parametrize(("reduction", "estimator"), [("per_cost", AllAction()), ("chain", AllAction(exact=True))])
def test_unbiased_with_parts_of_later_sites(reduction: Any, estimator: AllAction, monkeypatch: Any) -> None:
    elbo = TraceBackpropQ_ELBO(critic=TabularCritic(), reduction=reduction, estimator=estimator)
    trained(elbo, model, guide, steps=20)
    assert_unbiased(elbo.eval(), model, guide, atol=1e-10)
    assert count_only_whole_sites(elbo, monkeypatch)
