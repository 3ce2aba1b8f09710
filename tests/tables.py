r"""A stochastic computation graph with tables as conditionals and costs, so that Q-functions are known.

All tables are over the joint states. They have one axis per stochastic node, in program order; it has size 1 if the
table does not depend on the node. Sums and products of tables broadcast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyro_bpq.graph.network import BackpropQNetwork, QNode
from pyro_bpq.graph.scg import StochasticComputationGraph


@dataclass(frozen=True, eq=False)
class TabularProgram:
    """A program on a graph whose conditionals and costs are tables.

    Args:
        graph: The stochastic computation graph.
        conditionals: Distribution of each stochastic node given its parents, over the joint axes.
        costs: Each cost in nats, over the joint axes.
    """

    graph: StochasticComputationGraph
    conditionals: Mapping[str, Tensor]
    costs: Mapping[str, Tensor]

    @classmethod
    def random(
        cls, graph: StochasticComputationGraph, generator: torch.Generator, sizes: tuple[int, ...] = (2, 3)
    ) -> TabularProgram:
        """Random tables: conditionals bounded away from zero, costs standard normal.

        Args:
            graph: The stochastic computation graph.
            generator: Source of the numbers.
            sizes: Candidates from which each node's number of values is drawn.

        Returns:
            Tables in float64.
        """
        chosen = [sizes[int(torch.randint(len(sizes), (), generator=generator))] for _ in graph.nodes]

        def shape(names: Iterable[str]) -> list[int]:
            axes = {graph.index[name] for name in names}
            return [size if axis in axes else 1 for axis, size in enumerate(chosen)]

        conditionals = {}
        for axis, node in enumerate(graph.nodes):
            weight = torch.rand(shape((*node.parents, node.name)), generator=generator, dtype=torch.float64) + 0.1
            conditionals[node.name] = weight / weight.sum(axis, keepdim=True)
        costs = {
            cost.name: torch.randn(shape(cost.parents), generator=generator, dtype=torch.float64)
            for cost in graph.costs
        }
        return cls(graph, conditionals, costs)

    @cached_property
    def joint(self) -> Tensor:
        """Probability of every joint state."""
        joint = torch.ones(())
        for conditional in self.conditionals.values():
            joint = joint * conditional
        return joint

    def expect(self, value: Tensor, given: Iterable[str]) -> Tensor:
        """``E[value | given]``, as a table over the axes of ``given``."""
        index = self.graph.index
        rest = sorted(set(index.values()) - {index[name] for name in given})
        if not rest:
            return value.expand_as(self.joint)
        return (self.joint * value).sum(rest, keepdim=True) / self.joint.sum(rest, keepdim=True)

    def known(self, site: str, form: str) -> frozenset[str]:
        """The nodes that a site's Q-functions condition on: ancestors and itself, or all sampled so far."""
        graph = self.graph
        if form == "ancestor":
            return graph.ancestors(site) | {site}
        return frozenset(node.name for node in graph.nodes[: graph.index[site] + 1])

    def exact_q(self, network: BackpropQNetwork) -> dict[str, Tensor]:
        r"""The learned part of each Q-function, ``E[Σ_f f | known]`` over its remote costs: tables in nats."""
        found = {}
        for node in network.learned:
            total = sum((self.costs[cost] for cost in node.remote), torch.zeros(()))
            found[node.name] = self.expect(total, self.known(node.site, network.form))
        return found

    def total(self, node: QNode, q: Mapping[str, Tensor]) -> Tensor:
        """``I_Y + q_Y`` of a Q-node as a table."""
        learned = q.get(node.name, torch.zeros(()))
        return sum((self.costs[cost] for cost in node.immediate), learned)

    def expected(self, network: BackpropQNetwork, q: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``E_Y[I_Y + q_Y]`` of each Q-node over the conditional of its site, as tables."""
        index = self.graph.index
        return {
            node.name: (self.conditionals[node.site] * self.total(node, q)).sum(index[node.site], keepdim=True)
            for node in network.nodes
        }
