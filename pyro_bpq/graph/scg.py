r"""The stochastic computation graph (SCG) of one program: names and edges, no tensors.

Stochastic nodes are the latent sites of a guide, cost nodes the terms to be minimised. Deterministic nodes are
absorbed: the parents of a node are the stochastic nodes that its distribution or cost function reads directly.

For a set of stochastic nodes ``V`` and a cost ``f``, the *frontier* ``Fr(V)`` is the part of ``V`` from which ``f`` is
reachable through nodes outside ``V`` only. Given the frontier, the rest of ``V`` does not affect the cost. So it is the
scope of a Q-function:

    Q_X(Fr(An_X + X)) = E[f | Fr(An_X + X)].

References:
    | Backprop-Q (Xu et al., 2018), Sec. 3.1, https://arxiv.org/abs/1807.09511
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from pyro_bpq.errors import GraphError, SiteNotFoundError, check_choice
from pyro_bpq.graph.bitsets import Names, closure, named, transposed
from pyro_bpq.short import aligned

Form = Literal["ancestor", "history"]


@dataclass(frozen=True, order=True)
class Plate:
    """An independence context of Pyro.

    Args:
        name: Name of the ``pyro.plate``.
        dim: Its dimension, negative, counted from the right of a site's batch shape.
    """

    name: str
    dim: int


@dataclass(frozen=True)
class StochasticNode:
    """A latent site's place in the graph.

    Args:
        name: Name of the site.
        parents: Names of the stochastic nodes that its distribution reads directly.
        plates: Its plates, sorted.
    """

    name: str
    parents: Sequence[str] = ()
    plates: tuple[Plate, ...] = ()


@dataclass(frozen=True)
class CostNode:
    """One term to be minimised, in nats.

    Args:
        name: Name of the cost, unique in the graph.
        parents: Names of the stochastic nodes that the cost reads directly.
        plates: Its plates, sorted.
        site: The site it belongs to, if any: ``log q`` of a guide site, ``-log p`` of a model site.
        is_of_guide: Whether it is a log-probability of the guide.
    """

    name: str
    parents: Sequence[str] = ()
    plates: tuple[Plate, ...] = ()
    site: str | None = None
    is_of_guide: bool = False


def cost_of_guide(site: str) -> str:
    """Name of the cost ``log q`` of a guide site."""
    return f"log q({site})"


def cost_of_model(site: str) -> str:
    """Name of the cost ``-log p`` of a model site."""
    return f"-log p({site})"


@dataclass(frozen=True)
class StochasticComputationGraph:
    """Stochastic nodes in program order and cost nodes: a frozen, hashable value without tensors.

    Args:
        nodes: Stochastic nodes; each one's parents come before it.
        costs: Cost nodes.

    Raises:
        GraphError: If a name occurs twice, or a parent is unknown or comes later.

    Example:
        >>> graph = StochasticComputationGraph.from_parents({"x": [], "y": ["x"]}, {"f": ["x", "y"]})
        >>> sorted(graph.scope("y", ["f"]))
        ['x', 'y']
    """

    nodes: tuple[StochasticNode, ...]
    costs: tuple[CostNode, ...]

    def __post_init__(self) -> None:
        used, known = set[str](), set[str]()
        everything: tuple[StochasticNode | CostNode, ...] = (*self.nodes, *self.costs)
        for node in everything:
            kind = "Cost node" if isinstance(node, CostNode) else "Stochastic node"
            if node.name in used:
                raise GraphError(f"{kind} {node.name!r} occurs twice; give every node a name of its own.")
            parents = node.parents
            # Sets of names that are shared are not walked through.
            is_sound = isinstance(parents, Names) and self._is_own(parents) and not parents.bits >> len(known)
            if not is_sound and (unknown := [parent for parent in parents if parent not in known]):
                raise GraphError(
                    f"{kind} {node.name!r} has the parents {unknown}, which do not come before it; "
                    "list stochastic nodes in the order in which they are sampled."
                )
            used.add(node.name)
            if isinstance(node, StochasticNode):
                known.add(node.name)

    @classmethod
    def from_parents(
        cls,
        nodes: Mapping[str, Iterable[str]],
        costs: Mapping[str, Iterable[str]],
        plates: Mapping[str, Iterable[Plate]] | None = None,
    ) -> StochasticComputationGraph:
        """Builds a graph by hand.

        Args:
            nodes: Name of each stochastic node and its direct parents, in program order.
            costs: Name of each cost and the stochastic nodes it reads.
            plates: Plates of nodes and costs, by name.

        Raises:
            GraphError: If a name occurs twice, is unknown, or comes before one of its parents.
        """
        framed = {name: tuple(sorted(p)) for name, p in (plates or {}).items()}
        strangers = sorted(framed.keys() - nodes.keys() - costs.keys())
        if strangers:
            raise GraphError(
                f"Plates are given for {strangers}, which are neither nodes nor costs; the names are "
                f"{[*nodes, *costs]}."
            )
        return cls(
            tuple(StochasticNode(n, tuple(p), framed.get(n, ())) for n, p in nodes.items()),
            tuple(CostNode(n, tuple(p), framed.get(n, ())) for n, p in costs.items()),
        )

    # The hash is cached, since graphs serve as keys at every step.
    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        plates = tuple([node.plates for node in self.nodes])
        return hash((self.names, plates, tuple(self.parent_bits), self._cost_names, tuple(self.cost_bits)))

    def __getstate__(self) -> dict[str, object]:
        # String hashes differ between processes, so cached values are not pickled.
        return {"nodes": self.nodes, "costs": self.costs}

    # Below, sets of nodes and of costs are bits of an int, by their positions.

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the stochastic nodes, in program order."""
        own = tuple(node.name for node in self.nodes)
        # All sets of names share one tuple, so that an identity test recognises them.
        sets = [*(node.parents for node in self.nodes), *(cost.parents for cost in self.costs)]
        return next((s.of for s in sets if isinstance(s, Names) and s.of == own), own)

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each stochastic node in program order."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    @cached_property
    def cost_index(self) -> dict[str, int]:
        """Position of each cost node."""
        return {cost.name: i for i, cost in enumerate(self.costs)}

    @cached_property
    def parent_bits(self) -> list[int]:
        """The direct parents of each stochastic node."""
        return [self.bits_of(node.parents) for node in self.nodes]

    @cached_property
    def cost_bits(self) -> list[int]:
        """The nodes that each cost reads."""
        return [self.bits_of(cost.parents) for cost in self.costs]

    @cached_property
    def ancestor_bits(self) -> list[int]:
        """The ancestors of each stochastic node."""
        ancestors: list[int] = []
        for bits in self.parent_bits:
            ancestors.append(closure(ancestors, bits))
        return ancestors

    @cached_property
    def descendant_bits(self) -> list[int]:
        """The nodes that depend on each stochastic node, directly or not."""
        return transposed(self.ancestor_bits, len(self.nodes))

    @cached_property
    def child_bits(self) -> list[int]:
        """The nodes that read each stochastic node directly."""
        return transposed(self.parent_bits, len(self.nodes))

    @cached_property
    def cost_child_bits(self) -> list[int]:
        """The costs that read each stochastic node directly."""
        return transposed(self.cost_bits, len(self.nodes))

    @cached_property
    def upstream_bits(self) -> list[int]:
        """The nodes that each cost depends on, directly or not."""
        return [closure(self.ancestor_bits, bits) for bits in self.cost_bits]

    @cached_property
    def downstream_bits(self) -> list[int]:
        """The costs downstream of each stochastic node."""
        return transposed(self.upstream_bits, len(self.nodes))

    def node(self, name: str) -> StochasticNode:
        """The stochastic node called ``name``."""
        return self.nodes[self._position(name)]

    def cost(self, name: str) -> CostNode:
        """The cost node called ``name``."""
        if name not in self.cost_index:
            raise SiteNotFoundError(f"There is no cost {name!r}; the costs are {list(self.cost_index)}.")
        return self.costs[self.cost_index[name]]

    def parents(self, name: str) -> Sequence[str]:
        """Direct parents of a stochastic node or a cost, in program order."""
        return self.node_names(self._parent_bits_of(name))

    def children(self, name: str) -> Sequence[str]:
        """Stochastic nodes that read ``name`` directly."""
        return self.node_names(self.child_bits[self._position(name)])

    def ancestors(self, name: str) -> frozenset[str]:
        """Transitive parents of a stochastic node or a cost."""
        return frozenset(self.node_names(closure(self.ancestor_bits, self._parent_bits_of(name))))

    def _parent_bits_of(self, name: str) -> int:
        if name in self.index:
            return self.parent_bits[self.index[name]]
        if name in self.cost_index:
            return self.cost_bits[self.cost_index[name]]
        raise SiteNotFoundError(
            f"There is no stochastic node or cost {name!r}; the nodes are {list(self.index)}, the costs "
            f"{list(self.cost_index)}."
        )

    def descendants(self, name: str) -> frozenset[str]:
        """Stochastic nodes that depend on ``name``, directly or not."""
        return frozenset(self.node_names(self.descendant_bits[self._position(name)]))

    def downstream_costs(self, name: str) -> Sequence[str]:
        """Costs that depend on ``name``, directly or through other nodes."""
        return self.cost_names(self.downstream_bits[self._position(name)])

    def leaves_plates(self, name: str) -> bool:
        """Whether a cost downstream of ``name`` lacks one of the plates of ``name`` and so reads several rows."""
        bits = self.downstream_bits[self._position(name)]
        return any(bits & ~self._costs_in.get(plate, 0) for plate in self.node(name).plates)

    @cached_property
    def _costs_in(self) -> dict[Plate, int]:
        """The costs in each plate, as bits."""
        plates = {plate for cost in self.costs for plate in cost.plates}
        return {plate: sum(1 << i for i, cost in enumerate(self.costs) if plate in cost.plates) for plate in plates}

    def cost_names(self, bits: int) -> Sequence[str]:
        """Names of the costs whose positions are the bits of ``bits``."""
        return named(self._cost_names, bits)

    @cached_property
    def _cost_names(self) -> tuple[str, ...]:
        return tuple(self.cost_index)

    def last_variable(self, cost: str) -> str | None:
        """The last sampled node that ``cost`` reads; in history form the cost is immediate there."""
        bits = self.cost_set_bits([cost])
        return self.nodes[bits.bit_length() - 1].name if bits else None

    @property
    def last_costs(self) -> dict[str, tuple[str, ...]]:
        """For each stochastic node the costs that read nothing sampled later: those immediate in history form."""
        found: dict[str, tuple[str, ...]] = dict.fromkeys(self.index, ())
        for cost in self.costs:
            if (last := self.last_variable(cost.name)) is not None:
                found[last] += (cost.name,)
        return found

    def frontier(self, names: Iterable[str], costs: Iterable[str]) -> frozenset[str]:
        """The part of ``names`` from which one of ``costs`` is reachable through nodes outside ``names``.

        References:
            | Backprop-Q (Xu et al., 2018), Theorem 1
        """
        return frozenset(self.node_names(self.frontier_bits(self.bits_of(names), self.cost_set_bits(costs))))

    def frontier_bits(self, inside: int, reached: int) -> int:
        """The frontier as bits; ``inside`` is the set ``V``, ``reached`` the nodes that the costs read."""
        frontier, outside = reached & inside, reached & ~inside
        # Walk backwards from the costs. The walk stops at nodes inside V and passes through nodes outside.
        while outside:
            i = outside.bit_length() - 1
            parents = self.parent_bits[i]
            frontier |= parents & inside
            outside = (outside ^ 1 << i) | (parents & ~inside)
        return frontier

    def cost_set_bits(self, costs: Iterable[str]) -> int:
        """The nodes that at least one of ``costs`` reads, as bits."""
        bits = 0
        for cost in costs:
            bits |= self.cost_bits[self.cost_index[self.cost(cost).name]]
        return bits

    def scope(self, name: str, costs: Iterable[str], form: Form = "ancestor") -> frozenset[str]:
        r"""The variables that the Q-function of ``name`` for ``costs`` must see.

        Sc_X = Fr(An_X + X)            (``form="ancestor"``, the paper's)
        Sc_X = Fr(all sampled so far)  (``form="history"``)

        Raises:
            OptionError: If ``form`` is neither.
        """
        check_choice("form", form, get_args(Form))
        known = self.known_bits(self._position(name), form)
        return frozenset(self.node_names(self.frontier_bits(known, self.cost_set_bits(costs))))

    def known_bits(self, position: int, form: Form) -> int:
        """The nodes that the Q-function at ``position`` conditions on: An_X + X, or all sampled so far."""
        before = self.ancestor_bits[position] if form == "ancestor" else (1 << position) - 1
        return before | 1 << position

    def _position(self, name: str) -> int:
        if name not in self.index:
            raise SiteNotFoundError(f"There is no stochastic node {name!r}; the nodes are {list(self.index)}.")
        return self.index[name]

    def _is_own(self, names: Names) -> bool:
        return names.of is self.names or names.of == self.names

    def bits_of(self, names: Iterable[str]) -> int:
        """The stochastic nodes called ``names``, as bits."""
        if isinstance(names, Names) and self._is_own(names):
            return names.bits
        return sum(1 << position for position in set(map(self._position, names)))

    def node_names(self, bits: int) -> Sequence[str]:
        """Names of the stochastic nodes whose positions are the bits of ``bits``."""
        return named(self.names, bits)

    def cost_bits_of(self, names: Iterable[str]) -> int:
        """The costs called ``names``, as bits."""
        if isinstance(names, Names) and (names.of is self._cost_names or names.of == self._cost_names):
            return names.bits
        return sum(1 << self.cost_index[name] for name in set(names))

    def __repr__(self) -> str:
        rows = [["site", "parents", "plates"]]
        everything: tuple[StochasticNode | CostNode, ...] = (*self.nodes, *self.costs)
        for node in everything:
            name = f"[{node.name}]" if isinstance(node, CostNode) else node.name
            rows.append([name, ", ".join(node.parents), ", ".join(f"{p.name}:{p.dim}" for p in node.plates)])
        return "\n".join(aligned(rows))
