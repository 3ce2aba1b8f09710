r"""How the sites of a graph are batched: classes of like-shaped sites, and the matrices between them.

Everything here depends on structure only and is computed once per structure. A sum of costs over the
nodes downstream of each of ``G`` sites is a ``G × costs`` matrix of zeros and ones times the stacked costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bpq.bitsets import ones
from pyro_bpq.critics import Critic
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.features import Components
from pyro_bpq.graph import Plate, StochasticComputationGraph
from pyro_bpq.network import BackpropQNetwork, QNode

__all__ = ["ContextPlan", "CostClass", "Layout", "QGroup", "SiteClass", "SiteSpec", "matrix"]

# Features of the index of a site in a family that shares a critic.
INDEX_FEATURES = 2


@dataclass(frozen=True)
class SiteSpec:
    """What a site is and how it is to be treated; two sites with equal specs are stacked.

    Args:
        plates: Its plates.
        components: Its finite components, or ``None``.
        event_shape: Shape of an event of its distribution.
        estimator: Its gradient estimator.
        critic: How to build its critic, or ``None`` for none.
        tabled: Kinds of immediate costs known at every value: ``"q"``, ``"p"``, ``"model"``.
        has_params: Whether the critic sees the parameters of the site's distribution.
        context: Number of context features given by the user.
        share: Name under which the critic is shared, or ``None``; it then sees the index in the site's name.
        by_component: Whether each component is told its own cost-to-go.
        has_moments: Whether mean and variance stand for components that it lacks: its critic's values are
            functions of the two centred powers of each element.
    """

    plates: tuple[Plate, ...]
    components: Components | None
    event_shape: tuple[int, ...]
    estimator: Estimator
    critic: Critic | None = None
    tabled: frozenset[str] = frozenset()
    has_params: bool = False
    context: int = 0
    share: str | None = None
    has_moments: bool = False
    by_component: bool = False

    @property
    def parts(self) -> tuple[int, int]:
        """Number of components and of entries of each in a critic's table."""
        if self.components is not None:
            return self.components.size, self.components.cardinality
        return (int(np.prod(self.event_shape, dtype=int)), 2) if self.has_moments else (0, 0)


@dataclass(frozen=True)
class SiteClass:
    """Sites with equal specs, in program order."""

    spec: SiteSpec
    names: tuple[str, ...]

    @property
    def value_ndim(self) -> int:
        """Number of event dimensions of a value."""
        return len(self.spec.event_shape)

    @property
    def width(self) -> int:
        """Number of features of an encoded value."""
        components = self.spec.components
        if components is None:
            return int(np.prod(self.spec.event_shape, dtype=int))
        return components.size * (components.cardinality if components.cardinality > 2 else 1)


@dataclass(frozen=True)
class CostClass:
    """Costs with the same plates."""

    plates: tuple[Plate, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class ContextPlan:
    """How the context of a batch of Q-nodes is read from the values of one class of sites.

    Args:
        source: Position of the class.
        window: Positions ``(Q, W)`` in the class of the most recent members of each scope, latest first;
            the class's size where there are fewer.
        rest: Matrix ``(Q, G)`` that sums all members, over the square root of their number; ``None`` where the
            window holds them all.
    """

    source: int
    window: np.ndarray
    rest: np.ndarray | None

    @property
    def slots(self) -> int:
        """Number of encoded values that it yields."""
        return self.window.shape[1] + (self.rest is not None)


@dataclass(frozen=True, eq=False)
class QGroup:
    """Q-nodes that are evaluated together: learned, of one class of sites, with like contexts.

    Args:
        c: Position of the class.
        nodes: The Q-nodes, in program order of their sites.
        sites: Position in the class of each one's site.
        contexts: How their contexts are read.
    """

    c: int
    nodes: tuple[QNode, ...]
    sites: tuple[int, ...]
    contexts: tuple[ContextPlan, ...]
    _constants: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False)

    def constant(self, name: Any, given: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Numbers, or what a function gives, that are the same in every step.

        They go to their device once: the host waits for such a copy.
        """
        key = (name, device, dtype)
        if key not in self._constants:
            self._constants[key] = torch.as_tensor(given() if callable(given) else given, dtype=dtype).to(device)
        return self._constants[key]

    def pick(self, tensor: Tensor) -> Tensor:
        """Of a tensor with a leading axis of the class's sites, those of the Q-nodes."""
        if self.sites == tuple(range(len(tensor))):
            return tensor
        return tensor[self.constant("sites", self.sites, tensor.device, torch.long)]

    def take(self, chosen: Sequence[int]) -> QGroup:
        """Some of its Q-nodes, by position."""
        contexts = [
            ContextPlan(plan.source, plan.window[list(chosen)], None if plan.rest is None else plan.rest[list(chosen)])
            for plan in self.contexts
        ]
        nodes, sites = tuple(self.nodes[i] for i in chosen), tuple(self.sites[i] for i in chosen)
        return QGroup(self.c, nodes, sites, tuple(contexts))


class Layout:
    """Classes of sites, classes of costs, and what connects them.

    Args:
        graph: The graph.
        network: Its Backprop-Q network.
        specs: Spec of every stochastic node.
        tabled: For each site, the immediate costs that are known at every value of it.
        window: Number of most recent scope members per class that a critic sees as they are.
        cuts_plates: Whether a site's row of a plate can only reach the same row of other sites in it. Where a
            site or cost is reached through a node outside of the plate this is never assumed.
        is_steered: Whether sampled values may steer the program. What critics there are, what they see and which of
            them correct a site must then follow from what was sampled before.
        charged: For each site the costs that are charged to single components of it, and sum into no cost-to-go here.
    """

    def __init__(
        self,
        graph: StochasticComputationGraph,
        network: BackpropQNetwork | None,
        specs: Mapping[str, SiteSpec],
        tabled: Mapping[str, tuple[str, ...]],
        window: int = 4,
        cuts_plates: bool = True,
        is_steered: bool = False,
        charged: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        self.cuts_plates, self.is_steered = cuts_plates, is_steered
        self._crossing_bits: dict[tuple[Plate, ...], list[int]] = {}
        self.graph, self.network, self.specs, self.window = graph, network, specs, window
        self.tabled, self.charged = tabled, charged or {}
        by_spec: dict[SiteSpec, list[str]] = {}
        for node in graph.nodes:
            by_spec.setdefault(specs[node.name], []).append(node.name)
        self.classes = tuple(SiteClass(spec, tuple(names)) for spec, names in by_spec.items())
        by_plates: dict[tuple[Plate, ...], list[str]] = {}
        for cost in graph.costs:
            by_plates.setdefault(cost.plates, []).append(cost.name)
        self.cost_classes = tuple(CostClass(plates, tuple(names)) for plates, names in by_plates.items())
        self.place = {n: (c, i) for c, cls in enumerate(self.classes) for i, n in enumerate(cls.names)}
        self._tensors: dict[tuple[str, int, int, torch.dtype, torch.device], Tensor | None] = {}
        self._split: dict[int, bool] = {}
        self._rules: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor, Tensor]] = {}

    def __repr__(self) -> str:
        return f"Layout({len(self.graph.nodes)} sites in {len(self.classes)} classes)"

    def matrix(self, kind: str, row: int, column: int, like: Tensor) -> Tensor | None:
        """A matrix between a class of sites and a class of costs or sites, or ``None`` if it is zero.

        Args:
            kind: ``"downstream"`` (sites × costs, row by row of the plates), ``"crossing"`` (sites × costs, all
                rows), ``"tabled"`` (sites × costs), ``"later"`` (sites × sites), or, for parts of a control variate
                (:meth:`is_split`), ``"later_own"``, ``"later_model"`` (sites × sites), ``"later_learned"`` (sites ×
                Q-nodes).
            row: Position of the class of sites.
            column: Position of the other class; of the group of Q-nodes for ``"later_learned"``.
            like: Gives dtype and device.
        """
        key = (kind, row, column, like.dtype, like.device)
        if key not in self._tensors:
            array = getattr(self, f"_{kind}")(row, column)
            self._tensors[key] = torch.as_tensor(array, dtype=like.dtype).to(like.device) if array.any() else None
        return self._tensors[key]

    def _downstream(self, row: int, column: int) -> np.ndarray:
        downstream, index = self.graph.downstream_bits, self.graph.index
        bits = [downstream[index[n]] & ~self._crossed(n) & ~self._charged(n) for n in self.classes[row].names]
        return _bit_matrix(bits, [self.graph.cost_index[c] for c in self.cost_classes[column].names])

    def _crossing(self, row: int, column: int) -> np.ndarray:
        bits = [self._crossed(name) & ~self._charged(name) for name in self.classes[row].names]
        return _bit_matrix(bits, [self.graph.cost_index[c] for c in self.cost_classes[column].names])

    def _charged(self, name: str) -> int:
        """The costs, as bits, that are charged to single components of a site."""
        return sum(1 << self.graph.cost_index[cost] for cost in self.charged.get(name, ()))

    def _crossed(self, name: str) -> int:
        """The costs, as bits, of which a row of a site may reach the other rows."""
        graph, plates = self.graph, self.graph.node(name).plates
        if not plates:
            return 0
        if not self.cuts_plates:
            return graph.downstream_bits[graph.index[name]]
        if plates not in self._crossing_bits:
            crossed = [0] * len(graph.nodes)
            for i in reversed(range(len(graph.nodes))):
                for j in ones(graph.child_bits[i]):
                    inside = set(plates) <= set(graph.nodes[j].plates)
                    crossed[i] |= crossed[j] if inside else graph.downstream_bits[j]
            self._crossing_bits[plates] = crossed
        return self._crossing_bits[plates][graph.index[name]]

    def rows_meet(self, name: str) -> bool:
        """Whether a cost of one plate row of a site reads another row."""
        return self._crossed(name) != 0 or self.graph.leaves_plates(name)

    def _tabled(self, row: int, column: int) -> np.ndarray:
        columns = {cost: j for j, cost in enumerate(self.cost_classes[column].names)}
        array = np.zeros((len(self.classes[row].names), len(columns)), dtype=np.float32)
        for i, name in enumerate(self.classes[row].names):
            for cost in self.tabled.get(name, ()):
                if cost in columns:
                    array[i, columns[cost]] = 1.0
        return array

    def _later(self, row: int, column: int) -> np.ndarray:
        """Which later sites' ``A_Y`` a site uses: those whose costs are all among its own; if steered, all."""
        array = np.zeros((len(self.classes[row].names), len(self.classes[column].names)), dtype=np.float32)
        index, downstream = self.graph.index, self.graph.downstream_bits
        columns = [(index[n], downstream[index[n]]) for n in self.classes[column].names]
        for i, name in enumerate(self.classes[row].names):
            own, position = downstream[index[name]], index[name]
            for j, (later, costs) in enumerate(columns):
                if later > position and (self.is_steered or (costs and costs & ~own == 0)):
                    array[i, j] = 1.0
        return array

    def _later_own(self, row: int, column: int) -> np.ndarray:
        names = self.classes[column].names
        return self._later_part(row, names, [self._tabled_bits(name)[0] for name in names])

    def _later_model(self, row: int, column: int) -> np.ndarray:
        names = self.classes[column].names
        return self._later_part(row, names, [self._tabled_bits(name)[1] for name in names])

    def _later_learned(self, row: int, column: int) -> np.ndarray:
        nodes = self.groups[column].nodes
        return self._later_part(row, [node.site for node in nodes], [self._remote_bits(node) for node in nodes])

    def _later_part(self, row: int, names: Sequence[str], bits: Sequence[int]) -> np.ndarray:
        """Which parts of later sites' ``A_Y`` a site uses: those whose costs are all among its own."""
        index, downstream = self.graph.index, self.graph.downstream_bits
        array = np.zeros((len(self.classes[row].names), len(names)), dtype=np.float32)
        columns = [(index[name], costs) for name, costs in zip(names, bits, strict=True)]
        for i, name in enumerate(self.classes[row].names):
            own, position = downstream[index[name]], index[name]
            for j, (later, costs) in enumerate(columns):
                if later > position and costs and not costs & ~own:
                    array[i, j] = 1.0
        return array

    def _tabled_bits(self, name: str) -> tuple[int, int]:
        """The tabled costs of a site: its own log-probabilities, and other costs of the model."""
        own = model = 0
        for cost in self.tabled.get(name, ()):
            bit = 1 << self.graph.cost_index[cost]
            own, model = (own | bit, model) if self.graph.cost(cost).site == name else (own, model | bit)
        return own, model

    def _remote_bits(self, node: QNode) -> int:
        return sum(1 << self.graph.cost_index[cost] for cost in node.remote)

    def is_split(self, column: int) -> bool:
        """Whether a site counts some, but not all costs of a later site of a class among its own.

        Its control variate then falls into parts: tabled costs and Q-nodes, each with costs of its own.
        """
        if column not in self._split:
            parts = ["own", "model", *(f"learned {g}" for g, group in enumerate(self.groups) if group.c == column)]
            self._split[column] = not self.is_steered and any(
                self._is_more(row, column, *part.split()) for row in range(len(self.classes)) for part in parts
            )
        return self._split[column]

    def _is_more(self, row: int, column: int, part: str, group: str = "") -> bool:
        """Whether a part of a control variate serves a site that the whole does not serve."""
        index, found = self.graph.index, self.matrix("later", row, column, torch.zeros(()))
        positions = ([index[name] for name in self.classes[c].names] for c in (row, column))
        later = np.less.outer(*map(np.array, positions))
        whole = np.zeros(later.shape, dtype=bool) if found is None else found.numpy() > 0
        if (whole == later).all():
            return False
        if group:
            return bool((self._later_learned(row, int(group)) > whole[:, list(self.groups[int(group)].sites)]).any())
        return bool((getattr(self, f"_later_{part}")(row, column) > whole).any())

    def _distance(self, row: int, column: int) -> np.ndarray:
        """Steps from a site to a later one: the difference of their depths (longest ways from a root), at least 1."""
        depth = [self.depth[name] for name in self.classes[row].names]
        later = [self.depth[name] for name in self.classes[column].names]
        return np.maximum(np.subtract.outer(later, depth).T, 1).astype(np.float32)

    @cached_property
    def depth(self) -> dict[str, int]:
        """Number of steps of the longest way from a root to each stochastic node."""
        depth = [0] * len(self.graph.nodes)
        for i in range(len(depth)):
            for j in ones(self.graph.child_bits[i]):
                depth[j] = max(depth[j], depth[i] + 1)
        return {node.name: d for node, d in zip(self.graph.nodes, depth, strict=True)}

    @cached_property
    def groups(self) -> tuple[QGroup, ...]:
        """The Q-nodes that are learned, grouped for evaluation."""
        found: dict[tuple[Any, ...], list[QNode]] = {}
        for node in reversed(self.network.nodes if self.network is not None else ()):
            c, _ = self.place[node.site]
            if self.classes[c].spec.critic is not None and (node.is_learned or self.is_steered):
                found.setdefault((c, *self._signature(node)), []).append(node)
        groups = []
        for (c, *_), nodes in sorted(found.items(), key=lambda pair: pair[0][0]):
            nodes = sorted(nodes, key=lambda n: self.place[n.site][1])
            sites = tuple(self.place[node.site][1] for node in nodes)
            groups.append(QGroup(c, tuple(nodes), sites, self._context_plans(nodes)))
        return tuple(groups)

    def _signature(self, node: QNode) -> tuple[tuple[int, int], ...]:
        """What the shape of a context depends on: that of other Q-nodes only where nothing is steered."""
        if not self.is_steered:
            return ()
        is_shared = self.specs[node.site].share is not None
        counts: dict[int, int] = {}
        for name in node.scope:
            if name != node.site:
                c, _ = self.place[name]
                # Shared critics see windows of one size, wherever they are.
                counts[c] = self.window + 1 if is_shared else min(counts.get(c, 0) + 1, self.window + 1)
        return tuple(counts.items())

    def membership(self, group: QGroup, nodes: Sequence[QNode], like: Tensor) -> Tensor | None:
        """Matrix (sites × Q-nodes) of the class of a group; ``None`` where it is the identity."""
        sites = [self.place[node.site][1] for node in nodes]
        size = len(self.classes[group.c].names)
        if sites == list(range(size)):
            return None
        key = ("membership", group.c, hash(tuple(sites)), like.dtype, like.device)
        if key not in self._tensors:
            array = np.zeros((size, len(sites)), dtype=np.float32)
            array[sites, range(len(sites))] = 1.0
            self._tensors[key] = torch.as_tensor(array, dtype=like.dtype).to(like.device)
        return self._tensors[key]

    def _context_plans(self, nodes: Sequence[QNode]) -> tuple[ContextPlan, ...]:
        scopes: list[dict[int, list[int]]] = []
        for node in nodes:
            members: dict[int, list[int]] = {}
            for name in reversed(node.scope):
                if name != node.site:
                    c, i = self.place[name]
                    members.setdefault(c, []).append(i)
            scopes.append(members)
        is_full = self.is_steered and self.specs[nodes[0].site].share is not None
        plans = []
        for c in sorted({c for members in scopes for c in members}):
            size = len(self.classes[c].names)
            found = [members.get(c, []) for members in scopes]
            longest = self.window + 1 if is_full else max(len(m) for m in found)
            wide = min(self.window, longest)
            window = np.full((len(nodes), wide), size)
            rest = np.zeros((len(nodes), size), dtype=np.float32)
            for q, positions in enumerate(found):
                window[q, : min(wide, len(positions))] = positions[:wide]
                if positions:
                    # The sum of all, not of the older ones only: a count is then one feature and not five.
                    rest[q, positions] = len(positions) ** -0.5
            plans.append(ContextPlan(c, window, rest if longest > wide else None))
        return tuple(plans)

    @cached_property
    def rule_order(self) -> dict[str, int]:
        """Position of each Q-node of the network in program order."""
        assert self.network is not None
        return {node.name: i for i, node in enumerate(reversed(self.network.nodes))}

    def rule_matrices(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The network's rules as matrices: averages over Q-nodes, over roots, immediate costs.

        Args:
            like: Gives dtype and device.

        Returns:
            Matrices ``(Q, Q)``, strictly upper triangular, ``(Q, costs)`` and ``(Q, costs)``.
        """
        key = (like.dtype, like.device)
        if key not in self._rules:
            rule, root, immediate = (torch.as_tensor(a).to(*key[::-1]) for a in self._rule_arrays())
            self._rules[key] = rule, root, immediate
        return self._rules[key]

    def _rule_arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert self.network is not None
        nodes, costs, order = self.network.nodes, self.graph.cost_index, self.rule_order
        rule = np.zeros((len(nodes), len(nodes)), dtype=np.float32)
        root = np.zeros((len(nodes), len(costs)), dtype=np.float32)
        immediate = np.zeros_like(root)
        for node in nodes:
            i = order[node.name]
            immediate[i, [costs[cost] for cost in node.immediate]] = 1.0
            for average in node.rule:
                for child in average.children:
                    if child in order:
                        rule[i, order[child]] += 1.0 / len(average.children)
                    else:
                        root[i, costs[child]] += 1.0 / len(average.children)
        return rule, root, immediate

    def num_features(self, group: QGroup) -> int:
        """Number of context features of the critics of a group."""
        cls = self.classes[group.c]
        total = sum(plan.slots * self.classes[plan.source].width for plan in group.contexts)
        if cls.spec.has_params and cls.spec.components is not None:
            total += cls.width
        elif cls.spec.has_params and cls.spec.has_moments:
            total += 2 * cls.width
        return total + cls.spec.context + (0 if cls.spec.share is None else INDEX_FEATURES)

    def cells(self, group: QGroup) -> int:
        """Joint states of the scope without the site itself; 0 where they are not finite or too many."""
        total = 1
        for plan in group.contexts:
            components = self.classes[plan.source].spec.components
            if components is None or plan.rest is not None:
                return 0
            total *= components.cardinality ** (components.size * plan.window.shape[1])
            if total > 1 << 30:
                return 0
        return total


def _bit_matrix(rows: Sequence[int], columns: Sequence[int]) -> np.ndarray:
    """Matrix of the bits ``columns`` of each int in ``rows``."""
    if not rows or not columns:
        return np.zeros((len(rows), len(columns)), dtype=np.float32)
    length = max(columns) // 8 + 1
    mask = (1 << 8 * length) - 1
    data = b"".join((bits & mask).to_bytes(length, "little") for bits in rows)
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8).reshape(len(rows), length), axis=1, bitorder="little")
    return bits[:, list(columns)].astype(np.float32)


def matrix(left: Tensor, stacked: Tensor) -> Tensor:
    """``(G, n) @ (n, ...)``: sums stacked tensors with the weights of a matrix."""
    return (left @ stacked.reshape(stacked.shape[0], -1)).reshape(left.shape[0], *stacked.shape[1:])
