r"""The backward sweep of the paper's Algorithm 1: each critic learns from children that have just learned.

Q-nodes of the same height do not read each other, so they learn at once: a batched call for each class of sites.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_bpq.batching.layout import Layout, QGroup
from pyro_bpq.critics.bank import CriticBank, Write
from pyro_bpq.estimators.base import site_mean
from pyro_bpq.graph.network import QNode
from pyro_bpq.rollout.distributed import Ranks
from pyro_bpq.step.critic_step import CriticBatch, evaluate_critics
from pyro_bpq.step.signals import Signals
from pyro_bpq.targets.lambda_return import Backups

__all__ = ["Wave", "sweep"]


class Wave(NamedTuple):
    """Q-nodes of the same height.

    Args:
        groups: Those that critics predict.
        others: Those that nobody predicts: their targets pass through.
    """

    groups: tuple[QGroup, ...]
    others: tuple[QNode, ...]


def sweep(
    signals: Signals, bank: CriticBank, rate: float, lam: float, gamma: float, ranks: Ranks | None = None
) -> tuple[list[Write], dict[str, dict[str, Tensor]]]:
    r"""Takes one step of each critic, in place, from the Q-nodes next to the costs to those before them.

    Args:
        signals: The tensors of the rollout; their critics are built.
        bank: Holds the critics.
        rate: Step size.
        lam: Weight of the return against the critic.
        gamma: Discount per level.
        ranks: The processes that learn together.

    Returns:
        New moments of the context features, to be committed after the step; and diagnostics by site: ``td_loss``, the
        squared error before the step, in squared nats.
    """
    layout = signals.layout
    writes: list[Write] = []
    info: dict[str, dict[str, Tensor]] = {}
    if layout.network is None:
        return writes, info
    costs = {
        name: cost
        for cls, stacked in zip(layout.cost_classes, signals.costs, strict=True)
        for name, cost in zip(cls.names, stacked.unbind(0), strict=True)
    }
    backups = Backups(layout.network, costs, lam, gamma)
    for wave in _waves(layout):
        for node in wave.others:
            backups.put(node, backups.target(node), None)
        for group in wave.groups:
            critic = evaluate_critics(layout, group, signals.batches, bank, False)
            # Groups in steered programs may have lost nodes that are not built yet.
            if critic is None:
                continue
            value, _ = signals.value_and_mean(critic)
            targets = [backups.target(node).expand(value.shape[1:]) for node in critic.group.nodes]
            error = site_mean(((value - torch.stack(targets)) / critic.unit).square())
            _descend(0.5 * error.sum(), critic, rate, ranks)
            learned, _ = signals.value_and_mean(_again(signals, critic, bank))
            for node, target, own, loss in zip(critic.group.nodes, targets, learned.detach(), error, strict=True):
                backups.put(node, target, own)
                info.setdefault(node.site, {})["td_loss"] = loss.detach()
            writes += critic.writes
            writes += critic.selection.write("count", critic.selection.read("count") + 1)
    return writes, info


def _again(signals: Signals, critic: CriticBatch, bank: CriticBank) -> CriticBatch:
    found = evaluate_critics(signals.layout, critic.group, signals.batches, bank, False)
    assert found is not None
    return found


def _descend(loss: Tensor, critic: CriticBatch, rate: float, ranks: Ranks | None) -> None:
    blocks = {key: block for key, block, *_ in critic.selection.parts}
    weights = {f"{key}.{name}": w for key, block in blocks.items() for name, w in block.weights().items()}
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    gradients = {name: g for name, g in zip(weights, found, strict=True) if g is not None}
    gradients = gradients if ranks is None else ranks.average(gradients)
    with torch.no_grad():
        for name, gradient in gradients.items():
            weights[name].sub_(gradient, alpha=rate)


def _waves(layout: Layout) -> tuple[Wave, ...]:
    """The Q-nodes of a layout by their height above the costs; found once."""
    if not layout.waves:
        network = layout.network
        assert network is not None
        height: dict[str, int] = {}
        for node in network.nodes:
            height[node.name] = 1 + max((height.get(child, 0) for child in network.children(node.name)), default=0)
        predicted = {node.name for group in layout.groups for node in group.nodes}
        for level in sorted(set(height.values())):
            groups = []
            for group in layout.groups:
                chosen = [k for k, node in enumerate(group.nodes) if height[node.name] == level]
                if chosen:
                    groups.append(group.take(chosen))
            others = [n for n in network.nodes if height[n.name] == level and n.name not in predicted]
            layout.waves.append(Wave(tuple(groups), tuple(others)))
    return tuple(layout.waves)
