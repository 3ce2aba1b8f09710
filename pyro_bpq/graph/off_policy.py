r"""Finds the critics that learn correctly from a stored rollout whose costs are not evaluated again.

A cost is a function of its parents. If all parents are held, the stored value of the cost is as good as a new one,
whichever guide drew the parents. A lambda-return of expected backups,

    G_X = γ (roots_X + Σ_Y [ E_Y[Q_Y] + λ (G_Y - Q_Y(y)) ]),   E_Y under the current guide, y as stored,

then has the Q-functions of the *current* guide as its fixed point at any ``λ``. For these Q-functions the last term has
expectation zero given all values up to ``y``, whichever guide drew ``y``. No probability ratio is needed. This requires
that the children in the rule depend only on sites known at ``X``. The other critics bootstrap. The sites not known at
``X`` are drawn from the current guide, and the critics of the children replace the costs that would have to be called.

References:
    | Backprop-Q (Xu et al., 2018), Sec. 4.1
    | Q(λ) with off-policy corrections (Harutyunyan et al., 2016), Sec. 4
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pyro_bpq.graph.network import BackpropQNetwork


@dataclass(frozen=True)
class OffPolicyPlan:
    """The Q-nodes, by name, that can learn from rollouts with stored costs.

    Args:
        held: Q-nodes whose lambda-return is correct if all sites have their stored values.
        redrawn: Other Q-nodes whose one-step target is correct if all sites that are not known at their site are
            redrawn. Q-nodes in neither set learn from new rollouts only.
    """

    held: frozenset[str]
    redrawn: frozenset[str]


def off_policy_plan(
    network: BackpropQNetwork,
    expected: Collection[str],
    tabled: Mapping[str, Collection[str]],
    stored: Collection[str],
) -> OffPolicyPlan:
    """Plans the use of rollouts with stored costs.

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
