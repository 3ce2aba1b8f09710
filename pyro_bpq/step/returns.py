"""Lambda-returns of the stacked Q-nodes of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyro_bpq.batching.classes import QGroup
from pyro_bpq.batching.layout import Layout
from pyro_bpq.rollout.runs import sum_to_plates
from pyro_bpq.rollout.sums import common_type
from pyro_bpq.targets.lambda_return import check_discount, lambda_return, network_rules, solve_rules

# Largest number of Q-nodes whose rules are solved as one dense matrix.
MOST_SOLVED = 2048


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

    They come from one triangular solve if all nodes and costs share their plates, else from a backward pass. ``values``
    are ``q_X(x)``, detached; ``ahead`` are ``E_X[q_X]`` plus the correction of the (discounted) exact immediate costs
    to their expectation.
    """
    assert layout.network is not None
    plates = {cls.plates for cls in layout.cost_classes} | {cls.spec.plates for cls in layout.classes}
    check_discount(layout.network, gamma)
    is_like = len(plates) == 1 and 2 < len(layout.network.nodes) <= MOST_SOLVED
    if is_like and (gamma == 1.0 or not layout.network.skips_levels):
        # Costs are in single precision at least, as a solve needs.
        stacked = costs[0].to(common_type(costs[0], *values.values(), *ahead.values()))
        size = (len(layout.rule_order), *stacked.shape[1:])
        learned, mean, weight = stacked.new_zeros(size), stacked.new_zeros(size), stacked.new_ones(size[0])
        where = {}
        for g, value in values.items():
            places = [layout.rule_order[node.name] for node in groups[g].nodes]
            where[g] = rows = groups[g].constant("order", places, stacked.device, torch.long)
            learned[rows], mean[rows] = value.to(stacked), ahead[g].to(stacked)
            weight = weight.index_fill(0, rows, lam)
        key = (stacked.dtype, stacked.device)
        if key not in layout.rules:
            layout.rules[key] = network_rules(layout.network, layout.rule_order, stacked)
        returns = solve_rules(layout.rules[key], stacked, mean, learned, weight, gamma)
        return {g: returns[rows] for g, rows in where.items()}
    q, roots, expected = by_name(layout, costs, groups, values, ahead, gamma)
    found = lambda_return(layout.network, q, roots, lam, gamma, expected)
    return {
        g: torch.stack([found[node.name].expand(value.shape[1:]) for node in groups[g].nodes])
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
    assert layout.network is not None
    graph, roots = layout.graph, costs_by_name(layout, costs)
    q, expected = {}, {}
    for g, value in values.items():
        for node, own, mean in zip(groups[g].nodes, value.unbind(0), ahead[g].unbind(0), strict=True):
            plates, q[node.name] = graph.node(node.site).plates, own
            for cost in node.immediate:
                mean = mean + gamma * sum_to_plates(roots[cost], graph.cost(cost).plates, plates)
            expected[node.name] = mean
    return q, roots, expected


def costs_by_name(layout: Layout, costs: Sequence[Tensor]) -> dict[str, Tensor]:
    """The costs ``(M, plates)`` by name, from the stacked costs of each class."""
    pairs = zip(layout.cost_classes, costs, strict=True)
    return {name: cost for cls, stacked in pairs for name, cost in zip(cls.names, stacked.unbind(0), strict=True)}
