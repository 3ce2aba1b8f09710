"""Batches the sites of a graph: classes of like-shaped sites, matrices between them, and what critics read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bpq.batching.classes import ContextPlan, CostClass, CrossedCosts, QGroup, Relation, SiteClass, SiteSpec
from pyro_bpq.critics.joint import reads_value
from pyro_bpq.critics.nets import TabularCritic
from pyro_bpq.graph.bitsets import highest, ones
from pyro_bpq.graph.network import BackpropQNetwork, QNode
from pyro_bpq.graph.relations import Crossings, Relations, after
from pyro_bpq.graph.scg import Plate, StochasticComputationGraph
from pyro_bpq.rollout.features import Components
from pyro_bpq.rollout.sums import Sums, subset_sums

# Number of critic inputs that encode the index of a site in a family with a shared critic.
INDEX_FEATURES = 2


class Layout:
    """The classes of sites and of costs in a graph, and the matrices between them; computed once per structure.

    Args:
        graph: The graph.
        network: Its Backprop-Q network.
        specs: Spec of every stochastic node.
        tabled: For each site, its immediate costs that are known at every value.
        window: Number of most recent scope members per class that a critic sees as separate features; it sees the rest
            as one sum. Critics that look up joint states see all members.
        cuts_plates: Whether a plate row of one site affects only the same row of other sites. This is never assumed for
            sites and costs that are reached through a node outside of the plate.
        is_steered: Whether sampled values may steer the program. Then only values sampled before a site may determine
            which critics exist, their inputs, and which critics correct the site.
        charged: For each site, the costs that are charged to its single components. The sums here omit them.
        crossings: The costs that are known given another particle's past, if an estimator asks for them.
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
        crossings: Crossings | None = None,
    ) -> None:
        self.is_steered = is_steered
        self.graph, self.network, self.specs, self.window = graph, network, specs, window
        self.tabled, self.charged = tabled, charged or {}
        self.crossings = crossings
        self.relations = Relations(graph, tabled, self.charged, cuts_plates, is_steered)
        by_spec: dict[SiteSpec, list[str]] = {}
        for node in graph.nodes:
            by_spec.setdefault(specs[node.name], []).append(node.name)
        self.classes = tuple(SiteClass(spec, tuple(names)) for spec, names in by_spec.items())
        by_plates: dict[tuple[Plate, ...], list[str]] = {}
        for cost in graph.costs:
            by_plates.setdefault(cost.plates, []).append(cost.name)
        self.cost_classes = tuple(CostClass(plates, tuple(names)) for plates, names in by_plates.items())
        self.place = {n: (c, i) for c, cls in enumerate(self.classes) for i, n in enumerate(cls.names)}
        self._positions = tuple(tuple(graph.index[name] for name in cls.names) for cls in self.classes)
        self._masks = tuple(sum(1 << i for i in positions) for positions in self._positions)
        self._sums: dict[tuple[Any, ...], Sums | None] = {}
        self._split: dict[int, bool] = {}
        # What steps work out once, and keep here: the network's rules as matrices.
        self.rules: dict[tuple[torch.dtype, torch.device], Any] = {}

    def __repr__(self) -> str:
        return f"Layout({len(self.graph.nodes)} sites in {len(self.classes)} classes)"

    def matrix(self, kind: Relation, row: int, column: int, like: Tensor) -> Sums | None:
        """The matrix of a relation between class ``row`` of sites and another class; ``None`` if it is zero.

        ``column`` is the position of a class of costs or sites, of a group of costs (``CROSSED``) or of Q-nodes
        (``LATER_LEARNED``). ``like`` gives dtype and device.
        """
        key = (kind, row, column, like.dtype, like.device)
        if key not in self._sums:
            sets, columns = self._sets(kind, column)
            self._sums[key] = subset_sums([sets[i] for i in self._positions[row]], columns, like)
        return self._sums[key]

    def _sets(self, kind: Relation, column: int) -> tuple[Sequence[int], Sequence[int]]:
        """The set related to each site, as bits, and the bit of each member of ``column``."""
        relations = self.relations
        if kind is Relation.LATER_LEARNED:
            nodes = self.groups[column].nodes
            return relations.counted_nodes(nodes), range(len(nodes))
        if kind in (Relation.LATER_OWN, Relation.LATER_MODEL):
            part = int(kind is Relation.LATER_MODEL)
            return relations.counted([costs[part] for costs in relations.tabled_parts]), self._positions[column]
        if kind is Relation.CROSSED:
            assert self.crossings is not None
            own = [self.graph.cost_index[cost] for cost in self.crossed[column].sites]
            size, (by_law, by_value, _) = len(self.graph.costs), self.crossings
            known = zip(by_law, by_value, relations.downstream, strict=True)
            sets = [law & rows | (value & rows) << size for law, value, rows in known]
            return sets, [*own, *(size + i for i in own)]
        if kind is Relation.LATER:
            return relations.later, self._positions[column]
        costs = [self.graph.cost_index[cost] for cost in self.cost_classes[column].names]
        return getattr(relations, kind.value), costs

    @cached_property
    def crossed(self) -> tuple[CrossedCosts, ...]:
        """The costs that are known given another past, by class of costs and finite components."""
        if self.crossings is None:
            return ()
        found: dict[tuple[int, Components], dict[int, tuple[str, tuple[str, bool]]]] = {}
        used = set(self.graph.cost_names(self.crossings.used))
        of_guide = set(self.graph.cost_names(self.crossings.of_guide))
        for k, cls in enumerate(self.cost_classes):
            for i, name in enumerate(cls.names):
                site = self.graph.cost(name).site
                components = self.specs[site].components if name in used and site is not None else None
                if components is not None:
                    found.setdefault((k, components), {})[i] = (name, (site or "", name in of_guide))
        return tuple(
            CrossedCosts(self.cost_classes[k], k, components, tuple(costs), dict(costs.values()))
            for (k, components), costs in found.items()
        )

    def rows_meet(self, name: str) -> bool:
        """Whether a cost downstream of a site may depend on several rows of the site's plates."""
        return self.relations.crossed(name) != 0 or self.graph.leaves_plates(name)

    def is_split(self, column: int) -> bool:
        """Whether the control variate of a class is split into tabled costs and Q-nodes.

        That is the case if the costs downstream of an earlier site contain some, but not all, of its costs.
        """
        if column not in self._split:
            self._split[column] = not self.is_steered and self._parts_serve_more(column)
        return self._split[column]

    def _parts_serve_more(self, column: int) -> bool:
        later, mask = self.relations.later, self._masks[column]
        # Sites of the class, later than each site, whose whole control variate does not count.
        left = [after(i, mask & ~whole) for i, whole in enumerate(later)]
        if not any(left):
            return False
        for kind in (Relation.LATER_OWN, Relation.LATER_MODEL):
            if any(part & rest for part, rest in zip(self._sets(kind, column)[0], left, strict=True)):
                return True
        for g, group in enumerate(self.groups):
            if group.c == column:
                sites = [self._positions[column][i] for i in group.sites]
                parts, _ = self._sets(Relation.LATER_LEARNED, g)
                if any(rest >> sites[k] & 1 for part, rest in zip(parts, left, strict=True) for k in ones(part)):
                    return True
        return False

    def distance(self, row: int, column: int, like: Tensor) -> Tensor:
        """Number of steps from a site to a later one: the difference of their :attr:`depth`, at least 1."""
        depth = [self.depth[name] for name in self.classes[row].names]
        later = [self.depth[name] for name in self.classes[column].names]
        steps = np.maximum(np.subtract.outer(later, depth).T, 1)
        return torch.as_tensor(steps, dtype=like.dtype).to(like.device)

    @cached_property
    def depth(self) -> dict[str, int]:
        """Number of steps on the longest way from a root to each stochastic node."""
        depth = [0] * len(self.graph.nodes)
        for i in range(len(depth)):
            for j in ones(self.graph.child_bits[i]):
                depth[j] = max(depth[j], depth[i] + 1)
        return {node.name: d for node, d in zip(self.graph.nodes, depth, strict=True)}

    @cached_property
    def groups(self) -> tuple[QGroup, ...]:
        """The Q-nodes that critics predict, grouped for evaluation."""
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
        """A key of the shape of the critic's inputs; empty if not steered, where other Q-nodes may affect the shape."""
        if not self.is_steered:
            return ()
        is_shared = self.specs[node.site].share is not None
        others = self._others(node)
        members = sorted((others & mask & -(others & mask), c) for c, mask in enumerate(self._masks) if others & mask)
        # A shared critic sees windows of equal size at all its sites.
        full = self._window(node.site) + 1
        counts = [min((others & self._masks[c]).bit_count(), full) for _, c in members]
        return tuple((c, full if is_shared else count) for (_, c), count in zip(members, counts, strict=True))

    def _window(self, site: str) -> int:
        """The largest number of members of a class that the site's critic sees as separate features."""
        critic, is_shared = self.specs[site].critic, self.specs[site].share is not None
        # A shared critic needs inputs of one size, however long the scope is.
        is_table = critic is not None and critic.uses_cells and not (is_shared and self.is_steered)
        return max(len(self.graph.nodes), 1) if is_table else self.window

    def members(self, node: QNode) -> tuple[tuple[str, ...], int]:
        """The scope members that a Q-node's critic sees as separate features, and how many more it sees as a sum."""
        others, window, seen, summed = self._others(node), self._window(node.site), [], 0
        for mask in self._masks:
            found = others & mask
            seen += highest(found, window)
            summed += max(found.bit_count() - window, 0)
        return tuple(self.graph.nodes[i].name for i in sorted(seen)), summed

    def _others(self, node: QNode) -> int:
        """The scope of a Q-node without the Q-node's site, as bits."""
        return self.graph.bits_of(node.scope) & ~(1 << self.graph.index[node.site])

    def membership(self, group: QGroup, like: Tensor) -> Sums | None:
        """The 0-1 matrix (sites × Q-nodes) of a group's class; ``None`` if it is the identity."""
        sites, size = group.sites, len(self.classes[group.c].names)
        if sites == tuple(range(size)):
            return None
        key = (group.c, sites, like.dtype, like.device)
        if key not in self._sums:
            own = [0] * size
            for k, i in enumerate(sites):
                own[i] |= 1 << k
            self._sums[key] = subset_sums(own, range(len(sites)), like)
        return self._sums[key]

    def _context_plans(self, nodes: Sequence[QNode]) -> tuple[ContextPlan, ...]:
        scopes, size = [self._others(node) for node in nodes], self._window(nodes[0].site)
        is_full = self.is_steered and self.specs[nodes[0].site].share is not None
        plans = []
        for c, (mask, positions) in enumerate(zip(self._masks, self._positions, strict=True)):
            found = [scope & mask for scope in scopes]
            if not any(found):
                continue
            place = {position: i for i, position in enumerate(positions)}
            longest = size + 1 if is_full else max(members.bit_count() for members in found)
            window = np.full((len(nodes), min(size, longest)), len(positions))
            for q, members in enumerate(found):
                latest = [place[i] for i in highest(members, window.shape[1])]
                window[q, : len(latest)] = latest
            rest = tuple(found) if longest > window.shape[1] else None
            plans.append(ContextPlan(c, window, positions, rest))
        return tuple(plans)

    @cached_property
    def rule_order(self) -> dict[str, int]:
        """Position of each Q-node of the network in program order."""
        assert self.network is not None
        return {node.name: i for i, node in enumerate(reversed(self.network.nodes))}

    def num_features(self, group: QGroup) -> int:
        """Number of context features of the critics of a group."""
        cls = self.classes[group.c]
        total = sum(plan.slots * self.classes[plan.source].width for plan in group.contexts)
        if cls.spec.has_params:
            total += cls.width * (2 * cls.spec.has_moments if cls.spec.components is None else 1)
        return total + cls.spec.context + (0 if cls.spec.share is None else INDEX_FEATURES)

    def cells(self, group: QGroup) -> int:
        """Number of joint states of the scope without the site; 0 if they are infinite or too many."""
        total = 1
        for plan in group.contexts:
            components = self.classes[plan.source].spec.components
            if components is None or plan.rest is not None:
                return 0
            total *= components.cardinality ** (components.size * plan.window.shape[1])
            if total > 1 << 30:
                return 0
        return total


def described(layout: Layout) -> BackpropQNetwork | None:
    """The network of a layout with a text for each learned Q-node, see :attr:`BackpropQNetwork.reads`."""
    network = layout.network
    if network is None:
        return None
    return replace(network, reads=tuple((node.name, _reads(layout, node)) for node in network.learned))


def _reads(layout: Layout, node: QNode) -> str:
    """What the critic of a Q-node reads."""
    spec = layout.specs[node.site]
    critic = spec.critic
    if critic is None:
        return "no critic"
    parts = []
    if spec.components is not None:
        parts.append(f"{node.site}'s value")
    elif reads_value(critic):
        parts.append(f"{node.site}'s value as it is")
    elif spec.has_moments:
        parts.append(f"{node.site}'s value by its first two powers")
    seen, summed = layout.members(node)
    if seen and not summed:
        parts.append(f"all {len(seen)} others" if len(seen) > 4 else ", ".join(seen))
    elif seen:
        parts.append(f"{', '.join(seen)}, the sum of {summed} more")
    if isinstance(critic, TabularCritic):
        return f"table of {'; '.join(parts) or 'one number'}"
    if spec.has_params and (spec.components is not None or spec.has_moments):
        parts.append(f"{node.site}'s distribution")
    if spec.context:
        parts.append(f"{spec.context} feature{'s' if spec.context > 1 else ''} of context")
    if spec.share is not None:
        parts.append("the number in its name")
    return "; ".join(parts) or "nothing: it is one number"
