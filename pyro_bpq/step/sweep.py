"""The backward sweep of the paper's Algorithm 1: each critic learns from children that have just learned.

Q-nodes of the same height do not read each other, so they learn together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_bpq.batching.classes import QGroup
from pyro_bpq.batching.layout import Layout
from pyro_bpq.critics.bank import CriticBank, Write
from pyro_bpq.estimators.base import site_mean
from pyro_bpq.graph.network import QNode
from pyro_bpq.rollout.distributed import Ranks, writes_of_ranks
from pyro_bpq.step.critic_step import CriticBatch, evaluate_critics
from pyro_bpq.step.returns import costs_by_name
from pyro_bpq.step.signals import Signals
from pyro_bpq.targets.lambda_return import Backups


class Wave(NamedTuple):
    """Q-nodes of the same height: groups that critics predict, and others, whose targets pass through."""

    groups: tuple[QGroup, ...]
    others: tuple[QNode, ...]


def sweep(
    signals: Signals, bank: CriticBank, rate: float, lam: float | Tensor, gamma: float, ranks: Ranks | None = None
) -> tuple[list[Write], dict[str, dict[str, Tensor]]]:
    """Takes one step of size ``rate`` of each critic, in place, from the Q-nodes next to the costs backwards.

    Returns:
        New moments of the context features, to be committed after the step; and by site the ``"td_loss"``, the squared
        error before the step, in squared nats.
    """
    layout = signals.layout
    writes: list[Write] = []
    info: dict[str, dict[str, Tensor]] = {}
    if layout.network is None:
        return writes, info
    backups = Backups(layout.network, costs_by_name(layout, signals.costs), lam, gamma)
    for wave in _waves(layout):
        for node in wave.others:
            backups.put(node, backups.target(node), None)
        for group in wave.groups:
            critic = evaluate_critics(group, signals.batches, bank, False, is_steered=layout.is_steered)
            if critic is None:  # not built yet, in a steered program
                continue
            value = critic.value
            targets = [backups.target(node).expand(value.shape[1:]) for node in critic.group.nodes]
            loss = site_mean((value.detach() - torch.stack(targets)).square())
            _descend(value / critic.unit, torch.stack(targets) / critic.unit, critic, signals, rate, ranks)
            again = evaluate_critics(critic.group, signals.batches, bank, False)
            assert again is not None
            for node, target, own, error in zip(critic.group.nodes, targets, again.value.detach(), loss, strict=True):
                backups.put(node, target, own)
                info.setdefault(node.site, {})["td_loss"] = error
            writes += writes_of_ranks(ranks, critic.writes, value[0].numel())
            writes += critic.selection.write("count", critic.selection.read("count") + 1)
    return writes, info


def _descend(
    value: Tensor, target: Tensor, critic: CriticBatch, signals: Signals, rate: float, ranks: Ranks | None
) -> None:
    """One step on half the squared error, averaged over all samples; for tables over the samples of each entry."""
    blocks = {key: block for key, block, *_ in critic.selection.parts}
    weights = {f"{key}.{name}": w for key, block in blocks.items() for name, w in block.weights().items()}
    spec, leaves = signals.layout.classes[critic.group.c].spec, list(weights.values())
    is_table = spec.critic is not None and spec.critic.uses_cells
    error = (value - target).square()
    loss = 0.5 * (error.sum() if is_table else site_mean(error).sum())
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=is_table)
    gradients = {name: g for name, g in zip(weights, found, strict=True) if g is not None}
    if is_table:
        # The number of samples that read an entry is the derivative of the sum of what was read.
        seen = torch.autograd.grad(value.sum(), [weights[name] for name in gradients])
        numbers = dict(zip(gradients, seen, strict=True))
        if ranks is not None:
            gradients, numbers = ranks.average(gradients), ranks.average(numbers)
        gradients = {name: g / torch.where(numbers[name] > 0.0, numbers[name], 1.0) for name, g in gradients.items()}
    elif ranks is not None:
        gradients = ranks.average(gradients, value[0].numel())
    with torch.no_grad():
        for name, gradient in gradients.items():
            weights[name].sub_(gradient, alpha=rate)


def _waves(layout: Layout) -> tuple[Wave, ...]:
    """The Q-nodes of a layout by their height above the costs."""
    network = layout.network
    assert network is not None
    height: dict[str, int] = {}
    for node in network.nodes:
        height[node.name] = 1 + max((height.get(child, 0) for child in network.children(node.name)), default=0)
    predicted = {node.name for group in layout.groups for node in group.nodes}
    waves = []
    for level in sorted(set(height.values())):
        chosen = [(g, [k for k, n in enumerate(g.nodes) if height[n.name] == level]) for g in layout.groups]
        others = tuple(n for n in network.nodes if height[n.name] == level and n.name not in predicted)
        waves.append(Wave(tuple(group.take(places) for group, places in chosen if places), others))
    return tuple(waves)
