r"""The regression of critics on their targets, in units of the targets' running spread."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bpq.critics.bank import Selection, Write
from pyro_bpq.estimators.base import site_mean, update_mean
from pyro_bpq.rollout.distributed import Ranks, joint_mean

# Decay of the running moments of targets.
DECAY = 0.98


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
    selection = critic.selection
    count, mean, old_level, old_step = (
        selection.read(name, target.dtype) for name in ("count", "mean", "spread_level", "spread_advantage")
    )
    own_mean, total = joint_mean(ranks, site_mean(scaled), samples)
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
    writes = [
        *selection.write("mean", new_mean),
        *selection.write("spread_level", level),
        *selection.write("spread_advantage", step),
        *selection.write("rows", selection.read("rows") * 0.0 + total),
        *selection.write("count", selection.read("count") + 1),
    ]
    with torch.no_grad():
        variance = site_mean(_centre(scaled).square())
        # A single particle and row has no variance.
        explained = torch.where(variance > 0, 1.0 - site_mean(_centre(error).square()) / variance, torch.nan)
    # The mean of the ranks' gradients weights all ranks alike, but they may have different numbers of rows.
    weight = 1.0 if ranks is None else samples * ranks.size / total
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
