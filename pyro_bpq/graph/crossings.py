"""Which log-probabilities are known beside another particle's past: sets as bits, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pyro_bpq.graph.bitsets import closure, ones, transposed, union
from pyro_bpq.graph.scg import StochasticComputationGraph

__all__ = ["Crossings", "crossings"]


class Crossings(NamedTuple):
    """The costs, as bits, that are known beside another past, for each site in program order.

    Args:
        own_law: Those whose law reads the past of the site alone.
        own_value: Those of a site in the past whose law reads nothing of it.
        of_guide: Which of all costs are the guide's; the others are the model's.
    """

    own_law: tuple[int, ...]
    own_value: tuple[int, ...]
    of_guide: int

    @property
    def used(self) -> int:
        """The costs that are known so for any site."""
        sets = (*self.own_law, *self.own_value)
        return union(sets, (1 << len(sets)) - 1)


def crossings(graph: StochasticComputationGraph, costs: Mapping[str, bool]) -> Crossings:
    """Which of some log-probabilities are known beside another past.

    Args:
        graph: The graph.
        costs: By name of a log-probability of its sites whether it is the guide's.

    Returns:
        The crossings.
    """
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
        # The sites from which on everything follows that the law reads.
        common = ~own
        for parent in ones(read):
            common &= closure(above, 1 << parent)
        own_value[k] = common
    by_law, by_value = (tuple(transposed(rows, len(graph.nodes))) for rows in (own_law, own_value))
    of_guide = graph.cost_bits_of(name for name, is_own in costs.items() if is_own and name in graph.cost_index)
    return Crossings(by_law, by_value, of_guide)
