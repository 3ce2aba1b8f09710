"""Sums of the costs downstream of each site, by hand."""

from __future__ import annotations

import torch

from pyro_bpq.batching.classes import Relation, SiteSpec
from pyro_bpq.batching.cost_to_go import cost_to_go, sum_costs
from pyro_bpq.batching.layout import Layout
from pyro_bpq.estimators import ScoreFunction
from pyro_bpq.graph.scg import StochasticComputationGraph

CHAIN = StochasticComputationGraph.from_parents({"x": [], "y": ["x"]}, {"f": ["x"], "g": ["x", "y"], "h": []})
SPEC = SiteSpec((), None, (), ScoreFunction())


def test_each_site_gets_what_lies_downstream_of_it() -> None:
    layout = Layout(CHAIN, None, {"x": SPEC, "y": SPEC}, {})
    # Costs f, g, h of two particles.
    costs = [torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])]
    like = torch.zeros(2, 2)
    assert cost_to_go(layout, costs, 0, like).tolist() == [[11.0, 22.0], [10.0, 20.0]]
    found = sum_costs(layout, costs, Relation.DOWNSTREAM, 0)
    assert found is not None and found.tolist() == [[11.0, 22.0], [10.0, 20.0]]


def test_no_sum_where_nothing_is_known_at_other_values() -> None:
    layout = Layout(CHAIN, None, {"x": SPEC, "y": SPEC}, {})
    assert sum_costs(layout, [torch.ones(3, 2)], Relation.TABLED, 0) is None
    layout = Layout(CHAIN, None, {"x": SPEC, "y": SPEC}, {"x": ("f",)})
    found = sum_costs(layout, [torch.tensor([[1.0], [10.0], [100.0]])], Relation.TABLED, 0)
    assert found is not None and found.tolist() == [[1.0], [0.0]]
