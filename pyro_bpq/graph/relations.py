"""Which costs and later sites count for each site of a graph: sets as bits, no tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from pyro_bpq.graph.bitsets import closure, ones, transposed, union
from pyro_bpq.graph.scg import Plate, StochasticComputationGraph


def crossed(graph: StochasticComputationGraph, cuts_plates: bool) -> list[int]:
    """For each site the costs that one row of its plates may affect in other rows.

    Without ``cuts_plates`` these are all costs downstream.
    """
    plates = [node.plates for node in graph.nodes]
    if not cuts_plates:
        return [bits if own else 0 for own, bits in zip(plates, graph.downstream_bits, strict=True)]
    found = {own: _crossed(graph, set(own)) for own in set(plates)}
    return [found[own][i] for i, own in enumerate(plates)]


def _crossed(graph: StochasticComputationGraph, plates: set[Plate]) -> list[int]:
    """The same for these plates; a node is *inside* if it lies in all of them: what lies in some joins their rows."""
    found = [0] * len(graph.nodes)
    inside = sum(1 << j for j, node in enumerate(graph.nodes) if plates <= set(node.plates))
    leaving = 0
    for i in reversed(range(len(found))):
        children = graph.child_bits[i]
        found[i] = union(graph.downstream_bits, children & ~inside) | union(found, children & inside & leaving)
        leaving |= (found[i] != 0) << i
    return found


def later_within(
    graph: StochasticComputationGraph, parts: Iterable[tuple[int, int]], is_steered: bool = False
) -> list[int]:
    """For each site those ``parts`` of later sites whose costs are all downstream of it, as bits of their positions.

    A part is the position of a site and some of the costs downstream of that site. In a steered program each part of a
    later site counts.
    """
    earlier = []
    for j, costs in parts:
        before = (1 << j) - 1
        # All costs downstream of a site are downstream of its ancestors.
        others = 0 if is_steered else before & ~graph.ancestor_bits[j]
        for f in ones(costs):
            if not others:
                break
            others &= graph.upstream_bits[f]
        earlier.append(before if is_steered else costs and graph.ancestor_bits[j] | others)
    return transposed(earlier, len(graph.nodes))


class Crossings(NamedTuple):
    """For each site, in program order, the costs that are known given another past, as bits."""

    # Log-probabilities of the site and its descendants, under distributions that do not depend on the site
    own_law: tuple[int, ...]
    # Log-probabilities of values that do not depend on the site, under distributions that read the site and its
    # descendants only
    own_value: tuple[int, ...]

    @property
    def used(self) -> int:
        """The costs that are known given another past for at least one site."""
        sets = (*self.own_law, *self.own_value)
        return union(sets, (1 << len(sets)) - 1)


def crossings(graph: StochasticComputationGraph, costs: Collection[str]) -> Crossings:
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
    return Crossings(*(tuple(transposed(rows, len(graph.nodes))) for rows in (own_law, own_value)))
