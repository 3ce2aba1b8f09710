r"""Targets of the critics, and advantages: pure functions of (network, Q-values, costs).

The rule of a Q-node is a sum of averages over children, written ``avg``. The total of a child is ``Q_Y = γ I_Y + q_Y``:
its immediate costs, which are exact, and its learned part. The graph lambda-return ``G`` is computed backwards:

    G_X = γ (roots_X + avg_Y [ E_Y[Q_Y] + λ (G_Y - q_Y(y)) ])              (expected backup)
    G_X = γ (roots_X + avg_Y [ γ I_Y(y) + q_Y(y) + λ (G_Y - q_Y(y)) ])     (sample backup)

The roots are the costs among the children. An edge to a cost is discounted like any other edge.

``λ = 0`` is one-step TD. ``λ = 1`` with sample backups is the Monte Carlo return. With expected backups it is the
Monte Carlo return minus the graph-wise corrections ``Q_Y(y) - E_Y[Q_Y]``.

A discount below 1 has one meaning, whatever is merged, reduced or exact:

    Q_X = E[ Σ_f γ^d(X, f) f | Sc_X ],   d(X, f): the number of edges on the longest way from X to the cost f

So an edge ``X → Y`` on the way to ``f`` has the factor ``γ^(d(X, f) - d(Y, f))``. For most edges that is ``γ``. It is a
higher power for an edge that *passes levels by*: a longer way from ``X`` to ``f`` leads around it (a bypass). The paper
removes such edges. Where they stay, the network has to be built with ``discounted=True``.

An *advantage* is a Q-function minus the prediction of it one step earlier. Let ``Q_X`` be a Q-node at a parent of
``Y`` whose rule reads ``Y``. It predicts ``Q_Y`` and the other summands of its rule, the *siblings*. The baseline of
``Y`` is the part of that prediction that belongs to ``Y``:

    A_Y = γ Q_Y(y) - avg_X [ Q_X(x) - γ Σ_S Q_S(s) ]

The paper's four cases are instances: a single parent, ``Q_Y - Q_X``; two parents, minus their average; a sibling of
another cost, ``Q_Y1 - (Q_X - Q_Y2)``; parents and siblings (our reading, because the paper's picture of it is missing).
Siblings stand in other summands of a rule. A child that is averaged with ``Y`` predicts the same costs, so it is no
sibling. A baseline must not depend on ``y``. So a sibling is dropped if it reads ``Y`` or a descendant of ``Y``, or if
``Y`` descends from it. If ``Y`` is in a plate and its parent is not, the other rows of ``Y`` are siblings. If only the
parent is in a plate, each row of the parent counts as a parent.

An advantage replaces a Q-function in a gradient estimator that is biased by the critics' errors. The baseline adds no
further bias.

References:
    | Backprop-Q (Xu et al., 2018), Sec. 4.1 and Appendix, Cases for λ-return Updates, Cases for Advantage Functions
    | High-dimensional continuous control using generalized advantage estimation (Schulman et al., 2016)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bpq.errors import OptionError, PlateError
from pyro_bpq.graph.network import BackpropQNetwork, QNode
from pyro_bpq.rollout.runs import sum_to_plates
from pyro_bpq.rollout.sums import Sums, subset_sums, weighted_sums


def lambda_return(
    network: BackpropQNetwork,
    q: Mapping[str, Tensor],
    costs: Mapping[str, Tensor],
    lam: float | Tensor = 0.9,
    gamma: float = 1.0,
    expected: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    r"""Mixes bootstrapped costs-to-go over all horizons, in one backward pass.

    Args:
        network: The network, whose nodes are in backward order.
        q: Learned part of each Q-node at the sample, in nats. A missing node is not learned, and its return passes
            through.
        costs: Each cost of this run, in nats. Plate dimensions stand where their ``dim`` says. Plates that a node is
            outside of are summed over.
        lam: Weight of the return against the critic, in ``[0, 1]``.
        gamma: Discount per level, usually per edge.
        expected: For each Q-node, ``E_Y[γ I_Y + q_Y]`` over the support of its site. A missing node is backed up from
            the sample.

    Returns:
        The target of the learned part of each Q-node, in nats, detached.

    Raises:
        OptionError: If ``gamma`` is not 1, and the network would have other rules if built with ``discounted=True``.
    """
    backups, returns = Backups(network, costs, lam, gamma), dict[str, Tensor]()
    for node in network.nodes:
        returns[node.name] = backups.target(node)
        learned = q[node.name].detach() if node.name in q else None
        ahead = expected[node.name].detach() if expected and node.name in expected else None
        backups.put(node, returns[node.name], learned, ahead)
    return returns


class Backups:
    """What each Q-node and cost says to the Q-nodes before it, in nats; filled backwards, children first."""

    def __init__(
        self, network: BackpropQNetwork, costs: Mapping[str, Tensor], lam: float | Tensor, gamma: float
    ) -> None:
        check_discount(network, gamma)
        self.network, self.lam, self.gamma = network, lam, gamma
        self.found = {name: cost.detach() for name, cost in costs.items()}
        self._zero = next((cost.new_zeros(()) for cost in self.found.values()), torch.zeros(()))

    def target(self, node: QNode) -> Tensor:
        """The lambda-return of a Q-node whose children are known."""
        total = self._zero
        for average in node.rule:
            children = [self._summed(child, node) for child in average.children]
            if average.levels:
                children = [self.gamma**k * child for k, child in zip(average.levels, children, strict=True)]
                part = sum(children[1:], children[0])
            else:
                part = self.gamma * sum(children[1:], children[0])
            total = total + part / len(children)
        return total

    def _summed(self, name: str, node: QNode) -> Tensor:
        """What a cost or Q-node says, summed over the plates that the reader is outside of."""
        return sum_to_plates(self.found[name], self.network.plates[name], self.network.plates[node.name])

    def put(self, node: QNode, target: Tensor, learned: Tensor | None, ahead: Tensor | None = None) -> None:
        """Notes what a Q-node says, from its target, ``q_Y(y)``, and ``E_Y[Q_Y]`` where that is known."""
        immediate = self.gamma * sum((self._summed(cost, node) for cost in node.immediate), self._zero)
        if learned is None:
            self.found[node.name] = immediate + target
        else:
            ahead = immediate + learned if ahead is None else ahead
            self.found[node.name] = ahead + self.lam * (target - learned)


def check_discount(network: BackpropQNetwork, gamma: float) -> None:
    """Raises an OptionError if ``gamma`` is not 1 and the network's rules cannot be discounted."""
    if gamma != 1.0 and not network.can_discount:
        reduction = "chain" if network.reduction == "single" else network.reduction
        raise OptionError(
            f"gamma={gamma}: this network was not built for a discount below 1, and its rules would be others then. "
            f"Write gamma=1.0, or BackpropQNetwork.build(graph, {reduction!r}, discounted=True)."
        )


@dataclass(frozen=True)
class Rules:
    """The rules of a network as matrices: averages over Q-nodes and over costs, and immediate costs."""

    order: dict[str, int]  # Position of each Q-node, in program order
    within: Tensor  # Weights of Q-nodes in each rule, `(Q, Q)`, strictly upper triangular
    root: Sums | None  # Weights of costs in each rule, `(Q, costs)`
    immediate: Sums | None  # Immediate costs of each Q-node, `(Q, costs)`


def network_rules(network: BackpropQNetwork, like: Tensor) -> Rules:
    """The rules of a network as matrices of the type of ``like``."""
    graph, size = network.graph, len(network.nodes)
    order = {node.name: i for i, node in enumerate(reversed(network.nodes))}
    edges, roots = list[tuple[int, int, float]](), list[tuple[int, int, float]]()
    immediate = [0] * size
    for node in network.nodes:
        i = order[node.name]
        immediate[i] = graph.cost_bits_of(node.immediate)
        for average in node.rule:
            for child in average.children:
                at = order if child in order else graph.cost_index
                (edges if child in order else roots).append((i, at[child], 1.0 / len(average.children)))
    within = weighted_sums((size, size), edges, like).to_dense()
    root = weighted_sums((size, len(graph.costs)), roots, like) if roots else None
    return Rules(order, within, root, subset_sums(immediate, range(len(graph.costs)), like))


def solve_rules(rules: Rules, costs: Tensor, mean: Tensor, learned: Tensor, lam: Tensor, gamma: float) -> Tensor:
    r"""The lambda-returns ``(Q, ...)`` of Q-nodes with the same plates, in nats, by one triangular solve.

        (1 - γ R diag(λ)) G = γ roots + γ R (mean + γ immediate - λ learned)

    The discount is not 1 only if no edge passes levels by.

    Args:
        rules: The averages ``R`` over Q-nodes, the costs among the children, and the immediate costs.
        costs: The costs, ``(costs, ...)``, in nats.
        mean: ``E_Y[Q_Y]`` of each node without its immediate costs, ``(Q, ...)``; zero for one that is not learned.
        learned: ``q_Y(y)``, ``(Q, ...)``, zero for a node that is not learned.
        lam: Weight of the return, ``(Q,)``, 1 for a node that is not learned.
        gamma: Discount per edge.
    """
    rule, flat = rules.within, (len(mean), -1)
    ahead = mean if rules.immediate is None else mean + gamma * (rules.immediate @ costs)
    roots = torch.zeros_like(mean) if rules.root is None else gamma * (rules.root @ costs)
    right = roots.reshape(flat) + gamma * rule @ (ahead.reshape(flat) - lam.unsqueeze(1) * learned.reshape(flat))
    system = torch.eye(len(mean), dtype=rule.dtype, device=rule.device) - gamma * rule * lam
    return torch.linalg.solve_triangular(system, right, upper=True, unitriangular=True).reshape(mean.shape)


def advantages(
    network: BackpropQNetwork,
    q: Mapping[str, Tensor],
    costs: Mapping[str, Tensor],
    lam: float = 0.0,
    gamma: float = 1.0,
    expected: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    r"""The advantage of each site at the sample.

    With ``lam`` above 0 the first term is estimated from the returns, ``Q_Y + λ (G_Y - q_Y)``. In a chain the advantage
    is then the λ-error ``δ_X = G_X - Q_X`` of the parent (generalised advantage estimation). At ``γ λ = 1`` it is the
    return minus ``Q_X``.

    Args:
        network: The network. All Q-nodes of a site give one advantage.
        q: Learned part of each Q-node at the sample, in nats. A missing Q-node is not learned.
        costs: Each cost of this run, in nats. Plate dimensions stand where their ``dim`` says, as in
            :func:`lambda_return`.
        lam: Weight of the return against the critic, in ``[0, 1]``.
        gamma: Discount per edge.
        expected: For Q-nodes, ``E_S[γ I_S + q_S]`` over the support of their sites. Siblings then enter by their
            expectation instead of their sample, and returns use expected backups.

    Returns:
        Advantages by site, in nats, detached. A site that no learned rule reads has no baseline: its advantage is its
        Q-function.

    Raises:
        OptionError: If ``gamma`` is not 1 and the network was not built for it, or has edges that pass levels by.
        PlateError: If a site lies in plates that its reader is outside of, and a cost downstream reads several rows.

    References:
        | Backprop-Q (Xu et al., 2018), Appendix, Cases for Advantage Functions
    """
    if gamma != 1.0 and network.skips_levels:
        raise OptionError(
            f"gamma={gamma}: an edge of this network passes levels by, so a site is discounted differently by "
            "different readers. Write gamma=1.0, or leave out of the graph the edges that a longer way leads around."
        )
    returns = lambda_return(network, q, costs, lam, gamma, expected)
    backups = Backups(network, costs, 0.0, gamma)
    for node in network.nodes:
        backups.put(node, returns[node.name], q[node.name].detach() if node.name in q else None)
    totals = backups.found
    ahead = totals | {name: value.detach() for name, value in (expected or {}).items()}
    found = {}
    for site in network.graph.index:
        nodes = network.q_nodes(site)
        if nodes:
            first = sum(totals[n.name] + lam * (returns[n.name] - q.get(n.name, returns[n.name])) for n in nodes)
            found[site] = (gamma * first - _baseline(network, site, q, ahead, gamma)).detach()
    return found


def _baseline(
    network: BackpropQNetwork, site: str, q: Mapping[str, Tensor], ahead: Mapping[str, Tensor], gamma: float
) -> Tensor:
    """The readers' prediction of a site: a weighted mean over the readers of each of its Q-nodes."""
    plates, own, costs = network.plates, network.graph.node(site).plates, network.graph.cost_index
    names = {node.name for node in network.q_nodes(site)}
    # The return of a reader that nobody learned contains what came of the site's own value.
    readers = [node for node in network.nodes if node.name in q and names & set(network.children(node.name))]
    total = torch.zeros(())
    for reader, weight in zip(readers, _weights(network, sorted(names), readers), strict=True):
        _check_plates(network, site, reader)
        outer = plates[reader.name]
        prediction = q[reader.name].detach()
        for average in reader.rule:
            mine = names & set(average.children)
            # A child that is learned and not in q knows no more than the return of this run.
            known = [c for c in average.children if c in costs or c in q or not network.q_node(c).is_learned]
            siblings = [c for c in known if is_independent(network, site, c)]
            if mine:
                # The other rows of a plate that the reader is outside of.
                rows = [sum_to_plates(ahead[child], own, outer) - ahead[child] for child in mine]
                prediction = prediction - gamma * sum(rows[1:], rows[0])
            elif siblings:
                sums = [sum_to_plates(ahead[child], plates[child], outer) for child in siblings]
                prediction = prediction - gamma * sum(sums[1:], sums[0]) / len(siblings)
        pooled = [plate.dim for plate in outer if plate not in own]
        total = total + weight * (prediction.mean(pooled, keepdim=True) if pooled else prediction)
    return total


def _weights(network: BackpropQNetwork, names: list[str], readers: list[QNode]) -> list[float]:
    """Weights of the readers of a site: they sum to 1 for each of its Q-nodes, and are equal if possible."""
    reads = [[float(name in network.children(reader.name)) for reader in readers] for name in names]
    matrix = torch.tensor(reads, dtype=torch.float64).reshape(len(names), len(readers))
    return (torch.linalg.pinv(matrix) @ torch.ones(len(names), dtype=torch.float64)).tolist()


def is_independent(network: BackpropQNetwork, site: str, child: str) -> bool:
    """Whether ``child`` does not depend on ``site``, nor ``site`` on the site of the Q-node ``child``."""
    graph = network.graph
    if child in graph.cost_index:
        reads = set(graph.cost(child).parents)
    else:
        node = network.q_node(child)
        reads = {node.site, *node.scope}.union(*(graph.cost(cost).parents for cost in node.immediate))
        if node.site in graph.ancestors(site):
            return False
    return not reads & (graph.descendants(site) | {site})


def _check_plates(network: BackpropQNetwork, site: str, reader: QNode) -> None:
    graph = network.graph
    inner = [p.name for p in graph.node(site).plates if p not in graph.node(reader.site).plates]
    if inner and graph.leaves_plates(site):
        raise PlateError(
            f"Site {site!r} lies in the plates {inner}, which site {reader.site!r} above it is outside of, and a cost "
            "reads several of its rows: they share one prediction. Use ScoreFunction(LeaveOneOut()) there instead of "
            "advantages."
        )
