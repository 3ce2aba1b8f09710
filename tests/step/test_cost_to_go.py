"""Sums of the costs downstream of each site, by hand."""

from __future__ import annotations

import torch

from pyro_bpq.estimators import ScoreFunction
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.step.classes import SiteSpec
from pyro_bpq.step.layout import Layout

CHAIN = StochasticComputationGraph.from_parents({"x": [], "y": ["x"]}, {"f": ["x"], "g": ["x", "y"], "h": []})
SPEC = SiteSpec((), None, (), ScoreFunction())


def layout(**tabled: tuple[str, ...]) -> Layout:
    return Layout(CHAIN, None, {"x": SPEC, "y": SPEC}, tabled)


def test_each_site_gets_what_lies_downstream_of_it() -> None:
    # Costs f, g, h of two particles.
    costs = [torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])]
    assert layout().cost_to_go(costs, 0, torch.zeros(2, 2)).tolist() == [[11.0, 22.0], [10.0, 20.0]]


def test_no_sum_where_nothing_is_known_at_other_values() -> None:
    assert layout().known.sums(0, [torch.ones(3, 2)], (2, 2)) is None
    found = layout(x=("f",)).known.sums(0, [torch.tensor([[1.0], [10.0], [100.0]])], (2, 1))
    assert found is not None and found.tolist() == [[1.0], [0.0]]
