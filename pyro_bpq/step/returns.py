"""Lambda-returns of the stacked Q-nodes of a step, and the critics' values that they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pyro_bpq.batching.classes import QGroup
from pyro_bpq.batching.layout import Layout
from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.rollout.runs import sum_to_plates
from pyro_bpq.rollout.sums import common_type
from pyro_bpq.step.critic_step import CriticBatch
from pyro_bpq.step.values import Learning
from pyro_bpq.targets.lambda_return import check_discount, lambda_return, network_rules, solve_rules

if TYPE_CHECKING:
    from pyro_bpq.step.signals import Signals

# Largest number of Q-nodes whose rules are solved as one dense matrix.
MOST_SOLVED = 2048


class Prediction(NamedTuple):
    """What critics say of a group of Q-nodes, ``(Q, M, plates)`` in nats, detached."""

    group: QGroup
    value: Tensor  # `q_X(x)`
    # `E_X[q_X]`, plus what takes the (discounted) exact immediate costs to their expectation
    ahead: Tensor


def values_and_targets(signals: Signals, learning: Learning) -> dict[int, tuple[Tensor, Tensor]]:
    """``q_X(x)`` with the critics' gradient and its lambda-return, ``(Q, M, plates)`` each, by group."""
    found = predictions(signals, signals.slow_critics if learning.slow else signals.critics, learning.gamma)
    targets = lambda_returns(signals, found, learning.lam, learning.gamma)
    values = {g: critic.says.value for g, critic in signals.critics.items()}
    return {g: (value, targets[g].expand_as(value)) for g, value in values.items()}


def bootstraps(signals: Signals, gamma: float) -> dict[int, Tensor]:
    """Lambda-return minus cost-to-go by class, for estimators with a ``return_weight``."""
    estimators, key = [cls.spec.estimator for cls in signals.layout.classes], ("bootstraps", gamma)
    wanted = {c: lam for c in signals.active if (lam := estimators[c].return_weight) is not None}
    if not wanted or not signals.critics:
        return {}
    if key not in signals.shared:
        found, shifts = predictions(signals, signals.critics, gamma), dict[int, Tensor]()
        zeros = {g: torch.zeros_like(own.value) for g, own in found.items()}
        plain = lambda_returns(signals, {g: Prediction(found[g].group, z, z) for g, z in zeros.items()}, 1.0, 1.0)
        for lam in sorted(set(wanted.values())):
            targets = lambda_returns(signals, found, lam, gamma)
            for g, (group, *_) in found.items():
                if wanted.get(group.c) == lam:
                    # The cost-to-go, times gamma, contains the costs that are not immediate, too.
                    shift = group.sum_to_sites(targets[g] - (plain[g] if gamma == 1.0 else gamma * plain[g]))
                    shifts[group.c] = shifts[group.c] + shift if group.c in shifts else shift
        signals.shared[key] = shifts
    return signals.shared[key]


def predictions(signals: Signals, critics: Mapping[int, CriticBatch], gamma: float) -> dict[int, Prediction]:
    """What critics say, by group."""
    return {g: Prediction(c.group, c.says.value.detach(), _ahead(signals, c, gamma)) for g, c in critics.items()}


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


def lambda_returns(
    signals: Signals, found: Mapping[int, Prediction], lam: float | Tensor, gamma: float
) -> dict[int, Tensor]:
    """Targets of all learned Q-nodes, ``(Q, M, plates)`` in nats, by group.

    They come from one triangular solve if all nodes and costs share their plates, else from a backward pass.
    """
    layout, network = signals.layout, signals.layout.network
    if not found or network is None:
        return {}
    plates = {cls.plates for cls in layout.cost_classes} | {cls.spec.plates for cls in layout.classes}
    check_discount(network, gamma)
    is_like = len(plates) == 1 and 2 < len(network.nodes) <= MOST_SOLVED
    if is_like and (gamma == 1.0 or not network.skips_levels):
        return _solved(layout, network, signals.costs[0], found, lam, gamma)
    q, expected = by_name(signals, found, gamma)
    returns = lambda_return(network, q, signals.costs_by_name, lam, gamma, expected)
    return {
        g: torch.stack([returns[node.name].expand(own.value.shape[1:]) for node in own.group.nodes])
        for g, own in found.items()
    }


def _solved(
    layout: Layout,
    network: BackpropQNetwork,
    costs: Tensor,
    found: Mapping[int, Prediction],
    lam: float | Tensor,
    gamma: float,
) -> dict[int, Tensor]:
    """The lambda-returns by one triangular solve."""
    # Costs are in single precision at least, as a solve needs.
    costs = costs.to(common_type(costs, *(part for own in found.values() for part in own[1:])))
    rules = layout.made("rules", costs, lambda: network_rules(network, costs))
    size, places = (len(rules.order), *costs.shape[1:]), dict[int, Tensor]()
    learned, mean, weight = costs.new_zeros(size), costs.new_zeros(size), costs.new_ones(size[0])
    for g, (group, value, ahead) in found.items():
        places[g] = rows = group.places(rules.order, costs)
        learned[rows], mean[rows] = value.to(costs), ahead.to(costs)
        weight = weight.index_fill(0, rows, lam)
    returns = solve_rules(rules, costs, mean, learned, weight, gamma)
    return {g: returns[rows] for g, rows in places.items()}


def by_name(
    signals: Signals, found: Mapping[int, Prediction], gamma: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Q-values, and expected Q-values plus immediate costs, by name, ``(M, plates)``."""
    graph, costs = signals.layout.graph, signals.costs_by_name
    q, expected = {}, {}
    for group, values, means in found.values():
        for node, own, mean in zip(group.nodes, values.unbind(0), means.unbind(0), strict=True):
            plates, q[node.name] = graph.node(node.site).plates, own
            for cost in node.immediate:
                mean = mean + gamma * sum_to_plates(costs[cost], graph.cost(cost).plates, plates)
            expected[node.name] = mean
    return q, expected
