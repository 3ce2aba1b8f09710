"""The costs and later sites that count for each site of a graph: sets as bits, no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from pyro_bpq.graph.bitsets import closure, ones, transposed, union
from pyro_bpq.graph.network import QNode
from pyro_bpq.graph.scg import Plate, StochasticComputationGraph


class Relations:
    """The costs and later sites that count for each site of a graph, in program order."""

    def __init__(
        self,
        graph: StochasticComputationGraph,
        tabled: Mapping[str, tuple[str, ...]],
        charged: Mapping[str, frozenset[str]],
        cuts_plates: bool,
        is_steered: bool,
    ) -> None:
        self.graph, self.cuts_plates, self.is_steered = graph, cuts_plates, is_steered
        self._tabled, self._charged = tabled, charged
        self._crossing: dict[tuple[Plate, ...], list[int]] = {}

    @cached_property
    def downstream(self) -> list[int]:
        """The costs downstream of each site, row by row of its plates, without charged costs."""
        downstream, names = self.graph.downstream_bits, self.graph.names
        return [bits & ~self.crossed(n) & ~self._charges(n) for n, bits in zip(names, downstream, strict=True)]

    @cached_property
    def crossing(self) -> list[int]:
        """For each site, the costs that one row may affect in other rows, without charged costs."""
        return [self.crossed(name) & ~self._charges(name) for name in self.graph.names]

    @cached_property
    def tabled(self) -> list[int]:
        """The tabled costs of each site."""
        return [own | model for own, model in self.tabled_parts]

    @cached_property
    def tabled_parts(self) -> list[tuple[int, int]]:
        """The tabled costs of each site in two parts: own log-probabilities, and other costs of the model."""
        parts = []
        for name in self.graph.names:
            own = model = 0
            for cost in self._tabled.get(name, ()):
                bit = 1 << self.graph.cost_index[cost]
                own, model = (own | bit, model) if self.graph.cost(cost).site == name else (own, model | bit)
            parts.append((own, model))
        return parts

    def _charges(self, name: str) -> int:
        """The costs, as bits, that are charged to single components of a site."""
        return self.graph.cost_bits_of(self._charged.get(name, ()))

    def crossed(self, name: str) -> int:
        """The costs, as bits, that one row of a site may affect in other rows."""
        graph, plates = self.graph, self.graph.node(name).plates
        if not plates:
            return 0
        if not self.cuts_plates:
            return graph.downstream_bits[graph.index[name]]
        if plates not in self._crossing:
            self._crossing[plates] = self._crossed(set(plates))
        return self._crossing[plates][graph.index[name]]

    def _crossed(self, plates: set[Plate]) -> list[int]:
        graph, crossed = self.graph, [0] * len(self.graph.nodes)
        inside = sum(1 << j for j, node in enumerate(graph.nodes) if plates <= set(node.plates))
        leaving = 0
        for i in reversed(range(len(crossed))):
            children = graph.child_bits[i]
            crossed[i] = union(graph.downstream_bits, children & ~inside) | union(crossed, children & inside & leaving)
            leaving |= (crossed[i] != 0) << i
        return crossed

    @cached_property
    def later(self) -> list[int]:
        """For each site, the later sites whose costs are all among its own; all later sites if steered."""
        every = (1 << len(self.graph.nodes)) - 1
        if self.is_steered:
            return [after(i, every) for i in range(len(self.graph.nodes))]
        return self.counted(self.graph.downstream_bits)

    def counted(self, costs: Sequence[int]) -> list[int]:
        """For each site, the later sites that have ``costs``, all of them downstream of the site too."""
        graph, downstream = self.graph, self.graph.downstream_bits
        some = sum((bits != 0) << j for j, bits in enumerate(costs))
        found = []
        for i, (own, below) in enumerate(zip(downstream, graph.descendant_bits, strict=True)):
            # The costs of a descendant are always downstream of the site.
            others = after(i, some & ~below)
            found.append((some & below) | sum(1 << j for j in ones(others) if not costs[j] & ~own))
        return found

    def counted_nodes(self, nodes: Sequence[QNode]) -> list[int]:
        """For each site, the later Q-nodes that learn costs which are all downstream of the site, as bits."""
        graph = self.graph
        sites = [graph.index[node.site] for node in nodes]
        costs = [graph.cost_bits_of(node.sources) & ~graph.cost_bits_of(node.immediate) for node in nodes]
        return [
            sum(1 << k for k, j in enumerate(sites) if j > i and costs[k] and not costs[k] & ~own)
            for i, own in enumerate(graph.downstream_bits)
        ]


def after(i: int, sites: int) -> int:
    """The members of ``sites``, as bits, after position ``i``."""
    return sites >> i + 1 << i + 1


class Crossings(NamedTuple):
    """For each site, in program order, the costs that are known given another past, as bits."""

    # Log-probabilities of the site and its descendants, under distributions that do not depend on the site
    own_law: tuple[int, ...]
    # Log-probabilities of values that do not depend on the site, under distributions that read the site and its
    # descendants only
    own_value: tuple[int, ...]
    of_guide: int  # the costs of the guide, as bits. Other costs are the model's.

    @property
    def used(self) -> int:
        """The costs that are known given another past for at least one site."""
        sets = (*self.own_law, *self.own_value)
        return union(sets, (1 << len(sets)) - 1)


def crossings(graph: StochasticComputationGraph, costs: Mapping[str, bool]) -> Crossings:
    """Finds the log-probabilities, among ``costs``, that are known given another past."""
    above = graph.ancestor_bits
    own_law, own_value = [0] * len(graph.costs), [0] * len(graph.costs)
    for k, cost in enumerate(graph.costs):
        if cost.name not in costs or cost.site is None:
            continue
        at = graph.index[cost.site]
        read = graph.cost_bits[k] & ~(1 << at)
        if not read:
            continue
        own = closure(above, 1 << at)
        own_law[k] = own & ~closure(above, read)
        # Sites X, other than the cost's site and its ancestors: the distribution reads only X and descendants of X.
        common = ~own
        for parent in ones(read):
            common &= closure(above, 1 << parent)
        own_value[k] = common
    by_law, by_value = (tuple(transposed(rows, len(graph.nodes))) for rows in (own_law, own_value))
    of_guide = graph.cost_bits_of(name for name, is_own in costs.items() if is_own and name in graph.cost_index)
    return Crossings(by_law, by_value, of_guide)
