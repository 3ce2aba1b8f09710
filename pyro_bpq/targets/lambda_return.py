r"""Targets of the critics: pure functions from (network, Q-values, costs) to targets.

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

References:
    | Backprop-Q (Xu et al., 2018), Sec. 4.1 and Appendix, Cases for λ-return Updates
    | High-dimensional continuous control using generalized advantage estimation (Schulman et al., 2016)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bpq.errors import OptionError
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


def lambda_return_solve(
    rule: Tensor, roots: Tensor, ahead: Tensor, learned: Tensor, lam: Tensor, gamma: float
) -> Tensor:
    r"""The lambda-returns of Q-nodes with the same plates, by one triangular solve.

        (1 - γ R diag(λ)) G = roots + γ R (ahead - λ learned),   roots already discounted by γ

    Args:
        rule: Matrix ``R`` of the averages, ``(Q, Q)``, strictly upper triangular: nodes in program order.
        roots: Costs among the children, times ``γ``, ``(Q, ...)``, in nats.
        ahead: ``E_Y[Q_Y]`` of each node, ``(Q, ...)``; ``γ`` times the immediate cost of a node that is not learned.
        learned: ``q_Y(y)``, ``(Q, ...)``, zero for a node that is not learned.
        lam: Weight of the return, ``(Q,)``, 1 for a node that is not learned.
        gamma: Discount per edge.
    """
    shape = roots.shape
    flat = shape[0], -1
    right = roots.reshape(flat) + gamma * rule @ (ahead.reshape(flat) - lam.unsqueeze(1) * learned.reshape(flat))
    system = torch.eye(shape[0], dtype=rule.dtype, device=rule.device) - gamma * rule * lam
    return torch.linalg.solve_triangular(system, right, upper=True, unitriangular=True).reshape(shape)


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
    r"""The lambda-returns ``(Q, ...)`` of Q-nodes with the same plates, in nats.

    ``mean`` is ``E_Y[Q_Y]`` of each node without its immediate costs, zero if not learned; for the others see
    :func:`lambda_return_solve`. The discount is not 1 only if no edge passes levels by.
    """
    ahead = mean if rules.immediate is None else mean + gamma * (rules.immediate @ costs)
    roots = torch.zeros_like(mean) if rules.root is None else gamma * (rules.root @ costs)
    return lambda_return_solve(rules.within, roots, ahead, learned, lam, gamma)
