"""The backward sweep of the paper's Algorithm 1: each critic learns from children that have just learned.

Q-nodes of the same height do not read each other, so they learn together.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_bpq.batching.classes import QGroup
from pyro_bpq.batching.layout import Layout
from pyro_bpq.estimators.base import site_mean
from pyro_bpq.graph.network import QNode
from pyro_bpq.rollout.distributed import writes_of_ranks
from pyro_bpq.step.critic_step import CriticBatch, evaluate_critics
from pyro_bpq.step.signals import Signals
from pyro_bpq.step.values import Learning, Notes
from pyro_bpq.targets.lambda_return import Backups


def sweep(signals: Signals, learning: Learning, notes: Notes) -> None:
    """Takes one step of each critic, in place, from the Q-nodes next to the costs backwards.

    It notes new moments of the context features, and for each site ``"td_loss"``, the squared error before the step, in
    squared nats.
    """
    layout, ranks = signals.layout, learning.ranks
    if layout.network is None:
        return
    backups = Backups(layout.network, signals.costs_by_name, learning.lam, learning.gamma)
    for groups, others in _waves(layout):
        for node in others:
            backups.put(node, backups.target(node), None)
        for group in groups:
            critic = evaluate_critics(signals, group)
            if critic is None:  # not built yet, in a steered program
                continue
            value, nodes = critic.says.value, critic.group.nodes
            targets = torch.stack([backups.target(node).expand(value.shape[1:]) for node in nodes])
            loss = site_mean((value.detach() - targets).square())
            _descend(value / critic.unit, targets / critic.unit, critic, learning)
            again = evaluate_critics(signals, critic.group)
            assert again is not None
            for node, target, own, error in zip(nodes, targets, again.says.value.detach(), loss, strict=True):
                backups.put(node, target, own)
                notes.show(node.site, td_loss=error)
            notes.writes += writes_of_ranks(ranks, critic.writes, value[0].numel())
            notes.writes += critic.selection.write("count", critic.selection.read("count") + 1)


def _descend(value: Tensor, target: Tensor, critic: CriticBatch, learning: Learning) -> None:
    """One step on half the squared error, averaged over all samples; for tables over the samples of each entry."""
    blocks = {key: block for key, block, *_ in critic.selection.parts}
    weights = {f"{key}.{name}": w for key, block in blocks.items() for name, w in block.weights().items()}
    is_table, ranks, error = critic.group.critic.uses_cells, learning.ranks, (value - target).square()
    loss = 0.5 * (error.sum() if is_table else site_mean(error).sum())
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, retain_graph=is_table)
    gradients = {name: g for name, g in zip(weights, found, strict=True) if g is not None}
    # Of a table, the number of samples that read an entry is the derivative of the sum of what was read.
    seen = torch.autograd.grad(value.sum(), [weights[name] for name in gradients]) if is_table else ()
    numbers = dict(zip(gradients, seen, strict=is_table))
    if ranks is not None:
        gradients = ranks.average(gradients, 1 if is_table else value[0].numel())
        numbers = ranks.average(numbers)
    with torch.no_grad():
        for name, gradient in gradients.items():
            if is_table:
                gradient = gradient / torch.where(numbers[name] > 0.0, numbers[name], 1.0)
            weights[name].sub_(gradient, alpha=learning.sweep)


def _waves(layout: Layout) -> Iterator[tuple[list[QGroup], list[QNode]]]:
    """The Q-nodes of a layout by their height above the costs: groups that critics predict, and other Q-nodes."""
    network, height = layout.network, dict[str, int]()
    assert network is not None
    for node in network.nodes:
        height[node.name] = 1 + max((height.get(child, 0) for child in network.children(node.name)), default=0)
    predicted = {node.name for group in layout.groups for node in group.nodes}
    for level in sorted(set(height.values())):
        chosen = [(g, [k for k, n in enumerate(g.nodes) if height[n.name] == level]) for g in layout.groups]
        others = [n for n in network.nodes if height[n.name] == level and n.name not in predicted]
        yield [group.take(places) for group, places in chosen if places], others
