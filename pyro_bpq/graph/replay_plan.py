r"""What a stored rollout has to hold for a Q-node, and what is drawn afresh when it is replayed.

The target of ``Q_X`` reads Q-functions of children ``Y_k`` at values that the *current* guide would draw. In the
paper's form a tuple holds ``X``, its ancestors ``A`` in the scope of ``Q_X``, the other parents ``B^k`` of ``Y_k`` and
the rest ``A^k`` of the scope of ``Q_Yk``; the ``Y_k`` are drawn afresh. Then ``B^k`` comes from an older guide, and
so does its distribution: a target is *stale*. What is outside the scope of ``Q_X`` can be drawn afresh too:

    E[ Σ avg_k Q_Yk | Sc_X ],   all but Sc_X from the current guide, in program order,

and the scope is all that has to be stored, since no ancestor of ``X`` outside of it matters.

References:
    | Backprop-Q (Xu et al., 2018), Sec. 4.1 and Appendix, Cases for Experience Replay
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.graph.scg import StochasticComputationGraph

__all__ = ["ReplayChild", "ReplayPlan", "replay_plan"]


@dataclass(frozen=True)
class ReplayChild:
    """A child in the rule of a Q-node.

    Args:
        name: The Q-node, or the cost if it is a root.
        site: The stochastic node that is drawn afresh; ``None`` for a root.
        co_parents: Its parents besides the Q-node's own site, ``B^k``.
        reads: What its Q-function and its immediate costs read besides its own site, ``A^k``.
    """

    name: str
    site: str | None
    co_parents: tuple[str, ...]
    reads: tuple[str, ...]


@dataclass(frozen=True)
class ReplayPlan:
    """What to store for a Q-node and what to draw; sites are in program order.

    Args:
        node: The Q-node.
        scope: Its scope, ``X`` and ``A``: what has to be stored if all else is redrawn.
        children: The children in its rule.
        redrawn: What the target needs besides the scope; each one's parents are in the scope or among these.
        stale_stored: What the paper's form stores.
        stale_redrawn: What the paper's form redraws: the children's sites.
    """

    node: str
    scope: tuple[str, ...]
    children: tuple[ReplayChild, ...]
    redrawn: tuple[str, ...]
    stale_stored: tuple[str, ...]
    stale_redrawn: tuple[str, ...]

    @property
    def is_stale(self) -> bool:
        """Whether the paper's form takes values from the older guide that the scope does not hold."""
        return set(self.stale_stored) > set(self.scope)


def replay_plan(network: BackpropQNetwork, name: str) -> ReplayPlan:
    """Plans the replay of a Q-node.

    Args:
        network: The network.
        name: A Q-node; where it is not learned the plan is empty but for its name.

    Returns:
        The plan.

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
    """``names`` and what they depend on, as far as the scope does not fix it."""
    found: set[str] = set()
    todo = set(names) - scope
    while todo:
        name = todo.pop()
        found.add(name)
        todo |= set(graph.parents(name)) - scope - found
    return found


def _ordered(graph: StochasticComputationGraph, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=graph.index.__getitem__))
