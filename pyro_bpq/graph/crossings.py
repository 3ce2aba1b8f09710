"""Finds the log-probabilities that are known given another particle's past: sets as bits, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pyro_bpq.graph.bitsets import closure, ones, transposed, union
from pyro_bpq.graph.scg import StochasticComputationGraph


class Crossings(NamedTuple):
    """For each site, in program order, the costs that are known given another past, as bits.

    Args:
        own_law: The costs of the site and its descendants whose law reads only the past of the site.
        own_value: The costs whose value lies in the past of the site, and whose law reads nothing of the past.
        of_guide: The costs of the guide, as bits. Other costs are the model's.
    """

    own_law: tuple[int, ...]
    own_value: tuple[int, ...]
    of_guide: int

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
        # Sites X, other than the cost's site and its ancestors, such that the law reads only X and descendants of X.
        common = ~own
        for parent in ones(read):
            common &= closure(above, 1 << parent)
        own_value[k] = common
    by_law, by_value = (tuple(transposed(rows, len(graph.nodes))) for rows in (own_law, own_value))
    of_guide = graph.cost_bits_of(name for name, is_own in costs.items() if is_own and name in graph.cost_index)
    return Crossings(by_law, by_value, of_guide)
