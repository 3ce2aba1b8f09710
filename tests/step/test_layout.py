"""Classes of like-shaped sites, and what critics see. The matrices between classes are tested by what they bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pyro_bpq.critics.nets import MLPCritic, TabularCritic
from pyro_bpq.estimators import AllAction, Pathwise
from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.rollout.features import Components
from pyro_bpq.step.classes import QGroup, SiteSpec
from pyro_bpq.step.layout import Layout

Graph = StochasticComputationGraph
COIN, DIE = Components("bernoulli", (), 2), Components("categorical", (), 3)


def spec(components: Components | None = COIN, **more: Any) -> SiteSpec:
    return SiteSpec(
        (), components, (), AllAction() if components else Pathwise(), MLPCritic() if components else None, **more
    )


def chain(length: int) -> Graph:
    nodes = {f"x{i}": [f"x{j}" for j in range(i)] for i in range(length)}
    return Graph.from_parents(nodes, {"f": list(nodes)})


def test_contexts_are_a_window_and_the_sum_of_all() -> None:
    graph = chain(7)
    network = BackpropQNetwork.build(graph, "chain", immediate="learned")
    found = Layout(graph, network, {n.name: spec() for n in graph.nodes}, {}, window=2)
    (group,) = found.groups
    assert [node.site for node in group.nodes] == [f"x{i}" for i in range(7)]
    (plan,) = group.contexts
    assert plan.source == 0
    # The latest first; 7 stands for nothing.
    assert plan.window.tolist() == [[7, 7], [0, 7], [1, 0], [2, 1], [3, 2], [4, 3], [5, 4]]
    assert plan.rest is not None
    expected = np.zeros((7, 7))
    for i in range(1, 7):
        expected[i, :i] = i**-0.5
    rest = group.rest(0, torch.zeros(()))
    assert rest is not None
    np.testing.assert_allclose(rest.to_dense(), expected, rtol=1e-6)
    assert group.shape.features == 3
    wide = Layout(graph, network, {n.name: spec() for n in graph.nodes}, {}, window=6)
    (group,) = wide.groups
    assert group.contexts[0].rest is None and group.shape.features == 6


def group_of(layout: Layout, site: str) -> QGroup:
    return next(group for group in layout.groups if site in [node.site for node in group.nodes])


def test_cells_count_the_joint_states_of_the_scope() -> None:
    graph = chain(4)
    network = BackpropQNetwork.build(graph, "chain", immediate="learned")
    coin = replace(spec(), critic=TabularCritic())
    specs = {"x0": replace(coin, components=DIE), "x1": coin, "x2": coin, "x3": replace(coin, share="s")}
    found = Layout(graph, network, specs, {})
    # x3 sees the die and two coins; like-shaped critics have tables of one size.
    assert group_of(found, "x3").shape.cells == 3 * 2 * 2
    assert group_of(found, "x0").shape.cells == 1
    specs["x0"] = SiteSpec((), None, (), Pathwise())
    assert group_of(Layout(graph, network, specs, {}), "x3").shape.cells == 0
