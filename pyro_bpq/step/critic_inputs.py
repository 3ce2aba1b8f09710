"""Inputs of critics in units of their running spread, and the value of the site itself where critics read it."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_bpq.batching.layout import QGroup
from pyro_bpq.batching.site_batch import SiteBatch
from pyro_bpq.critics.bank import Selection, Write
from pyro_bpq.critics.joint import SiteValue
from pyro_bpq.critics.value_critic import reads_value
from pyro_bpq.estimators.base import update_mean

__all__ = ["NEEDS_LEAF", "site_value", "standardised"]

# The need of estimators that take the gradient of a critic with respect to the sampled value.
NEEDS_LEAF = "q_slope"


def standardised(context: Tensor, selection: Selection, decay: float = 0.95) -> tuple[Tensor, tuple[Write, ...]]:
    """Context features in units of their spread in earlier steps, and the moments' writes."""
    if not context.shape[-1]:
        return context, ()
    mean, variance, writes = _moments("context", context, selection, decay)
    # A feature that hardly varied so far is held down, not blown up, when it moves.
    return ((context - mean) / variance.clamp(min=1e-4).sqrt()).clamp(-6.0, 6.0), writes


def _moments(
    name: str, features: Tensor, selection: Selection, decay: float
) -> tuple[Tensor, Tensor, tuple[Write, ...]]:
    """Running mean and variance ``(Q, 1, F)`` of features ``(Q, N, F)`` in earlier steps, and their writes."""
    names = (f"{name}_mean", f"{name}_square", "count")
    mean, square, count = (selection.read(each, features.dtype) for each in names)
    writes = (
        *selection.write(names[0], update_mean(mean, features.mean(1), count, decay)),
        *selection.write(names[1], update_mean(square, features.square().mean(1), count, decay)),
    )
    return mean.unsqueeze(1), (square - mean.square()).unsqueeze(1), writes


def site_value(
    group: QGroup, batch: SiteBatch, selection: Selection
) -> tuple[SiteValue, Tensor | None, tuple[Write, ...]]:
    """What critics that read a value as a whole are told of it, rows flattened.

    Args:
        group: The Q-nodes.
        batch: Tensors of their sites.
        selection: Their rows in the bank.

    Returns:
        The inputs; the leaf ``(Q, N, D)`` that they have a gradient to, or ``None``; the writes of running moments.
    """
    spec, lead = batch.cls.spec, 1 + len(batch.batch_shape)

    def flat(tensor: Tensor) -> Tensor:
        return group.pick(tensor).flatten(1, lead - 1)

    if spec.components is not None:
        return SiteValue(flat(batch.index), flat(batch.probs)), None, ()
    moments, is_read, is_asked = batch.moments, reads_value(spec.critic), NEEDS_LEAF in spec.estimator.needs
    if not is_read and not is_asked:
        return SiteValue(powers=flat(moments.powers)), None, ()
    mean, spread = flat(moments.mean), flat(moments.spread)
    leaf = flat(batch.value.reshape(*batch.value.shape[:lead], -1)).to(mean.dtype).detach()
    leaf = leaf.requires_grad_() if is_asked else leaf
    unit, is_random = (leaf - mean) / spread, flat((moments.powers != 0).any(-1))
    powers = torch.stack((unit, unit.square() - 1.0), -1) * is_random.unsqueeze(-1)
    if not is_read:
        return SiteValue(powers=powers), leaf, ()
    centre, variance, writes = _moments("value", leaf.detach(), selection, 0.99)
    # One row in the first steps has no spread yet; its distribution has.
    scale = torch.maximum(variance, spread.square().mean(1, keepdim=True)).sqrt()
    return SiteValue(None, None, powers, (leaf - centre) / scale, (mean - centre) / scale, spread / scale), leaf, writes
