r"""Reductions: which children an update rule keeps, and which Q-functions of a site are summed.

The Backprop-Q network of a cost ``f`` is the reversed graph with ``f`` as its root. Every child ``Y`` of ``X`` on a way
to ``f`` gives an equivalent rule ``Q_X = E[Q_Y | Sc_X]``. A reduction chooses the rules that are kept. The merging
theorem then sums Q-functions at ``X``: those of costs whose networks agree at every node upstream of ``X``. Rules
follow the edges of the graph in the history form too, so that the plates of a child fit those of its parent.

References:
    | Backprop-Q (Xu et al., 2018), Sec. 3.2 and the appendix on fully connected layers
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pyro_bpq.graph.bitsets import ones, union
from pyro_bpq.graph.scg import Form, StochasticComputationGraph

Edges = list[tuple[int, int]]
Levels = list[dict[int, int]]
Blocks = dict[int, None]  # an ordered set: split() mostly gets a block, and finds it at once


@dataclass(frozen=True)
class Reduced:
    """The result of a reduction, as bits; lists have an entry per stochastic node, in program order."""

    # For each node, pairs: the kept children, and the costs that keep exactly these children. The root, a cost itself,
    # is child number `len(graph.nodes)`. A pair with the root has one cost.
    edges: list[Edges]
    blocks: list[Blocks]  # for each node, the sets of costs that share a Q-function
    immediate: list[int]  # for each node, the immediate costs that are used exactly
    # For each node and cost, the number of edges on the longest way; `None` if nothing is discounted
    levels: Levels | None = None


def reduce_graph(
    graph: StochasticComputationGraph, reduction: str, exact: int, form: Form, discounted: bool
) -> Reduced:
    """Reduces the networks of all costs; ``exact`` are the costs, as bits, that are used exactly where immediate.

    If ``discounted``, costs are merged only where their edges pass the same number of levels.
    """
    immediate = _immediate_bits(graph, exact, form)
    if reduction == "single":
        return _wrap_all(graph, immediate, exact, form)
    remote = [d & ~f for d, f in zip(graph.downstream_bits, immediate, strict=True)]
    keep = {"tree": _shortest_paths, "chain": _first_child}.get(reduction, _every_child)
    edges, levels = keep(graph, remote), None
    if discounted:
        levels = longest_ways(graph)
        edges = [_split_by_levels(levels, i, own) for i, own in enumerate(edges)]
    if reduction == "per_cost":
        singles = [dict.fromkeys(1 << f for f in ones(costs)) for costs in graph.downstream_bits]
        return Reduced(edges, singles, immediate, levels)
    return Reduced(edges, merge(graph, edges), immediate, levels)


def longest_ways(graph: StochasticComputationGraph) -> Levels:
    """For each node and each cost downstream of it, the number of edges on the longest way."""
    levels: Levels = [{} for _ in graph.nodes]
    for i in reversed(range(len(levels))):
        own = dict.fromkeys(ones(graph.cost_child_bits[i]), 1)
        for j in ones(graph.child_bits[i]):
            for f, level in levels[j].items():
                own[f] = max(own.get(f, 0), level + 1)
        levels[i] = own
    return levels


def levels_below(levels: Levels, i: int, children: int, f: int) -> tuple[int, ...]:
    """The number of levels from a node to each of its children on the way to a cost, the root last."""
    own, root = levels[i][f], len(levels)
    return tuple(own - (levels[j][f] if j < root else 0) for j in ones(children))


def _split_by_levels(levels: Levels, i: int, edges: Edges) -> Edges:
    """Costs whose edges pass different numbers of levels no longer keep the same edges."""
    found: dict[tuple[int, tuple[int, ...]], int] = {}
    for children, costs in edges:
        for f in ones(costs):
            key = children, levels_below(levels, i, children, f)
            # The root of a cost is its own: such a pair has one cost.
            key = (children, (*key[1], -f)) if children >> len(levels) & 1 else key
            found[key] = found.get(key, 0) | 1 << f
    return [(children, costs) for (children, _), costs in found.items()]


def _immediate_bits(graph: StochasticComputationGraph, costs: int, form: Form) -> list[int]:
    """For each node, those of ``costs`` that are immediate there, as bits."""
    immediate = [0] * len(graph.nodes)
    for f in ones(costs):
        reads = graph.cost_bits[f]
        last = reads.bit_length() - 1
        if reads and not reads & ~graph.known_bits(last, form):
            immediate[last] |= 1 << f
    return immediate


def _every_child(graph: StochasticComputationGraph, remote: list[int]) -> list[Edges]:
    root = 1 << len(graph.nodes)
    reaching = [bits | union(graph.ancestor_bits, bits) for bits in graph.cost_bits]
    edges = []
    for children, direct, costs in zip(graph.child_bits, graph.cost_child_bits, remote, strict=True):
        kept = ((children & reaching[f] | (root if direct >> f & 1 else 0), f) for f in ones(costs))
        edges.append(_group(kept, root))
    return edges


def _shortest_paths(graph: StochasticComputationGraph, remote: list[int]) -> list[Edges]:
    root = 1 << len(graph.nodes)
    kept: list[list[tuple[int, int]]] = [[] for _ in graph.nodes]
    for f, reads in enumerate(graph.cost_bits):
        seen, nearer, layer = 0, root, reads
        while layer:
            for i in ones(layer):
                if remote[i] >> f & 1:
                    nearest = root if nearer == root else graph.child_bits[i] & nearer
                    kept[i].append((nearest & -nearest, f))
            seen |= layer
            nearer, layer = layer, union(graph.parent_bits, layer) & ~seen
    return [_group(pairs, root) for pairs in kept]


def _first_child(graph: StochasticComputationGraph, remote: list[int]) -> list[Edges]:
    root = 1 << len(graph.nodes)
    edges: list[Edges] = []
    for children, costs in zip(graph.child_bits, remote, strict=True):
        kept: Edges = []
        for j in ones(children):
            if reached := costs & graph.downstream_bits[j]:
                kept.append((1 << j, reached))
            costs &= ~reached
            if not costs:
                break
        edges.append(kept + [(root, 1 << f) for f in ones(costs)])
    return edges


def _wrap_all(graph: StochasticComputationGraph, immediate: list[int], exact: int, form: Form) -> Reduced:
    """Reduces to one virtual cost: the sum of all costs, without those that are known before the site is sampled."""
    every = _known_costs(graph, (1 << len(graph.nodes)) - 1)
    sources, remote = [], []
    for i, (downstream, own) in enumerate(zip(graph.downstream_bits, immediate, strict=True)):
        known = graph.known_bits(i, form)
        # A cost that is known before is the same for all values of the site.
        learned = every & ~_known_costs(graph, known & ~(1 << i)) & ~(exact & _known_costs(graph, known))
        remote.append(learned if downstream else 0)
        sources.append(learned | own if downstream else 0)
    edges = [_first_of_one(graph, i, costs, sources) for i, costs in enumerate(remote)]
    return Reduced(edges, [{costs: None} if costs else {} for costs in sources], immediate)


def _first_of_one(graph: StochasticComputationGraph, i: int, remote: int, sources: list[int]) -> Edges:
    child = next((j for j in ones(graph.child_bits[i]) if sources[j] & remote), None)
    read = 0 if child is None else sources[child]
    edges = [] if child is None else [(1 << child, read)]
    # The child's sources lack the costs that became known between the node and the child: these are roots.
    return edges + [(1 << len(graph.nodes), 1 << f) for f in ones(remote & ~read)]


def _known_costs(graph: StochasticComputationGraph, known: int) -> int:
    """The costs, as bits, that read only nodes in ``known``, without constants."""
    return sum(1 << f for f, reads in enumerate(graph.cost_bits) if reads and not reads & ~known)


def _group(kept: Iterable[tuple[int, int]], root: int) -> Edges:
    """Groups costs by the children that they keep; a cost with its own root is a group of its own."""
    alone: Edges = []
    together: dict[int, int] = {}
    for children, f in kept:
        if children & root:
            alone.append((children, 1 << f))
        else:
            together[children] = together.get(children, 0) | 1 << f
    return [*together.items(), *alone]


def merge(graph: StochasticComputationGraph, edges: list[Edges]) -> list[Blocks]:
    """Applies the merging theorem: for each node, disjoint sets of costs, as bits, that cover its downstream costs.

    The Q-functions of two costs at ``X`` are summed if both keep the same children at every strict ancestor of ``X`` in
    either network; at ``X`` the children may differ. Children that are averaged with each other are merged alike.

    References:
        | Backprop-Q (Xu et al., 2018), Theorem 3
    """
    bounds: list[set[int]] = [set() for _ in graph.nodes]
    while True:
        blocks, rules = _merge_downwards(graph, edges, bounds)
        if not _tighten(bounds, blocks, rules):
            return blocks


def _merge_downwards(
    graph: StochasticComputationGraph, edges: list[Edges], bounds: list[set[int]]
) -> tuple[list[Blocks], Edges]:
    """Merges at each node, in program order, the costs that all rules read together, within ``bounds``."""
    sites = (1 << len(graph.nodes)) - 1
    read = [set(bound) for bound in bounds]
    blocks: list[Blocks] = []
    rules: Edges = []
    for i, downstream in enumerate(graph.downstream_bits):
        blocks.append(_refine(downstream, read[i]))
        for children, costs in edges[i]:
            if not children & sites:
                continue
            for _, part in split(costs, blocks[i]):
                rules.append((children & sites, part))
                for j in ones(children & sites):
                    read[j].add(part)
    return blocks, rules


def _tighten(bounds: list[set[int]], blocks: list[Blocks], rules: Edges) -> bool:
    """Adds bounds so that children of one average get the same blocks; returns whether it added any."""
    changed = False
    for children, costs in rules:
        if not costs & (costs - 1) or not children & (children - 1):
            continue
        parts = {j: {part for _, part in split(costs, blocks[j])} for j in ones(children)}
        finest = set().union(*parts.values())
        for j, own in parts.items():
            if own != finest:
                bounds[j] |= finest
                changed = True
    return changed


def _refine(whole: int, parts: Iterable[int]) -> Blocks:
    """The coarsest partition of ``whole`` such that each of ``parts`` is a union of its blocks."""
    blocks = [whole] if whole else []
    done = set(blocks)
    for rest in sorted(parts):
        if rest in done:
            continue
        for k, block in enumerate(blocks[:]):
            if inner := block & rest:
                if outer := block & ~rest:
                    blocks[k] = outer
                    blocks.append(inner)
                    done |= {inner, outer}
                rest &= ~inner
            if not rest:
                break
    return dict.fromkeys(sorted(blocks, key=lambda block: block & -block))


def split(costs: int, blocks: Blocks) -> Iterator[tuple[int, int]]:
    """Yields each block that meets ``costs``, with the part of the block in ``costs``."""
    if costs in blocks:
        yield costs, costs
        return
    for block in blocks:
        if part := block & costs:
            yield block, part
            costs &= ~part
        if not costs:
            break
