r"""Evaluates the critics of a step, in one call for like-shaped sites.

They see detached features of each Q-node's scope, the joint state of the scope, and the sites' values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pyro_bpq.critics.bank import Block, CriticBank, Rows, Selection, Write
from pyro_bpq.critics.nets import JointCritic, JointOutput, SiteValue, TabularCritic, reads_value
from pyro_bpq.errors import CriticShapeError, OptionError
from pyro_bpq.estimators.base import update_mean
from pyro_bpq.graph.network import BackpropQNetwork, QNode
from pyro_bpq.step.classes import QGroup
from pyro_bpq.step.layout import Layout
from pyro_bpq.step.site_batch import SiteBatch

if TYPE_CHECKING:
    from pyro_bpq.step.signals import Signals

# The need of estimators that take the gradient of a critic with respect to the sampled value.
NEEDS_LEAF = "q_slope"
# Decays of the running moments of context features and of values.
CONTEXT_DECAY, VALUE_DECAY = 0.95, 0.99


class Values(NamedTuple):
    """What critics say at one rollout, in nats, ``(Q, M, plates)``."""

    level: Tensor  # `V` of a dueling critic, with the critics' gradient; `E[Q]` of a joint critic
    # `A` of a dueling critic, with gradient; the table of the all-action term of a joint one; `(Q, M, plates, D, K)`
    table: Tensor | None
    value: Tensor  # `Q(x)`, with the critics' gradient
    mean: Tensor  # `E[Q]` or an estimate of it, detached
    residual: Tensor | None = None  # `Q(x) - E[Q]`, or as much of it as belongs to the table, of mean zero; detached


class CriticBatch(NamedTuple):
    """Critics of a group of Q-nodes, evaluated at one rollout."""

    group: QGroup  # The Q-nodes
    batch: SiteBatch  # The tensors of their sites
    selection: Selection  # Their rows in the bank
    unit: Tensor  # Scale of the sites (subsampling); targets are divided by it
    says: Values
    writes: list[Write]  # New running moments of the context features
    leaf: Tensor | None  # The sampled values `(Q, N, D)` that `value` has a gradient to, if an estimator asks for it


def evaluate_critics(signals: Signals, group: QGroup, build: bool = False, slow: bool = False) -> CriticBatch | None:
    """Evaluates the critics of a group, or their ``slow`` copies; ``None`` if some are missing and not built.

    In a steered program those are left out that are missing.
    """
    batches, batch, bank = signals.batches, signals.batches[group.c], signals.bank
    selection = bank.select(group.kind, group.keys, partial(_built, group, bank, batch.like) if build else None)
    if selection is None and signals.layout.is_steered:
        # A site must not notice which other sites are missing, because that follows from sampled values.
        group = group.take([i for i, key in enumerate(group.keys) if bank.select(group.kind, (key,), None) is not None])
        selection = bank.select(group.kind, group.keys, None) if group.nodes else None
    if selection is None:
        return None
    context, writes = standardised(context_of(group, batches), selection)
    cells = cells_of(group, batches) if group.shape.cells else None
    is_joint = isinstance(group.critic, JointCritic)
    site, leaf, moved = site_value(group, batch, selection) if is_joint else (None, None, [])
    output = selection.gather(lambda block, rows, at: _forward(block, rows, at, context, cells, site, slow))
    expected = (len(group.nodes), context.shape[1], group.shape.outputs)
    if not is_joint and output.shape != expected:
        raise CriticShapeError(
            f"The critic {group.critic} of sites {[n.site for n in group.nodes]} returned shape {tuple(output.shape)} "
            f"instead of {expected} (sites, rows, 1 + components * cardinality)."
        )
    unit = group.pick(batch.scale)
    says = _in_nats(group, batch, selection, output, unit)
    return CriticBatch(group, batch, selection, unit, says, [*writes, *moved], leaf)


def _in_nats(group: QGroup, batch: SiteBatch, selection: Selection, output: Tensor, unit: Tensor) -> Values:
    """The values from outputs in units of running statistics."""
    spec, lead = batch.cls.spec, (-1, *(1,) * len(batch.batch_shape))
    read = (selection.read(name, batch.like.dtype) for name in ("mean", "spread_level", "spread_advantage"))
    mean, spread, step = (part.reshape(lead) for part in read)
    output = output.reshape(-1, *batch.batch_shape, output.shape[-1])
    level, step = unit * (mean + spread * output[..., 0]), unit * step
    if isinstance(group.critic, JointCritic):
        _, value, centre, own, table = JointOutput.unpacked(output, *spec.parts)
        expected = (level + step * centre).detach()
        value, own = level + step * value, step * own
        # A critic that reads the value does not know E[Q]. Q minus a residual of mean zero has the mean E[Q].
        known = value.detach() - own if reads_value(group.critic) else expected
        return Values(expected, step[..., None, None] * table, value, known, own)
    if spec.components is None:
        return Values(level, None, level, level.detach())
    table = step[..., None, None] * output[..., 1:].reshape(*output.shape[:-1], *spec.parts)
    sampled = table.gather(-1, group.pick(batch.index).unsqueeze(-1)).squeeze(-1)
    expected = (group.pick(batch.probs) * table.detach()).sum(-1)
    value, mean = level + sampled.sum(-1), level.detach() + expected.sum(-1)
    return Values(level, table, value, mean, (sampled.detach() - expected).sum(-1))


def _built(group: QGroup, bank: CriticBank, like: Tensor, keys: tuple[str, ...]) -> Block:
    """New critics of some Q-nodes."""
    n, shape, critic = len(keys), group.shape, group.critic
    try:
        module = critic.build(replace(shape, sites=n), bank.generator(group.kind, keys))
    except OptionError as error:
        raise OptionError(f"Sites {list(keys)}: {error}") from error
    buffers = {"mean": torch.zeros(n), "spread_level": torch.ones(n), "spread_advantage": torch.ones(n)}
    moments = {"context": shape.features, "value": shape.components if reads_value(critic) else 0}
    for name, size in moments.items():
        if size:
            buffers |= {f"{name}_mean": torch.zeros(n, size), f"{name}_square": torch.ones(n, size)}
    buffers |= {"rows": torch.ones(n), "count": torch.zeros(n)}
    return Block(group.kind, keys, module, buffers).to(like.device, like.dtype)


def _forward(
    block: Block, rows: Rows, at: Rows, context: Tensor, cells: Tensor | None, site: SiteValue | None, slow: bool
) -> Tensor:
    critic, weights = (block.slow, block.slow_weights()) if slow else (block.critic, block.weights())
    assert critic is not None
    # The critics' dtype may differ from the rollout's.
    dtype, own = context.dtype, next((w.dtype for w in weights.values() if w.is_floating_point()), context.dtype)
    if at is not None:
        context, cells = context[at], None if cells is None else cells[at]
        site = None if site is None else site.map(lambda part: part[at])
    given = (context.to(own), cells) if site is None else (context.to(own), cells, site.map(lambda part: part.to(own)))
    if rows is None:
        output: Tensor = critic(*given)
    else:
        chosen = {name: weight[rows] for name, weight in weights.items()}
        output = torch.func.functional_call(critic, chosen, given)
    return output.to(dtype)


def standardised(context: Tensor, selection: Selection) -> tuple[Tensor, list[Write]]:
    """Context features in units of their spread in earlier steps, and the moments' writes."""
    if not context.shape[-1]:
        return context, []
    mean, variance, writes = _moments("context", context, selection, CONTEXT_DECAY)
    # A feature that hardly varied so far is held down, not blown up, when it moves.
    return ((context - mean) / variance.clamp(min=1e-4).sqrt()).clamp(-6.0, 6.0), writes


def _moments(name: str, features: Tensor, selection: Selection, decay: float) -> tuple[Tensor, Tensor, list[Write]]:
    """Running mean and variance ``(Q, 1, F)`` of features ``(Q, N, F)`` in earlier steps, and their writes."""
    names = (f"{name}_mean", f"{name}_square", "count")
    mean, square, count = (selection.read(each, features.dtype) for each in names)
    moved = selection.write(names[0], update_mean(mean, features.mean(1), count, decay))
    moved += selection.write(names[1], update_mean(square, features.square().mean(1), count, decay))
    return mean.unsqueeze(1), (square - mean.square()).unsqueeze(1), moved


def site_value(group: QGroup, batch: SiteBatch, selection: Selection) -> tuple[SiteValue, Tensor | None, list[Write]]:
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
        return SiteValue(powers=flat(moments.powers)), None, []
    mean, spread = flat(moments.mean), flat(moments.spread)
    leaf = flat(batch.value.reshape(*batch.value.shape[:lead], -1)).to(mean.dtype).detach()
    leaf = leaf.requires_grad_() if is_asked else leaf
    unit, is_random = (leaf - mean) / spread, flat((moments.powers != 0).any(-1))
    powers = torch.stack((unit, unit.square() - 1.0), -1) * is_random.unsqueeze(-1)
    if not is_read:
        return SiteValue(powers=powers), leaf, []
    centre, variance, writes = _moments("value", leaf.detach(), selection, VALUE_DECAY)
    # One row in the first steps has no spread yet; its distribution has.
    scale = torch.maximum(variance, spread.square().mean(1, keepdim=True)).sqrt()
    return SiteValue(powers, (leaf - centre) / scale, (mean - centre) / scale, spread / scale), leaf, writes


def context_of(group: QGroup, batches: Sequence[SiteBatch]) -> Tensor:
    """Detached context features ``(Q, N, F)`` of the Q-nodes of a group."""
    batch, queries, parts = batches[group.c], len(group.nodes), list[Tensor]()
    spec, like, lead = batch.cls.spec, batch.like, (queries, *batch.batch_shape)
    for k, plan in enumerate(group.contexts):
        source = batches[plan.source]
        # Plates that the target is outside of are averaged over.
        dims = [plate.dim - 1 for plate in source.plates if plate not in batch.plates]
        values = source.encoded.mean(dims, keepdim=True) if dims else source.encoded
        parts += group.window(k, values)
        if plan.rest is not None:
            rest = group.rest(k, values)
            parts.append(values.new_zeros(queries, *values.shape[1:]) if rest is None else rest @ values)
    if spec.share is not None:
        index = group.made("index", like, lambda: like.new_tensor([index_features(n.site) for n in group.nodes]))
        parts.append(index.reshape(queries, *(1,) * len(batch.batch_shape), -1))
    if spec.has_params and spec.shows_value:
        parts.append(group.pick(batch.parameters))
    if spec.context:
        parts.append(group.pick(batch.context).to(like.dtype))
    rows = math.prod(batch.batch_shape)
    if not parts:
        return like.new_zeros(queries, rows, 0)
    return torch.cat([part.expand(*lead, -1) for part in parts], -1).reshape(queries, rows, -1)


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
        for shown in group.window(k, source.index):
            for component in shown.unbind(-1):
                cell = cell * source.components.cardinality + component
    return cell.reshape(queries, -1)


def described(layout: Layout) -> BackpropQNetwork | None:
    """The network of a layout with a text for each learned Q-node, see :attr:`BackpropQNetwork.reads`."""
    network = layout.network
    if network is None:
        return None
    return replace(network, reads=tuple((node.name, _reads(layout, node)) for node in network.learned))


def _reads(layout: Layout, node: QNode) -> str:
    """What the critic of a Q-node reads."""
    spec = layout.specs[node.site]
    critic = spec.critic
    if critic is None:
        return "no critic"
    seen, summed = layout.members(node)
    how = " as it is" if reads_value(critic) else " by its first two powers" if spec.components is None else ""
    others = f"all {len(seen)} others" if len(seen) > 4 and not summed else ", ".join(seen)
    parts = [
        f"{node.site}'s value{how}" if spec.shows_value else "",
        f"{others}, the sum of {summed} more" if summed else others,
    ]
    if isinstance(critic, TabularCritic):
        return f"table of {'; '.join(filter(None, parts)) or 'one number'}"
    parts += [
        f"{node.site}'s distribution" if spec.has_params and spec.shows_value else "",
        f"{spec.context} feature{'s' if spec.context > 1 else ''} of context" if spec.context else "",
        "" if spec.share is None else "the number in its name",
    ]
    return "; ".join(filter(None, parts)) or "nothing: it is one number"
