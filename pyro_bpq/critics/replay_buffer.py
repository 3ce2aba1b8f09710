"""Stored rollouts, from which critics learn again.

A stored rollout holds values of sites, and references to the programs and their arguments; minibatches are not copied.

References:
    | Backprop-Q (Xu et al., 2018), Sec. 4.1 and Appendix, Cases for Experience Replay
    | Human-level control through deep reinforcement learning (Mnih et al., 2015)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.errors import Checked, OptionError, one_of, whole
from pyro_bpq.graph.bitsets import union
from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.rollout.runs import Particles


@dataclass(frozen=True)
class Replay(Checked):
    r"""Options of experience replay: how critics learn from stored rollouts.

    An update of the critic of a site ``X`` keeps the stored values of the sites that ``Q_X`` conditions on, draws the
    rest from the *current* guide, and regresses ``Q_X`` on its target:

        (x, a) ~ Uniform(buffer),   rest ~ q(· | x, a),   min (target(x, a, rest) - Q_X(x, a))²

    Each rollout of a batch runs guide and model once more, or twice if immediate costs are evaluated at all values. If
    sampled values steer the program, an update keeps all sites before ``X`` and redraws all later sites.

    Args:
        capacity: Number of kept rollouts, the most recent ones; a rollout is all particles of a step.
        batch_size: Number of rollouts of an update.
        updates_per_step: Number of updates after each training step; with 0 only ``elbo.replay(...)`` makes updates.
        draws: Number ``n`` of times that an update redraws the rest of each rollout. The loss is then

                1/n Σ_i (target(x, a, rest_i) - Q_X(x, a))²

            Each draw runs guide and model again. An update that redraws nothing runs them once.
        coparents: Treatment of the other parents of the children of ``X``. ``"redrawn"``: drawn from the current
            guide. ``"stored"``: kept at their stored values, the paper's form. These come from an older guide, so the
            critic is biased when the guide has moved.
        costs: ``"called"``: the functions of :func:`~pyro_bpq.cost` statements are called again, at the redrawn values.
            ``"stored"``: they are never called again, and all sites and costs keep their values
            (:class:`OffPolicyPlan`). This is exact if the functions read only sampled values and arguments
            of the program. Critics whose children have parents that are not known at ``X`` bootstrap from redrawn
            values. If such a child is a cost, they learn from new rollouts only.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Backprop-Q (Xu et al., 2018), Sec. 4.1; several draws: Appendix, Cases for Experience Replay, Eq. 15
    """

    capacity: int = whole(256)
    batch_size: int = whole(4)
    updates_per_step: int = whole(1, least=0)
    coparents: str = one_of("redrawn", "stored")
    costs: str = one_of("called", "stored")
    draws: int = whole(1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.costs == "stored" and self.coparents != "redrawn":
            raise OptionError(f'Replay(costs="stored", coparents={self.coparents!r}): write coparents="redrawn".')


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


@dataclass(frozen=True, eq=False)
class StoredRollout:
    """One step's rollout."""

    key: Hashable  # Key of its structure
    network: BackpropQNetwork  # Its Backprop-Q network
    # For each run, detached values of sites and indices of subsampled plates, by name
    values: tuple[Mapping[str, Tensor], ...]
    programs: tuple[Any, ...]  # Model, guide, arguments and keyword arguments of each run, by reference
    particles: Particles = field(default_factory=Particles)  # How the particles of the step ran
    # Whether sampled values may steer the program; the sites after a redrawn site may then change
    is_steered: bool = False
    # For each run, the return values of the cost functions, by name of the statement
    costs: tuple[Mapping[str, Tensor], ...] = ()
    plan: OffPolicyPlan | None = None  # Plan of the critics that learn without new cost evaluations, or `None`

    @property
    def learned(self) -> tuple[str, ...]:
        """Sites with a learned Q-node, in program order."""
        names = {node.site for node in self.network.learned}
        return tuple(node.name for node in self.network.graph.nodes if node.name in names)


class ReplayBuffer:
    """A buffer of the ``capacity`` most recent rollouts.

    A copy or a pickle of a buffer is empty, because the programs of rollouts belong to the process.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_dropped = 0
        self._rollouts: deque[StoredRollout] = deque(maxlen=capacity)

    def add(self, rollout: StoredRollout) -> None:
        """Stores a rollout; a full buffer drops its oldest rollout."""
        self._rollouts.append(rollout)

    def draw(self, number: int, generator: torch.Generator) -> list[StoredRollout]:
        """Draws rollouts uniformly, with replacement; returns an empty list if the buffer is empty."""
        if not self._rollouts:
            return []
        chosen = torch.randint(len(self._rollouts), (number,), generator=generator, device="cpu")
        return [self._rollouts[i] for i in chosen.tolist()]

    def drop(self, rollout: StoredRollout) -> None:
        """Removes a rollout that can no longer be replayed, and counts it in ``num_dropped``."""
        kept = [other for other in self._rollouts if other is not rollout]
        self.num_dropped += len(self._rollouts) - len(kept)
        self._rollouts = deque(kept, maxlen=self.capacity)

    def __len__(self) -> int:
        return len(self._rollouts)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayBuffer, (self.capacity,)

    def __repr__(self) -> str:
        return f"ReplayBuffer({len(self)} of {self.capacity} rollouts, {self.num_dropped} dropped)"


# What an update holds. An update of ``Q_X`` holds all of ``An_X + X``, which contains the scope of ``Q_X``; the target
# also needs the children of ``X`` and their other parents, which are drawn afresh. A Q-node of another site ``Z`` may
# learn from the same rollout if every held site that affects its costs is in ``An_Z + Z``.


def known_sites(network: BackpropQNetwork, site: str) -> frozenset[str]:
    """The sites that the Q-functions of a site condition on: ``An_X + X``, in history form all up to X."""
    graph = network.graph
    return frozenset(graph.node_names(graph.known_bits(graph.index[site], network.form)))


def held_sites(network: BackpropQNetwork, site: str, form: str = "redrawn") -> frozenset[str]:
    """The sites that an update of the Q-nodes of a site holds at stored values: those of :func:`known_sites`.

    The stored form adds the co-parents, which are the other parents of the site's children, and the rest of the
    children's scopes, without descendants of the site.
    """
    graph, more = network.graph, set[str]()
    children = {child for node in network.q_nodes(site) for child in network.children(node.name)}
    for child in children if form == "stored" else ():
        if child in graph.cost_index:
            more |= {*graph.parents(child)}
        else:
            more |= {*graph.parents(network.q_node(child).site), *network.q_node(child).scope}
    return known_sites(network, site) | (more - graph.descendants(site))


def trainable(network: BackpropQNetwork, held: Set[str]) -> frozenset[str]:
    """Names of the Q-nodes with correct targets if ``held`` has stored values and other sites are redrawn."""
    graph, found = network.graph, set()
    bits = graph.bits_of([name for name in held if name in graph.index])
    for node in network.learned:
        reads = graph.cost_set_bits(node.remote)
        relevant = reads | union(graph.ancestor_bits, reads)
        if not bits & relevant & ~graph.known_bits(graph.index[node.site], network.form):
            found.add(node.name)
    return frozenset(found)
