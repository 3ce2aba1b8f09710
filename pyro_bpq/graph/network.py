r"""The Backprop-Q network of a graph: Q-nodes, their scopes and their update rules, no tensors.

The Q-function of a stochastic node ``X`` predicts the sum of some costs, its *sources*. Every child ``Y`` of ``X`` on a
way to a cost gives an equivalent rule for it:

    Q_X(Sc_X) = E[Σ_f Q_X^f | Sc_X],      Q_X^f = avg_Y Q_Y^f,      Q_f = f at the roots.

A rule sums over costs and averages over equivalent children, so each source counts once. With ``Q_X = immediate (exact)
+ remote (learned)`` the rule covers the remote sources only. A child enters a rule with both parts.

References:
    | Backprop-Q (Xu et al., 2018), Sec. 3
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from textwrap import wrap
from typing import Literal, get_args

from pyro_bpq.errors import GraphError, OptionError, SiteNotFoundError, check_choice
from pyro_bpq.graph.bitsets import ones, union
from pyro_bpq.graph.reductions import Reduced, levels_below, reduce_graph, split
from pyro_bpq.graph.scg import Form, Plate, StochasticComputationGraph
from pyro_bpq.short import aligned, alike


@dataclass(frozen=True, slots=True)
class Average:
    """One summand of an update rule: the average over equivalent children."""

    children: tuple[str, ...]  # names of Q-nodes, or of costs (the roots)
    levels: tuple[int, ...] = ()  # by how many levels each child is discounted; empty if it is one for all of them


@dataclass(frozen=True, slots=True)
class QNode:
    """A Q-function at a stochastic node: ``Q = immediate (exact) + remote (learned)``."""

    name: str  # unique name in the network: the site's name if the site has one Q-node, else site and sources
    site: str  # name of its stochastic node
    scope: Sequence[str]  # variables that the learned part sees, in program order; empty if nothing is learned
    sources: Sequence[str]  # costs whose expected sum the Q-function predicts
    immediate: Sequence[str]  # the sources that are used exactly and never learned
    rule: tuple[Average, ...]  # the target of its learned part: a sum of averages over children

    @property
    def is_learned(self) -> bool:
        """Whether anything is left to learn besides the immediate costs."""
        return bool(self.rule)

    @property
    def remote(self) -> tuple[str, ...]:
        """The sources that the learned part predicts."""
        immediate = set(self.immediate)
        return tuple(cost for cost in self.sources if cost not in immediate)


# Widest cell of the printed table, in characters.
_WIDEST = 32

Reduction = Literal["per_cost", "merged", "tree", "chain", "single"]
Immediate = Literal["exact", "learned"] | frozenset[str]


@dataclass(frozen=True, repr=False)
class BackpropQNetwork:
    """Q-nodes in the order of a backward pass: a frozen, hashable value without tensors.

    Args:
        graph: The stochastic computation graph.
        nodes: Q-nodes, children before those whose rules read them.
        reduction: How the networks of the costs were reduced, see :meth:`build`.
        form: The set that a Q-function conditions on: its site and the ancestors, or all sites sampled so far.
        immediate: The immediate costs that are used exactly: all, none, or the named ones.
        discounted: Whether it was built for a discount below 1.
        reads: For learned Q-nodes what their critics really read of the scope and besides, in words; empty if the
            network is not that of a step. Two networks that differ in this alone are equal.

    Example:
        >>> graph = StochasticComputationGraph.from_parents(
        ...     {"x": [], "y": ["x"], "z": ["x"]}, {"f1": ["y"], "f2": ["y", "z"]}
        ... )
        >>> BackpropQNetwork.build(graph, "merged", immediate="learned")
        Q-node  scope  immediate  rule
        z       x, z              f2
        y^f1    y                 f1
        y^f2    x, y              f2
        x       x                 Q_y^f1 + (Q_y^f2 + Q_z)/2
    """

    graph: StochasticComputationGraph
    nodes: tuple[QNode, ...]
    reduction: Reduction = "chain"
    form: Form = "ancestor"
    immediate: Immediate = "exact"
    discounted: bool = False
    reads: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @classmethod
    def build(
        cls,
        graph: StochasticComputationGraph,
        reduction: Reduction = "chain",
        *,
        immediate: Immediate = "exact",
        form: Form = "ancestor",
        discounted: bool = False,
    ) -> BackpropQNetwork:
        """Derives Q-nodes, scopes and update rules.

        Reductions, from the networks that the paper starts with to the one that is cheapest to learn:

        - ``"per_cost"``: a network per cost. Every equivalent child is kept and averaged.
        - ``"merged"``: these networks, with Q-functions summed where the merging theorem allows it.
        - ``"tree"``: a spanning tree of shortest paths per cost, then merging.
        - ``"chain"``: for each cost, the first child in program order on a way to it, then merging.
        - ``"single"``: all costs summed into one. Each stochastic node has one Q-node, with the longest scopes. It
          leaves out the costs that are known before its site is sampled: they are the same for all its values.

        Args:
            graph: The stochastic computation graph.
            reduction: See above.
            immediate: ``"exact"`` uses all immediate costs exactly. ``"learned"`` is the paper's form: the costs that
                read a node stand in its rule as roots. A set of names uses these costs exactly, and learns the others.
            form: ``"ancestor"``, the paper's, or ``"history"``.
            discounted: Whether targets may have a discount below 1. A cost is then discounted once for each edge of
                the longest way to it. Costs are merged only where that is the same for both.

        Returns:
            The network. A stochastic node without a downstream cost has no Q-node.

        Raises:
            OptionError: If an option has an unknown name, or the reduction is ``"single"`` and discounted.
            SiteNotFoundError: If ``immediate`` names an unknown cost.
            GraphError: If a Q-node would have the name of another one or of a cost.

        References:
            | Backprop-Q (Xu et al., 2018), Sec. 3.2, Theorem 3
        """
        check_choice("reduction", reduction, get_args(Reduction))
        check_choice("form", form, get_args(Form))
        check_discounted(reduction, discounted)
        reduced = reduce_graph(graph, reduction, _exact_costs(graph, immediate), form, discounted)
        return cls(graph, _Assembly(graph, reduced, form).nodes(), reduction, form, immediate, discounted)

    def q_node(self, name: str) -> QNode:
        """The Q-node called ``name``."""
        if name not in self._by_name:
            raise SiteNotFoundError(f"There is no Q-node {name!r}; the Q-nodes are {list(self._by_name)}.")
        return self._by_name[name]

    def q_nodes(self, site: str) -> tuple[QNode, ...]:
        """The Q-nodes at a stochastic node; their sources are disjoint and cover the downstream costs."""
        return tuple(self._by_site.get(self.graph.node(site).name, ()))

    def children(self, name: str) -> tuple[str, ...]:
        """The Q-nodes and costs that the rule of Q-node ``name`` reads, each once."""
        averages = self.q_node(name).rule
        return tuple(dict.fromkeys(child for average in averages for child in average.children))

    @cached_property
    def learned(self) -> tuple[QNode, ...]:
        """The Q-nodes with a learned part, in backward order."""
        return tuple(node for node in self.nodes if node.is_learned)

    @cached_property
    def can_discount(self) -> bool:
        """Whether its rules may be used with a discount below 1: it was built for that, or would be the same."""
        if self.discounted or self.reduction == "single":
            return self.discounted
        immediate, form = self.immediate, self.form
        twin = BackpropQNetwork.build(self.graph, self.reduction, immediate=immediate, form=form, discounted=True)
        return twin.nodes == self.nodes

    @cached_property
    def skips_levels(self) -> bool:
        """Whether an edge of the network is discounted more than once."""
        return any(average.levels for node in self.nodes for average in node.rule)

    @cached_property
    def plates(self) -> dict[str, tuple[Plate, ...]]:
        """Plates of each cost and Q-node."""
        plates = {cost.name: cost.plates for cost in self.graph.costs}
        return plates | {node.name: self.graph.node(node.site).plates for node in self.nodes}

    @cached_property
    def _by_name(self) -> dict[str, QNode]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _by_site(self) -> dict[str, list[QNode]]:
        return alike((node, node.site) for node in self.nodes)

    def rule_text(self, node: QNode) -> str:
        """The rule of a Q-node as a formula, ``Q_y^f1 + (Q_y^f2 + Q_z^f2)/2``."""
        texts = []
        for average in node.rule:
            terms = [f"Q_{child}" if child in self._by_name else child for child in average.children]
            texts.append(terms[0] if len(terms) == 1 else f"({' + '.join(terms)})/{len(terms)}")
        return " + ".join(texts)

    def __bool__(self) -> bool:
        """Whether any site has a Q-node."""
        return bool(self.nodes)

    def __repr__(self) -> str:
        if not self.nodes:
            return "There is no Backprop-Q network: no site has a critic. print(elbo.plan) says what serves each site."
        reads, rows = dict(self.reads), [["Q-node", "scope", "immediate", "rule", "critic reads"]]
        for node in self.nodes:
            cells = [node.name, ", ".join(node.scope), ", ".join(node.immediate), self.rule_text(node)]
            rows.append([*cells, reads.get(node.name, "")])
        rows = rows if reads else [row[:-1] for row in rows]
        lines = [line for row in rows for line in zip_longest(*map(_wrapped, row), fillvalue="")]
        return "\n".join(aligned(lines))


@dataclass
class _Assembly:
    """Makes Q-nodes from kept children and merged costs, from the last site to the first."""

    graph: StochasticComputationGraph
    reduced: Reduced
    form: Form
    # The position of a site and the lowest bit of the sources identify a Q-node.
    names: defaultdict[int, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    known: defaultdict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    scopes: dict[int, Sequence[str]] = field(default_factory=dict)

    def nodes(self) -> tuple[QNode, ...]:
        nodes = [node for i in reversed(range(len(self.graph.nodes))) for node in self._site(i)]
        taken = {cost.name for cost in self.graph.costs}
        for node in nodes:
            if node.name in taken:
                raise GraphError(f"Two Q-nodes or costs are called {node.name!r}; rename site {node.site!r}.")
            taken.add(node.name)
        return tuple(nodes)

    def _site(self, i: int) -> list[QNode]:
        blocks = self.reduced.blocks[i]
        rules: dict[int, list[tuple[int, Average]]] = {block: [] for block in blocks}
        reads = dict.fromkeys(blocks, 0)
        for children, costs in self.reduced.edges[i]:
            for block, part in split(costs, blocks):
                rules[block] += self._averages(i, children, part)
                reads[block] |= self._reads(children, part)
        return [self._q_node(i, block, rules[block], reads[block]) for block in blocks]

    def _q_node(self, i: int, block: int, rule: list[tuple[int, Average]], reads: int) -> QNode:
        graph, immediate = self.graph, block & self.reduced.immediate[i]
        site, sources = graph.nodes[i].name, graph.cost_names(block)
        scope = graph.frontier_bits(graph.known_bits(i, self.form), reads)
        if scope not in self.scopes:
            self.scopes[scope] = graph.node_names(scope)
        # The sources of a site's Q-nodes are disjoint, so the first ones identify a Q-node.
        shown = sources if len(sources) <= 3 else (*sources[:2], f"+{len(sources) - 2}")
        name = site if len(self.reduced.blocks[i]) == 1 else f"{site}^{','.join(shown)}"
        low = _low(block)
        self.names[i][low] = name
        # The scope of a parent is computed from the variables that the total of this Q-node reads.
        self.known[i][low] = scope | union(graph.cost_bits, immediate)
        averages = tuple([average for _, average in sorted(rule, key=lambda pair: pair[0])])
        return QNode(name, site, self.scopes[scope], sources, graph.cost_names(immediate), averages)

    def _averages(self, i: int, children: int, costs: int) -> list[tuple[int, Average]]:
        """The averages of a rule for ``costs``: one for each Q-node that a child has for these costs."""
        root = children >> len(self.graph.nodes)
        sites = [*ones(children & (1 << len(self.graph.nodes)) - 1)]
        averages = []
        for _, part in split(costs, self.reduced.blocks[sites[0]]) if sites else [(costs, costs)]:
            low = _low(part)
            names = [self.names[j][low] for j in sites]
            found = Average((*names, *(self.graph.cost_names(part) if root else ())), self._levels(i, children, low))
            averages.append((low, found))
        return averages

    def _levels(self, i: int, children: int, cost: int) -> tuple[int, ...]:
        found = () if self.reduced.levels is None else levels_below(self.reduced.levels, i, children, cost)
        return found if any(level != 1 for level in found) else ()

    def _reads(self, children: int, costs: int) -> int:
        """The variables, as bits, that a child's Q-functions of ``costs`` read."""
        j = _low(children)
        if j == len(self.graph.nodes):
            return union(self.graph.cost_bits, costs)
        bits = 0
        for _, part in split(costs, self.reduced.blocks[j]):
            bits |= self.known[j][_low(part)]
        return bits


def _wrapped(cell: str) -> list[str]:
    return wrap(cell, _WIDEST, break_long_words=False, break_on_hyphens=False) or [""]


def _exact_costs(graph: StochasticComputationGraph, immediate: Immediate) -> int:
    if isinstance(immediate, str):
        check_choice("immediate", immediate, ("exact", "learned"))
        return (1 << len(graph.costs)) - 1 if immediate == "exact" else 0
    return sum(1 << graph.cost_index[graph.cost(name).name] for name in immediate)


def check_discounted(reduction: str, discounted: bool) -> None:
    """Raises an OptionError if the networks of a reduction cannot be discounted."""
    if discounted and reduction == "single":
        raise OptionError(
            "reduction='single' makes one cost of all costs, and gamma discounts each cost by the number of edges to "
            "it. Write gamma=1.0 (discounted=False), or reduction='chain'."
        )


def _low(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def sequence_network(graph: StochasticComputationGraph, immediate: Mapping[str, tuple[str, ...]]) -> BackpropQNetwork:
    r"""The network of a program that values steer: ``Q_t = immediate + Σ_{f last reads X_t} f + Q_{t+1}``.

    What was sampled before a site must determine whether it has a critic, and the critic's inputs. So each Q-function
    conditions on the history, predicts every cost that is not settled yet, and backs up from the next site.
    """
    settled = graph.last_costs
    names = [node.name for node in graph.nodes]
    nodes: list[QNode] = []
    sources = 0
    for t in reversed(range(len(names))):
        name, exact = names[t], immediate.get(names[t], ())
        roots = tuple(cost for cost in settled[name] if cost not in exact)
        averages = tuple(Average((child,)) for child in (*roots, *names[t + 1 : t + 2]))
        sources |= graph.cost_bits_of((*exact, *roots))
        scope = graph.node_names((1 << t + 1) - 1)
        nodes.append(QNode(name, name, scope, graph.cost_names(sources), tuple(exact), averages))
    every = frozenset(cost for exact in immediate.values() for cost in exact)
    return BackpropQNetwork(graph, tuple(nodes), "single", "history", every, discounted=True)
