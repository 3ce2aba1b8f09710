r"""Plans a replay: the sites a stored rollout holds for a Q-node, and the sites drawn afresh.

The target of ``Q_X`` reads Q-functions of children ``Y_k`` at values that the *current* guide would draw. In the
paper's form a tuple holds ``X``, its ancestors ``A`` in the scope of ``Q_X``, the other parents ``B^k`` of ``Y_k`` and
the rest ``A^k`` of the scope of ``Q_Yk``; the ``Y_k`` are drawn afresh. ``B^k`` comes from an older guide: the target
is *stale*. Better, everything outside the scope of ``Q_X`` is drawn afresh, and only the scope is stored.

References:
    | Backprop-Q (Xu et al., 2018), Sec. 4.1 and Appendix, Cases for Experience Replay
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.graph.scg import StochasticComputationGraph


@dataclass(frozen=True)
class ReplayChild:
    """A child in the rule of a Q-node."""

    name: str  # name of the Q-node, or of the cost if the child is a root
    site: str | None  # the child's stochastic node, which is drawn afresh; `None` for a root
    co_parents: tuple[str, ...]  # the parents of that stochastic node without `X`, `B^k`
    # The sites that the child's Q-function and immediate costs read, without its own site and `X`, `A^k`
    reads: tuple[str, ...]


@dataclass(frozen=True)
class ReplayPlan:
    """The sites to store for a Q-node and the sites to draw, both in program order."""

    node: str
    scope: tuple[str, ...]  # its scope, `X` and `A`: the sites to store if all others are redrawn
    children: tuple[ReplayChild, ...]
    # The sites that the target needs besides the scope. All their parents are in the scope or among them.
    redrawn: tuple[str, ...]
    stale_stored: tuple[str, ...]  # the sites that the paper's form stores
    stale_redrawn: tuple[str, ...]  # the sites that the paper's form redraws: those of the children


def replay_plan(network: BackpropQNetwork, name: str) -> ReplayPlan:
    """Plans the replay of the Q-node ``name``; if it is not learned, the plan is empty except for the name.

    Raises:
        SiteNotFoundError: If there is no such Q-node.

    References:
        | Backprop-Q (Xu et al., 2018), Sec. 4.1 and Appendix, Cases for Experience Replay
    """
    graph, node = network.graph, network.q_node(name)
    children = tuple(_child(network, node.site, child) for child in network.children(name))
    scope, drawn = set(node.scope), {child.site for child in children if child.site is not None}
    read = drawn.union(*(child.reads for child in children))
    given = read.union(*(child.co_parents for child in children)) | scope
    return ReplayPlan(
        node=name,
        scope=tuple(node.scope),
        children=children,
        redrawn=_ordered(graph, _outside(graph, read, scope)),
        stale_stored=_ordered(graph, given - drawn),
        stale_redrawn=_ordered(graph, drawn),
    )


def _child(network: BackpropQNetwork, site: str, name: str) -> ReplayChild:
    graph = network.graph
    if name in graph.cost_index:
        return ReplayChild(name, None, (), tuple(p for p in graph.parents(name) if p != site))
    child = network.q_node(name)
    reads = set(child.scope).union(*(graph.cost(cost).parents for cost in child.immediate)) - {child.site, site}
    co_parents = tuple(p for p in graph.parents(child.site) if p != site)
    return ReplayChild(name, child.site, co_parents, _ordered(graph, reads))


def _outside(graph: StochasticComputationGraph, names: Iterable[str], scope: set[str]) -> set[str]:
    """Members and ancestors of ``names`` outside ``scope``; the search stops at the scope."""
    found: set[str] = set()
    todo = set(names) - scope
    while todo:
        name = todo.pop()
        found.add(name)
        todo |= set(graph.parents(name)) - scope - found
    return found


def _ordered(graph: StochasticComputationGraph, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=graph.index.__getitem__))


@dataclass(frozen=True)
class OffPolicyPlan:
    """The Q-nodes, by name, that learn correctly from a stored rollout whose costs are not evaluated again.

    A cost is a function of its parents: if these are held, its stored value is as good as a new one, whichever guide
    drew them. If the children in a rule depend only on sites known at ``X``, a lambda-return of expected backups has
    the Q-functions of the *current* guide as its fixed point at any ``λ``, without probability ratios. The other
    critics bootstrap: sites that are not known at ``X`` are redrawn, and critics replace the costs.
    """

    held: frozenset[str]  # Q-nodes whose lambda-return is correct if all sites have their stored values
    # Other Q-nodes whose one-step target is correct if all sites that are not known at their site are redrawn. Q-nodes
    # in neither set learn from new rollouts only.
    redrawn: frozenset[str]


def off_policy_plan(
    network: BackpropQNetwork, expected: Collection[str], tabled: Mapping[str, Collection[str]], stored: Collection[str]
) -> OffPolicyPlan:
    """Plans the use of rollouts with stored costs.

    Args:
        network: The network.
        expected: Sites whose critics give their expectation over the site under the current guide.
        tabled: For each site, the immediate costs that are known at all values of the site.
        stored: Costs that are not evaluated again. A run of the program gives all other costs.

    References:
        | Q(λ) with off-policy corrections (Harutyunyan et al., 2016), Sec. 4
    """
    graph, held, redrawn = network.graph, set[str](), set[str]()
    kept = set(stored)
    # Children come before the Q-nodes whose rules read them.
    for node in network.learned:
        known = set(graph.node_names(graph.known_bits(graph.index[node.site], network.form)))
        all_held = all_redrawn = True
        for child in network.children(node.name):
            if child in graph.cost_index:
                is_known = set(graph.parents(child)) <= known
                all_held &= is_known
                all_redrawn &= is_known or child not in kept
                continue
            below = network.q_node(child)
            missing = set(below.immediate) - set(tabled.get(below.site, ()))
            is_expected = below.is_learned and below.site in expected and not missing
            all_held &= is_expected and child in held and set(graph.parents(below.site)) <= known
            all_redrawn &= not missing & kept
        if all_held:
            held.add(node.name)
        elif all_redrawn:
            redrawn.add(node.name)
    return OffPolicyPlan(frozenset(held), frozenset(redrawn))
