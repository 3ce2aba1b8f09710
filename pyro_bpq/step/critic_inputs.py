r"""What critics see: detached features of each Q-node's scope, the joint state of the scope, and the sites' values."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_bpq.batching.classes import QGroup
from pyro_bpq.batching.site_batch import SiteBatch
from pyro_bpq.critics.bank import Selection, Write
from pyro_bpq.critics.joint import SiteValue, reads_value
from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.base import update_mean

# The need of estimators that take the gradient of a critic with respect to the sampled value.
NEEDS_LEAF = "q_slope"
# Decays of the running moments of context features and of values.
CONTEXT_DECAY, VALUE_DECAY = 0.95, 0.99


def standardised(context: Tensor, selection: Selection) -> tuple[Tensor, tuple[Write, ...]]:
    """Context features in units of their spread in earlier steps, and the moments' writes."""
    if not context.shape[-1]:
        return context, ()
    mean, variance, writes = _moments("context", context, selection, CONTEXT_DECAY)
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
    centre, variance, writes = _moments("value", leaf.detach(), selection, VALUE_DECAY)
    # One row in the first steps has no spread yet; its distribution has.
    scale = torch.maximum(variance, spread.square().mean(1, keepdim=True)).sqrt()
    return SiteValue(powers, (leaf - centre) / scale, (mean - centre) / scale, spread / scale), leaf, writes


def context_of(group: QGroup, batches: Sequence[SiteBatch]) -> Tensor:
    """Detached context features ``(Q, N, F)`` of the Q-nodes of a group."""
    batch, queries = batches[group.c], len(group.nodes)
    lead = (queries, *batch.batch_shape)
    parts = []
    for k, plan in enumerate(group.contexts):
        source = batches[plan.source]
        # Plates that the target is outside of are averaged over.
        dims = [plate.dim - 1 for plate in source.plates if plate not in batch.plates]
        values = source.encoded.mean(dims, keepdim=True) if dims else source.encoded
        padded = torch.cat((values, torch.zeros_like(values[:1])))
        window = group.constant(("window", k), plan.window, values.device, torch.long)
        parts += [padded[window[:, w]].expand(*lead, -1) for w in range(window.shape[1])]
        if plan.rest is not None:
            rest = group.rest(k, values)
            mixed = values.new_zeros(queries, *values.shape[1:]) if rest is None else rest @ values
            parts.append(mixed.expand(*lead, -1))
    if batch.cls.spec.share is not None:
        index = group.constant(
            "index", lambda: [index_features(node.site) for node in group.nodes], batch.like.device, batch.like.dtype
        )
        parts.append(index.reshape(queries, *(1,) * len(batch.batch_shape), -1).expand(*lead, -1))
    if batch.cls.spec.has_params and (batch.cls.spec.components is not None or batch.cls.spec.has_moments):
        parts.append(group.pick(batch.parameters))
    if batch.cls.spec.context:
        parts.append(group.pick(batch.context).to(batch.like.dtype))
    rows = math.prod(batch.batch_shape)
    if not parts:
        return batch.like.new_zeros(queries, rows, 0)
    return torch.cat(parts, -1).reshape(queries, rows, -1)


def index_features(site: str) -> tuple[float, float]:
    """``log(1 + n)`` and ``n / 10`` of the last number ``n`` in a site's name; ``n = 0`` if the name has none."""
    numbers = re.findall(r"\d+", site)
    index = int(numbers[-1]) if numbers else 0
    return math.log1p(index), 0.1 * index


def cells_of(group: QGroup, batches: Sequence[SiteBatch]) -> Tensor:
    """Number of the joint state of the scope without the site, ``(Q, N)``."""
    batch, queries = batches[group.c], len(group.nodes)
    cell = torch.zeros((queries, *batch.batch_shape), dtype=torch.long, device=batch.like.device)
    for k, plan in enumerate(group.contexts):
        source = batches[plan.source]
        if any(plate not in batch.plates for plate in source.plates):
            raise OptionError(
                f"TabularCritic of {list(batch.cls.names)}: its scope has sites in plates that it lacks; "
                "write critic=MLPCritic() instead."
            )
        padded = torch.cat((source.index, torch.zeros_like(source.index[:1])))
        window = group.constant(("window", k), plan.window, cell.device, torch.long)
        for w in range(window.shape[1]):
            for d in range(source.components.size):
                cell = cell * source.components.cardinality + padded[window[:, w]][..., d]
    return cell.reshape(queries, -1)
