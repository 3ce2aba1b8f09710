r"""Plans which critics learn from a stored rollout whose costs are not evaluated again.

References:
    | Backprop-Q (Xu et al., 2018), Sec. 4.1 and Appendix, Cases for Experience Replay
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pyro_bpq.graph.network import BackpropQNetwork


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
