"""Lambda-returns of the stacked Q-nodes of a step, and the critics' values that they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_bpq.critics.targets import check_discount, lambda_return, network_rules, solve_rules
from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.rollout.runs import sum_to_plates
from pyro_bpq.rollout.sums import common_type, total
from pyro_bpq.step.critic_step import CriticBatch

if TYPE_CHECKING:
    from pyro_bpq.step.signals import Signals

# Largest number of Q-nodes whose rules are solved as one dense matrix.
MOST_SOLVED = 2048


# What critics say of each group of Q-nodes, `(Q, M, plates)` in nats, detached: `q_X(x)`, and `E_X[q_X]` plus what
# takes the (discounted) exact immediate costs to their expectation.
Told = Mapping[int, tuple[Tensor, Tensor]]


def bootstrap(signals: Signals, c: int, gamma: float) -> Tensor | None:
    """Lambda-return minus cost-to-go of a class, for an estimator with a ``return_weight``; else ``None``."""
    lam = signals.layout.classes[c].spec.estimator.return_weight
    if lam is None:
        return None

    def returns() -> dict[int, Tensor]:
        return lambda_returns(signals, predictions(signals, signals.critics, gamma), lam, gamma)

    def plain() -> dict[int, Tensor]:
        zeros = {g: torch.zeros_like(critic.says.value) for g, critic in signals.critics.items()}
        return lambda_returns(signals, {g: (zero, zero) for g, zero in zeros.items()}, 1.0, 1.0)

    mixed, summed = signals.once(("returns", lam, gamma), returns), signals.once("plain returns", plain)
    groups = [(g, critic.group) for g, critic in signals.critics.items() if critic.group.c == c]
    # The cost-to-go, times gamma, contains the costs that are not immediate, too.
    shifts = [group.sum_to_sites(mixed[g] - gamma * summed[g]) for g, group in groups]
    return total(shifts) if shifts else None


def predictions(signals: Signals, critics: Mapping[int, CriticBatch], gamma: float) -> Told:
    """What critics say, by group."""
    return {g: (critic.says.value.detach(), _ahead(signals, critic, gamma)) for g, critic in critics.items()}


def _ahead(signals: Signals, critic: CriticBatch, gamma: float) -> Tensor:
    """Replaces sampled immediate costs by their expectation if all tabled costs of the site are the Q-node's."""
    group, tabled, mean = critic.group, signals.layout.tabled, critic.says.mean
    exact = signals.exact(group.c)
    if exact is None:
        return mean

    def is_whole() -> Tensor:
        return mean.new_tensor([set(node.immediate) >= set(tabled[node.site]) for node in group.nodes])

    whole = group.made("whole", mean, is_whole)
    centred = group.pick(critic.batch.centred(exact if gamma == 1.0 else gamma * exact))
    return mean - centred * whole.reshape(-1, *(1,) * (mean.dim() - 1))


def lambda_returns(signals: Signals, told: Told, lam: float | Tensor, gamma: float) -> dict[int, Tensor]:
    """Targets of all learned Q-nodes, ``(Q, M, plates)`` in nats, by group.

    They come from one triangular solve if all nodes and costs share their plates, else from a backward pass.
    """
    layout, network = signals.layout, signals.layout.network
    if not told or network is None:
        return {}
    plates = {cls.plates for cls in layout.cost_classes} | {cls.spec.plates for cls in layout.classes}
    check_discount(network, gamma)
    is_like = len(plates) == 1 and 2 < len(network.nodes) <= MOST_SOLVED
    if is_like and (gamma == 1.0 or not network.skips_levels):
        return _solved(signals, network, told, lam, gamma)
    q, expected = by_name(signals, network, told, gamma)
    returns = lambda_return(network, q, signals.costs_by_name, lam, gamma, expected)
    return {
        g: torch.stack([returns[node.name].expand(value.shape[1:]) for node in signals.critics[g].group.nodes])
        for g, (value, _) in told.items()
    }


def _solved(
    signals: Signals, network: BackpropQNetwork, told: Told, lam: float | Tensor, gamma: float
) -> dict[int, Tensor]:
    """The lambda-returns by one triangular solve."""
    # Costs are in single precision at least, as a solve needs.
    (costs,) = signals.costs
    costs = costs.to(common_type(costs, *(part for pair in told.values() for part in pair)))
    rules = signals.layout.made("rules", costs, lambda: network_rules(network, costs))
    places = {g: signals.critics[g].group.places(rules.order, costs) for g in told}
    size = (len(rules.order), *costs.shape[1:])
    learned, mean, weight = costs.new_zeros(size), costs.new_zeros(size), costs.new_ones(size[0])
    for g, (value, ahead) in told.items():
        learned[places[g]], mean[places[g]] = value.to(costs), ahead.to(costs)
        weight = weight.index_fill(0, places[g], lam)
    returns = solve_rules(rules, costs, mean, learned, weight, gamma)
    return {g: returns[rows] for g, rows in places.items()}


def by_name(
    signals: Signals, network: BackpropQNetwork, told: Told, gamma: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Q-values, and expected Q-values plus immediate costs, by name, ``(M, plates)``."""
    costs, plates, q, expected = signals.costs_by_name, network.plates, dict[str, Tensor](), dict[str, Tensor]()
    for g, pair in told.items():
        for node, value, ahead in zip(signals.critics[g].group.nodes, *pair, strict=True):
            q[node.name] = value
            for cost in node.immediate:
                ahead = ahead + gamma * sum_to_plates(costs[cost], plates[cost], plates[node.name])
            expected[node.name] = ahead
    return q, expected
