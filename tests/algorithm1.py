r"""Algorithm 1 of the paper as it is written, for reading and for comparison.

It is **biased**: the gradient uses the learned critic in place of the expected cost,

    Σ_X Q_w(Sc_X) ∇ log p(x | Pa_X)   instead of   Σ_X E[cost | Sc_X] ∇ log p(x | Pa_X).

:class:`~pyro_bpq.TraceBackpropQ_ELBO` is the unbiased estimator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_bpq.critics.targets import Backups
from pyro_bpq.graph.network import BackpropQNetwork

Values = Mapping[str, Tensor]


def backpropq_algorithm1(
    network: BackpropQNetwork,
    conditionals: Mapping[str, Callable[[Values], Distribution]],
    costs: Mapping[str, Callable[[Values], Tensor]],
    critics: Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer,
    critic_lr: float = 0.1,
    num_steps: int = 1,
    lam: float = 0.0,
    gamma: float = 1.0,
) -> float:
    r"""Runs Algorithm 1: updates the critics backwards, then applies the score function with the critics.

    :func:`~pyro_bpq.paper_settings` does the same on a Pyro program.

        w_X ← w_X + α (G_X - Q_w(Sc_X)) ∇Q_w(Sc_X),   surrogate = Σ_X Q_w(Sc_X) log p(x | Pa_X) + Σ_f f

    Args:
        network: The Backprop-Q network: graph, scopes, update rules.
        conditionals: For each stochastic node, a function from the values of earlier nodes to its distribution.
        costs: For each cost, a function from the values of all nodes to the cost, in nats.
        critics: For each Q-node with a learned part, a module from the values of its scope to ``Q``, in nats.
        optimizer: Optimises the parameters of conditionals and costs.
        critic_lr: Step size ``α`` of the critics; 0 leaves them unchanged.
        num_steps: Number of steps.
        lam: Weight of the lambda-return against the critics in targets; 0 is the paper's one-step target.
        gamma: Discount of targets per edge of the longest way.

    Returns:
        The total cost of the last rollout, in nats.

    References:
        | Backprop-Q (Xu et al., 2018), Algorithm 1
    """
    loss = 0.0
    for _ in range(num_steps):
        # Forward pass.
        values: dict[str, Tensor] = {}
        score: dict[str, Tensor] = {}
        for site in network.graph.index:
            distribution = conditionals[site](values)
            values[site] = distribution.sample()
            score[site] = distribution.log_prob(values[site])
        cost = {name: costs[name](values) for name in network.graph.cost_index}

        # Backpropagation across stochastic nodes: children before those whose rules read them.
        backups, q = Backups(network, cost, lam, gamma), dict[str, Tensor]()
        for node in network.nodes:
            target, learned = backups.target(node), None
            if node.is_learned:
                scope = {site: values[site] for site in node.scope}
                _take_step(critics[node.name], scope, target, critic_lr)
                learned = critics[node.name](scope).detach()
            backups.put(node, target, learned)
            immediate = sum((cost[name].detach() for name in node.immediate), torch.zeros(()))
            q[node.name] = gamma * immediate if learned is None else gamma * immediate + learned

        # Backpropagation across deterministic nodes.
        surrogate = sum(cost.values(), torch.zeros(()))
        for site in network.graph.index:
            local = sum((q[node.name] for node in network.q_nodes(site)), torch.zeros(()))
            surrogate = surrogate + local * score[site]
        optimizer.zero_grad()
        surrogate.sum().backward()
        optimizer.step()
        loss = float(sum(value.detach().sum() for value in cost.values()))
    return loss


def _take_step(critic: nn.Module, scope: Values, target: Tensor, critic_lr: float) -> None:
    """One step of stochastic gradient descent on half the squared error."""
    weights = [weight for weight in critic.parameters() if weight.requires_grad]
    if not weights or critic_lr == 0.0:
        return
    error = 0.5 * (target - critic(scope)).square().sum()
    with torch.no_grad():
        for weight, gradient in zip(weights, torch.autograd.grad(error, weights), strict=True):
            weight.sub_(critic_lr * gradient)
