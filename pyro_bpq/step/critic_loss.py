r"""The regression of critics on their targets, in units of the targets' running spread."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.critics.blocks import Selection, Write
from pyro_bpq.estimators.base import site_mean, update_mean
from pyro_bpq.rollout.distributed import Ranks, joint_mean, writes_of_ranks
from pyro_bpq.step.returns import values_and_targets
from pyro_bpq.step.signals import Signals
from pyro_bpq.step.values import Learning, Notes, total

# Decay of the running moments of targets.
DECAY = 0.98
# Value and target of the Q-nodes of each group.
Pairs = Mapping[int, tuple[Tensor, Tensor]]


def critic_loss(
    signals: Sequence[Signals], learning: Learning, chosen: Container[str] | None = None, notes: Notes | None = None
) -> Tensor | None:
    """Regression loss of the ``chosen`` Q-nodes' critics (``None``: of all); ``None`` if none learns.

    There is one of ``signals`` for all particles, or one for each in steered programs. Nothing is built or written:
    new running statistics and diagnostics of sites are added to ``notes``.
    """
    notes = notes or Notes()
    found: dict[Any, list[tuple[CriticRows, Tensor, Tensor]]] = {}
    for one in signals:
        for g, (value, target) in values_and_targets(one, learning).items():
            critic, group = one.critics[g], one.critics[g].group
            notes.writes += writes_of_ranks(learning.ranks, critic.writes, value[0].numel())
            weight = learning.level_weight if critic.batch.cls.spec.has_params else 1.0
            # Particles of their own may have different Q-nodes.
            alone = len(signals) > 1
            for at in [slice(i, i + 1) for i in range(len(group.nodes))] if alone else [slice(None)]:
                nodes, selection = group.nodes[at], one.bank.select(group.kind, group.keys[at], None)
                assert selection is not None
                rows = CriticRows(tuple(node.site for node in nodes), selection, critic.unit[at])
                key = (tuple(node.name for node in nodes), group.kind, value.shape[2:], weight)
                found.setdefault(key, []).append((rows, value[at], target[at]))
    losses = []
    for (names, _, _, weight), parts in found.items():
        learns = [chosen is None or name in chosen for name in names]
        if not any(learns):
            continue
        all_rows, values, targets = zip(*parts, strict=True)
        rows = replace(all_rows[0], unit=torch.cat([each.unit for each in all_rows], 1))
        value, target = torch.cat(values, 1), torch.cat(targets, 1)
        mask = None if all(learns) else value.new_tensor(learns)
        loss, writes, diagnostics = regression(rows, value, target, weight, chosen=mask, ranks=learning.ranks)
        losses.append(loss)
        notes.writes += writes
        for i, site in enumerate(rows.sites):
            notes.show(site, **{name: values[i] for name, values in diagnostics.items()})
    return total(losses) if losses else None


@dataclass(frozen=True)
class CriticRows:
    """Critics in a regression."""

    sites: tuple[str, ...]  # Site of each
    selection: Selection  # Their rows in the bank
    unit: Tensor  # Scale of the sites (subsampling), broadcastable to `(Q, M, plates)`; targets are divided by it


def regression(
    critic: CriticRows,
    value: Tensor,
    target: Tensor,
    level_weight: float,
    chosen: Tensor | None = None,
    ranks: Ranks | None = None,
) -> tuple[Tensor, list[Write], dict[str, Tensor]]:
    """Squared error of the critics, in units of their targets' spread.

    With several particles, differences within a data point count fully and the level ``level_weight``:

        L = |δ - mean_m δ|² / σ_A² + w |mean_m δ|² / σ_V²,   δ = q - target

    ``value`` and ``target`` are in nats, ``(Q, M, plates)``. ``chosen`` holds a one for each Q-node that learns, else a
    zero. The mean of the losses of several processes, ``ranks``, is that of the joint batch. The results are the loss,
    the writes of the running statistics, and diagnostics per Q-node.
    """
    particles, samples = target.shape[1], value[0].numel()
    error, scaled = (value - target) / critic.unit, target / critic.unit
    selection, names = critic.selection, ("count", "mean", "spread_level", "spread_advantage")
    count, mean, old_level, old_step = (selection.read(name, target.dtype) for name in names)
    own_mean, number = joint_mean(ranks, site_mean(scaled), samples)
    new_mean = update_mean(mean, own_mean, count, DECAY)
    lead = (-1, *(1,) * (target.dim() - 1))
    if particles > 1:
        row = scaled.mean(1, keepdim=True)
        inner = (scaled - row).square() * (particles / (particles - 1.0))
        outer = row - new_mean.reshape(lead)
    else:
        # Not the critic's own error, because a scale that the critic moves itself feeds back.
        outer = scaled - new_mean.reshape(lead)
        inner = outer.square()
    squares, _ = joint_mean(ranks, torch.stack((site_mean(outer.square()), site_mean(inner))), samples)
    level = update_mean(old_level.square(), squares[0], count, DECAY).sqrt()
    step = update_mean(old_step.square(), squares[1], count, DECAY).sqrt()
    floor = 1e-3 * (new_mean.abs() + level) + torch.finfo(target.dtype).tiny
    step = torch.maximum(step, floor)
    # The mean over particles varies less than the particles. In its own unit it would drown their differences.
    level = torch.maximum(level, step)
    loss = _loss(error, level.reshape(lead), step.reshape(lead), level_weight)
    # The first step only sets the statistics, because the level is still unknown.
    seen = (count > 0).to(loss.dtype)
    seen = seen if chosen is None else seen * chosen
    new = {"mean": new_mean, "spread_level": level, "spread_advantage": step}
    new |= {"rows": selection.read("rows") * 0.0 + number, "count": selection.read("count") + 1}
    writes = [write for name, found in new.items() for write in selection.write(name, found)]
    with torch.no_grad():
        variance = site_mean(_centre(scaled).square())
        # A single particle and row has no variance.
        explained = torch.where(variance > 0, 1.0 - site_mean(_centre(error).square()) / variance, torch.nan)
    # The mean of the ranks' gradients weights all ranks alike, but they may have different numbers of rows.
    weight = 1.0 if ranks is None else samples * ranks.size / number
    return (weight * loss * seen).sum(), writes, {"td_loss": loss.detach(), "explained": explained}


def _loss(error: Tensor, level: Tensor, step: Tensor, weight: float) -> Tensor:
    particles = error.shape[1]
    if particles == 1:
        return site_mean((error / step).square())
    row = error.mean(1, keepdim=True)
    inner = site_mean(((error - row) / step).square()) * (particles / (particles - 1.0))
    return inner + weight * site_mean((row / level).square())


def _centre(value: Tensor) -> Tensor:
    if value.shape[1] > 1:
        return value - value.mean(1, keepdim=True)
    return value - site_mean(value).reshape(-1, *(1,) * (value.dim() - 1))
