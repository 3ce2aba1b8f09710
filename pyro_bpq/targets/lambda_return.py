r"""Targets of the critics: pure functions from (network, Q-values, costs) to targets.

The rule of a Q-node is a sum of averages over children, written ``avg``. The total of a child is ``Q_Y = I_Y + q_Y``:
its immediate costs, which are exact, and its learned part. The graph lambda-return ``G`` is computed backwards:

    G_X = γ (roots_X + avg_Y [ E_Y[Q_Y] + λ (G_Y - q_Y(y)) ])            (expected backup)
    G_X = γ (roots_X + avg_Y [ I_Y(y) + q_Y(y) + λ (G_Y - q_Y(y)) ])     (sample backup)

The roots are the costs among the children. An edge to a cost is discounted like any other edge.

``λ = 0`` is one-step TD. ``λ = 1`` with sample backups is the Monte Carlo return. With expected backups it is the
Monte Carlo return minus the graph-wise corrections ``Q_Y(y) - E_Y[Q_Y]``.

References:
    | Backprop-Q (Xu et al., 2018), Sec. 4.1 and Appendix, Cases for λ-return Updates
    | High-dimensional continuous control using generalized advantage estimation (Schulman et al., 2016)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.rollout.runs import sum_to_plates

__all__ = ["lambda_return", "lambda_return_solve", "monte_carlo_return", "td_target"]


def lambda_return(
    network: BackpropQNetwork,
    q: Mapping[str, Tensor],
    costs: Mapping[str, Tensor],
    lam: float | Tensor = 0.9,
    gamma: float | Tensor = 1.0,
    expected: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    r"""Mixes bootstrapped costs-to-go over all horizons, in one backward pass.

    Args:
        network: The network. Its nodes are in backward order, children before the nodes whose rules read them.
        q: Learned part of each Q-node at the sample, in nats. A missing node is not learned, and its return passes
            through.
        costs: Each cost of this run, in nats. Plate dimensions stand where their ``dim`` says. Plates that a node is
            outside of are summed over.
        lam: Weight of the return against the critic, in ``[0, 1]``.
        gamma: Discount per edge.
        expected: For each Q-node, ``E_Y[I_Y + q_Y]`` over the support of its site. A missing node is backed up from
            the sample.

    Returns:
        The target of the learned part of each Q-node, in nats, detached.
    """
    graph, returns = network.graph, dict[str, Tensor]()
    backups = {name: cost.detach() for name, cost in costs.items()}
    plates = {cost.name: cost.plates for cost in graph.costs}
    zero = next((cost.new_zeros(()) for cost in backups.values()), torch.zeros(()))
    for node in network.nodes:
        plates[node.name] = own = graph.node(node.site).plates
        total = zero
        for average in node.rule:
            children = [sum_to_plates(backups[child], plates[child], own) for child in average.children]
            total = total + gamma * sum(children[1:], children[0]) / len(children)
        returns[node.name] = total
        immediate = zero
        for cost in node.immediate:
            immediate = immediate + sum_to_plates(backups[cost], plates[cost], own)
        if node.name not in q:
            backups[node.name] = immediate + total
            continue
        learned = q[node.name].detach()
        ahead = expected[node.name].detach() if expected and node.name in expected else immediate + learned
        backups[node.name] = ahead + lam * (total - learned)
    return returns


def td_target(
    network: BackpropQNetwork,
    q: Mapping[str, Tensor],
    costs: Mapping[str, Tensor],
    gamma: float | Tensor = 1.0,
    expected: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """One-step target, :func:`lambda_return` with ``lam=0``."""
    return lambda_return(network, q, costs, 0.0, gamma, expected)


def monte_carlo_return(
    network: BackpropQNetwork, costs: Mapping[str, Tensor], gamma: float | Tensor = 1.0
) -> dict[str, Tensor]:
    """The cost-to-go of this run along the rules, :func:`lambda_return` with ``lam=1`` and no critic."""
    return lambda_return(network, {}, costs, 1.0, gamma)


def lambda_return_solve(
    rule: Tensor,
    roots: Tensor,
    ahead: Tensor,
    learned: Tensor,
    lam: Tensor,
    gamma: float | Tensor,
) -> Tensor:
    r"""The lambda-returns of Q-nodes with the same plates, by one triangular solve.

        (1 - γ R diag(λ)) G = roots + γ R (ahead - λ learned),   roots already discounted by γ

    Args:
        rule: Matrix ``R`` of the averages, ``(Q, Q)``, strictly upper triangular: nodes in program order.
        roots: Costs among the children, times ``γ``, ``(Q, ...)``, in nats.
        ahead: ``E_Y[Q_Y]`` of each node, ``(Q, ...)``; the immediate cost of a node that is not learned.
        learned: ``q_Y(y)``, ``(Q, ...)``, zero for a node that is not learned.
        lam: Weight of the return, ``(Q,)``, 1 for a node that is not learned.
        gamma: Discount per edge.

    Returns:
        Returns ``(Q, ...)`` in nats.
    """
    shape = roots.shape
    flat = shape[0], -1
    weight = lam.unsqueeze(1)
    right = roots.reshape(flat) + gamma * rule @ (ahead.reshape(flat) - weight * learned.reshape(flat))
    identity = torch.eye(shape[0], dtype=rule.dtype, device=rule.device)
    system = identity - gamma * rule * lam
    return torch.linalg.solve_triangular(system, right, upper=True, unitriangular=True).reshape(shape)
