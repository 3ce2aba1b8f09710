r"""Batches the sites of a graph: classes of like-shaped sites, matrices between them, and what critics read.

Two matrices of zeros and ones say what is left of a site's cost-to-go; they sum stacked tensors, class by class:

    R_X = Σ_f counted[X, f] f - I_X(x) - Q_X(x) - Σ_A predicted[X, A] A
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from pyro_bpq.critics.nets import CriticShape
from pyro_bpq.graph.bitsets import highest
from pyro_bpq.graph.network import BackpropQNetwork, QNode
from pyro_bpq.graph.relations import Crossings, crossed, later_within
from pyro_bpq.graph.scg import Plate, StochasticComputationGraph
from pyro_bpq.rollout.features import Components
from pyro_bpq.rollout.runs import Rollout, Run, sum_to_plates
from pyro_bpq.rollout.sums import Sums, in_single, subset_sums
from pyro_bpq.step.classes import Constants, ContextPlan, CrossedCosts, Known, QGroup, SiteClass, SiteSpec

T = TypeVar("T")
# Number of critic inputs that encode the index of a site in a family with a shared critic.
INDEX_FEATURES = 2
# Immediate costs of a site that are known by one table: its own log-probabilities, and others of the model.
TABLES = frozenset({Known.LOG_Q, Known.LOG_P}), frozenset({Known.MODEL})


class Columns(NamedTuple):
    """Tensors with the same plates, which are stacked."""

    plates: tuple[Plate, ...]
    bits: Sequence[int]  # the bit of each tensor in a set of tensors
    names: tuple[str, ...] = ()  # the names of costs
    over_rows: bool = False  # whether a site gets the sum over all rows of its plates


@dataclass(frozen=True, eq=False)
class Matrix(Constants):
    """For each site a set of tensors; the matrices from classes of tensors to classes of sites are made once."""

    classes: Sequence[SiteClass]
    sets: Sequence[int]  # the tensors that are summed for each site, in program order, as bits
    columns: Sequence[Columns]

    def block(self, c: int, k: int, like: Tensor) -> Sums | None:
        """The matrix from the ``k``-th columns to the sites of class ``c``; ``None`` if it is zero."""

        def made() -> Sums | None:
            return subset_sums([self.sets[i] for i in self.classes[c].positions], self.columns[k].bits, like)

        return self.made((c, k), like, made)

    def sums(self, c: int, stacked: Sequence[Tensor | None], shape: tuple[int, ...]) -> Tensor | None:
        """The sum for each site of class ``c``, of shape ``(G, M, plates)``; ``None`` if it is empty.

        There is one tensor ``(columns, M, plates)`` for each of the columns, or ``None`` for zeros.
        """
        terms = []
        for k, (columns, tensor) in enumerate(zip(self.columns, stacked, strict=True)):
            block = None if tensor is None else self.block(c, k, tensor)
            if tensor is not None and block is not None:
                kept = () if columns.over_rows else self.classes[c].spec.plates
                terms.append(block @ sum_to_plates(tensor, columns.plates, kept))
        return sum(terms[1:], terms[0]).expand(shape) if terms else None


@dataclass(frozen=True)
class Variates:
    """Parts of the control variates ``A_Y`` of a class of sites: of known costs, or of what critics predict."""

    c: int  # Position of the class
    sites: Sequence[int]  # Positions in the class
    costs: Sequence[int]  # The costs that each part stands for, as bits
    table: frozenset[Known] = frozenset()  # The known costs; empty if critics predict them
    group: int = -1  # Position of the group of Q-nodes; -1 if the costs are known


class Layout(Constants):
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
        super().__init__()
        self.is_steered, self.cuts_plates = is_steered, cuts_plates
        self.graph, self.network, self.specs, self.window = graph, network, specs, window
        self.tabled, self.charged, self.crossings = tabled, charged or {}, crossings
        costs = {cost.name: cost.plates for cost in graph.costs}
        self.classes = tuple(SiteClass(*own) for own in _alike({name: specs[name] for name in graph.names}))
        self.cost_classes = tuple(Columns(plates, at, names) for plates, names, at in _alike(costs))
        self.place = {n: (c, i) for c, cls in enumerate(self.classes) for i, n in enumerate(cls.names)}
        self._masks = tuple(sum(1 << i for i in cls.positions) for cls in self.classes)
        # The costs that one row of a site may affect in other rows.
        self._crossing = crossed(graph, cuts_plates)

    def __repr__(self) -> str:
        return f"Layout({len(self.graph.nodes)} sites in {len(self.classes)} classes)"

    @cached_property
    def counted(self) -> Matrix:
        """From all costs, row by row and then summed over rows, to the sites that they are downstream of."""
        size = len(self.graph.costs)
        over_rows = [Columns(cls.plates, [size + k for k in cls.bits], over_rows=True) for cls in self.cost_classes]
        sets = [near | far << size for near, far in self._downstream]
        return Matrix(self.classes, sets, [*self.cost_classes, *over_rows])

    @cached_property
    def predicted(self) -> Matrix:
        """From all :attr:`variates` to the earlier sites that their costs are downstream of."""
        parts, columns = list[tuple[int, int]](), list[Columns]()
        for own in self.variates:
            cls, start = self.classes[own.c], len(parts)
            parts += [(cls.positions[i], costs) for i, costs in zip(own.sites, own.costs, strict=True)]
            columns.append(Columns(cls.spec.plates, range(start, len(parts))))
        return Matrix(self.classes, later_within(self.graph, parts, self.is_steered), columns)

    @cached_property
    def crossed(self) -> Matrix:
        """From :attr:`crossed_costs`, under the own law and at the own value, to the sites that they are known for."""
        assert self.crossings is not None
        size, index, columns = len(self.graph.costs), self.graph.cost_index, []
        for group in self.crossed_costs:
            own = [index[cost] for cost in group.costs]
            columns.append(Columns(group.plates, [*own, *(size + k for k in own)]))
        known = zip(self.crossings.own_law, self.crossings.own_value, self._downstream, strict=True)
        return Matrix(self.classes, [law & near | (value & near) << size for law, value, (near, _) in known], columns)

    @cached_property
    def _downstream(self) -> list[tuple[int, int]]:
        """The costs downstream of each site, without charged ones, as bits: in its own row, and through other rows."""
        graph = self.graph
        left = [~graph.cost_bits_of(self.charged.get(name, ())) for name in graph.names]
        rows = zip(graph.downstream_bits, self._crossing, left, strict=True)
        return [(bits & ~far & own, far & own) for bits, far, own in rows]

    def _tabled(self, name: str) -> tuple[int, int]:
        """The costs, as bits, that are known at every value of a site: its own log-probabilities, and others."""
        graph, costs = self.graph, self.tabled.get(name, ())
        own = graph.cost_bits_of(cost for cost in costs if graph.cost(cost).site == name)
        return own, graph.cost_bits_of(costs) & ~own

    @cached_property
    def variates(self) -> tuple[Variates, ...]:
        """The parts of the control variates of all classes of sites."""
        graph, found = self.graph, []
        for c, cls in enumerate(self.classes):
            for kinds, costs in zip(TABLES, zip(*map(self._tabled, cls.names), strict=True), strict=True):
                if table := kinds & cls.spec.tabled:
                    found.append(Variates(c, range(len(costs)), costs, table))
        for g, group in enumerate(self.groups):
            remote = [graph.cost_bits_of(node.sources) & ~graph.cost_bits_of(node.immediate) for node in group.nodes]
            found.append(Variates(group.c, group.sites, remote, group=g))
        return tuple(found)

    @cached_property
    def crossed_costs(self) -> tuple[CrossedCosts, ...]:
        """The costs that are known given another past, by class of costs and finite components of their sites."""
        found: dict[tuple[int, Components], dict[str, int]] = {}
        used = set(self.graph.cost_names(self.crossings.used)) if self.crossings else set[str]()
        for k, cls in enumerate(self.cost_classes):
            for i, cost in enumerate(map(self.graph.cost, cls.names)):
                components = self.specs[cost.site].components if cost.site and cost.name in used else None
                if components is not None:
                    found.setdefault((k, components), {})[cost.name] = i
        return tuple(
            CrossedCosts(k, self.cost_classes[k].plates, own, {n: self.graph.cost(n) for n in at}, tuple(at.values()))
            for (k, own), at in found.items()
        )

    def stack_costs(self, rollout: Rollout) -> list[Tensor]:
        """Stacks the costs of a rollout per class of costs, ``(costs, M, plates)`` each, detached.

        They are in nats, and in single precision at least: their squares overflow in half precision.
        """

        def pick(run: Run, name: str) -> Tensor:
            return in_single(run.costs[name].detach())

        return [rollout.stack(pick, cls.names, cls.plates) for cls in self.cost_classes]

    def cost_to_go(self, costs: Sequence[Tensor], c: int, zeros: Tensor) -> Tensor:
        """The cost-to-go ``C_X`` of every site of a class, from zeros of its shape, ``(G, M, plates)``, in nats."""
        total = self.counted.sums(c, (*costs, *costs), zeros.shape)
        return zeros if total is None else zeros + total

    def component_cost_to_go(self, rollout: Rollout, c: int, joint: Tensor) -> Tensor:
        """The cost-to-go of each component, ``(G, M, plates, D)``, in nats.

        It is the part ``joint``, ``(G, M, plates)``, that all components of a site share, and the costs that the sites
        of the rollout charge to single components.
        """

        def charged(run: Run, name: str) -> Any:
            return run.sites[name].charged

        cls = self.classes[c]
        return joint.unsqueeze(-1) + rollout.stack(charged, cls.names, cls.spec.plates, 1)

    def rows_meet(self, name: str) -> bool:
        """Whether a cost downstream of a site may depend on several rows of the site's plates."""
        return self.rows_mix(name) or self.graph.leaves_plates(name)

    def rows_mix(self, name: str) -> bool:
        """Whether a row of a cost downstream of a site may depend on other rows of the site's plates."""
        return self._crossing[self.graph.index[name]] != 0

    @cached_property
    def groups(self) -> tuple[QGroup, ...]:
        """The Q-nodes that critics predict, grouped for evaluation."""
        found: dict[tuple[Any, ...], list[QNode]] = {}
        for node in reversed(self.network.nodes if self.network is not None else ()):
            c, _ = self.place[node.site]
            if self.classes[c].spec.critic is not None and (node.is_learned or self.is_steered):
                found.setdefault((c, *self._signature(node)), []).append(node)
        return tuple(self._group(c, nodes) for (c, *_), nodes in sorted(found.items(), key=lambda pair: pair[0][0]))

    def _group(self, c: int, nodes: list[QNode]) -> QGroup:
        nodes = sorted(nodes, key=lambda n: self.place[n.site][1])
        sites = tuple(self.place[node.site][1] for node in nodes)
        spec, contexts = self.classes[c].spec, self._context_plans(nodes)
        assert spec.critic is not None
        members = tuple((plan.slots, self.classes[plan.source].width) for plan in contexts)
        features = sum(slots * width for slots, width in members) + spec.context
        if spec.has_params:
            features += self.classes[c].width * (2 * spec.has_moments if spec.components is None else 1)
        features += 0 if spec.share is None else INDEX_FEATURES
        cells = self._cells(contexts) if spec.critic.uses_cells else 0
        shape = CriticShape(len(nodes), features, *spec.parts, cells, spec.context, members)
        return QGroup(c, tuple(nodes), sites, len(self.classes[c].names), contexts, spec.critic, shape, spec.share)

    def _cells(self, contexts: Sequence[ContextPlan]) -> int:
        """Number of joint states of the members of a scope; 0 if they are infinite or too many."""
        total = 1
        for plan in contexts:
            components = self.classes[plan.source].spec.components
            if components is None or plan.rest is not None:
                return 0
            total *= components.cardinality ** (components.size * plan.window.shape[1])
        return total if total <= 1 << 30 else 0

    def _signature(self, node: QNode) -> tuple[Any, ...]:
        """A key of the shape of the critic's inputs; empty if not steered, where other Q-nodes may affect the shape."""
        plans = self._context_plans([node]) if self.is_steered else ()
        return tuple((plan.source, plan.window.shape, plan.rest is None) for plan in plans)

    def _window(self, site: str) -> int:
        """The largest number of members of a class that the site's critic sees as separate features."""
        critic, is_shared = self.specs[site].critic, self.specs[site].share is not None
        # A shared critic needs inputs of one size, however long the scope is.
        is_table = critic is not None and critic.uses_cells and not (is_shared and self.is_steered)
        return max(len(self.graph.nodes), 1) if is_table else self.window

    def members(self, node: QNode) -> tuple[tuple[str, ...], int]:
        """The scope members that a Q-node's critic sees as separate features, and how many more it sees as a sum."""
        seen, summed = list[int](), 0
        for plan in self._context_plans([node]):
            found = [plan.columns[i] for i in plan.window[0] if i < len(plan.columns)]
            seen, summed = seen + found, summed + (plan.rest[0].bit_count() - len(found) if plan.rest else 0)
        return tuple(self.graph.nodes[i].name for i in sorted(seen)), summed

    def _context_plans(self, nodes: Sequence[QNode]) -> tuple[ContextPlan, ...]:
        graph, size = self.graph, self._window(nodes[0].site)
        # The scopes without the sites of the Q-nodes.
        scopes = [graph.bits_of(node.scope) & ~(1 << graph.index[node.site]) for node in nodes]
        is_full = self.is_steered and self.specs[nodes[0].site].share is not None
        plans = []
        for c, (mask, cls) in enumerate(zip(self._masks, self.classes, strict=True)):
            found = [scope & mask for scope in scopes]
            if not any(found):
                continue
            longest = size + 1 if is_full else max(members.bit_count() for members in found)
            window = np.full((len(nodes), min(size, longest)), len(cls.names))
            for q, members in enumerate(found):
                latest = [self.place[graph.names[i]][1] for i in highest(members, window.shape[1])]
                window[q, : len(latest)] = latest
            rest = tuple(found) if longest > window.shape[1] else None
            plans.append(ContextPlan(c, window, cls.positions, rest))
        return tuple(plans)


def _alike(keys: Mapping[str, T]) -> list[tuple[T, tuple[str, ...], tuple[int, ...]]]:
    """Names with equal keys together, and their positions."""
    found: dict[T, dict[str, int]] = {}
    for position, (name, key) in enumerate(keys.items()):
        found.setdefault(key, {})[name] = position
    return [(key, tuple(own), tuple(own.values())) for key, own in found.items()]
