"""Lambda-returns of the stacked Q-nodes of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyro_bpq.batching.classes import QGroup
from pyro_bpq.batching.layout import Layout
from pyro_bpq.rollout.runs import sum_to_plates
from pyro_bpq.rollout.sums import common_type
from pyro_bpq.targets.lambda_return import Rules, check_discount, lambda_return, network_rules, solve_rules


def lambda_returns(
    layout: Layout,
    costs: Sequence[Tensor],
    groups: Mapping[int, QGroup],
    values: Mapping[int, Tensor],
    ahead: Mapping[int, Tensor],
    lam: float | Tensor,
    gamma: float,
) -> dict[int, Tensor]:
    """Targets of all learned Q-nodes, ``(Q, M, plates)`` in nats, by group.

    They come from triangular solves if all nodes and costs share their plates, else from a backward pass. ``values``
    are ``q_X(x)``, detached; ``ahead`` are ``E_X[q_X]`` plus the correction of the (discounted) exact immediate costs
    to their expectation.
    """
    assert layout.network is not None
    plates = {cls.plates for cls in layout.cost_classes} | {cls.spec.plates for cls in layout.classes}
    check_discount(layout.network, gamma)
    if len(plates) == 1 and len(layout.network.nodes) > 2 and (gamma == 1.0 or not layout.network.skips_levels):
        return _solve(layout, costs[0], groups, values, ahead, lam, gamma)
    q, roots, expected = by_name(layout, costs, groups, values, ahead, gamma)
    returns = lambda_return(layout.network, q, roots, lam, gamma, expected)
    return {
        g: torch.stack([returns[node.name].expand(value.shape[1:]) for node in groups[g].nodes])
        for g, value in values.items()
    }


def by_name(
    layout: Layout,
    costs: Sequence[Tensor],
    groups: Mapping[int, QGroup],
    values: Mapping[int, Tensor],
    ahead: Mapping[int, Tensor],
    gamma: float,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Q-values, costs, and expected Q-values plus immediate costs, by name, ``(M, plates)``; see lambda_returns."""
    roots = costs_by_name(layout, costs)
    q, expected = {}, {}
    for g, value in values.items():
        for node, own, mean in zip(groups[g].nodes, value.unbind(0), ahead[g].unbind(0), strict=True):
            q[node.name] = own
            expected[node.name] = _with_immediate(layout, node.name, mean, roots, gamma)
    return q, roots, expected


def costs_by_name(layout: Layout, costs: Sequence[Tensor]) -> dict[str, Tensor]:
    """The costs ``(M, plates)`` by name, from the stacked costs of each class."""
    pairs = zip(layout.cost_classes, costs, strict=True)
    return {name: cost for cls, stacked in pairs for name, cost in zip(cls.names, stacked.unbind(0), strict=True)}


def _with_immediate(layout: Layout, name: str, mean: Tensor, roots: Mapping[str, Tensor], gamma: float) -> Tensor:
    assert layout.network is not None
    graph, node = layout.graph, layout.network.q_node(name)
    plates = graph.node(node.site).plates
    for cost in node.immediate:
        cost_here = sum_to_plates(roots[cost], graph.cost(cost).plates, plates)
        mean = mean + (cost_here if gamma == 1.0 else gamma * cost_here)
    return mean


def _solve(
    layout: Layout,
    costs: Tensor,
    groups: Mapping[int, QGroup],
    values: Mapping[int, Tensor],
    ahead: Mapping[int, Tensor],
    lam: float | Tensor,
    gamma: float,
) -> dict[int, Tensor]:
    order = layout.rule_order
    # Costs are in single precision at least, as a solve needs.
    costs = costs.to(common_type(costs, *values.values(), *ahead.values()))
    size = (len(order), *costs.shape[1:])
    learned, mean = costs.new_zeros(size), costs.new_zeros(size)
    weight = costs.new_ones(len(order))
    where = {}
    for g, value in values.items():
        places = [order[node.name] for node in groups[g].nodes]
        rows = groups[g].constant("order", places, costs.device, torch.long)
        learned[rows], mean[rows] = value.to(costs), ahead[g].to(costs)
        where[g], weight = rows, weight.index_fill(0, rows, lam)
    returns = solve_rules(rules_of(layout, costs), costs, mean, learned, weight, gamma)
    return {g: returns[rows] for g, rows in where.items()}


def rules_of(layout: Layout, like: Tensor) -> Rules:
    """The network's rules, with dtype and device of ``like``."""
    assert layout.network is not None
    key = (like.dtype, like.device)
    if key not in layout.rules:
        layout.rules[key] = network_rules(layout.network, layout.rule_order, like)
    found: Rules = layout.rules[key]
    return found
