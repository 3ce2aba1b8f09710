r"""Evaluates the critics of a step, and turns their targets into a regression loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_bpq.bank import Block, CriticBank, Selection, Write
from pyro_bpq.critics import Critic, CriticShape
from pyro_bpq.errors import CriticShapeError, OptionError
from pyro_bpq.estimators.base import site_mean, update_mean
from pyro_bpq.layout import Layout
from pyro_bpq.site_batch import SiteBatch

__all__ = ["CriticBatch", "evaluate_critics", "regression"]


@dataclass(frozen=True)
class CriticBatch:
    """Critics of the Q-nodes of one class of sites, evaluated at one rollout.

    Args:
        selection: Their rows in the bank.
        level: ``V`` in nats, ``(Q, M, plates)``, with the critics' gradient.
        advantage: ``A`` in nats, ``(Q, M, plates, D, K)``, with the critics' gradient, or ``None``.
        unit: Scale of the sites (subsampling), which targets are divided by.
        writes: New running moments of the context features.
    """

    selection: Selection
    level: Tensor
    advantage: Tensor | None
    unit: Tensor
    writes: tuple[Write, ...] = ()


def evaluate_critics(
    layout: Layout, c: int, batches: Sequence[SiteBatch], bank: CriticBank, build: bool, slow: bool = False
) -> CriticBatch | None:
    """Evaluates all critics of a class in one batched call.

    Args:
        layout: The layout.
        c: Position of the class.
        batches: Stacked tensors of all classes.
        bank: Holds the critics.
        build: Whether missing critics may be built.
        slow: Whether to evaluate their slow copies instead.

    Returns:
        The evaluated critics; ``None`` if the class has none, or they may not be built.
    """
    nodes, batch = layout.q_nodes[c], batches[c]
    if not nodes:
        return None
    spec = batch.cls.spec
    split = spec.components
    shape = CriticShape(
        sites=len(nodes),
        features=layout.num_features(c),
        components=split.size if split else 0,
        cardinality=split.cardinality if split else 0,
        cells=layout.cells(c) if spec.critic is not None and spec.critic.uses_cells else 0,
    )
    like = batch.probs
    keys = tuple(_key(node.name, node.site, spec.share) for node in nodes)
    make = _builder(spec.critic, shape, bank, like) if build else None
    selection = bank.select(_kind(spec.critic, shape), keys, make)
    if selection is None:
        return None
    context, writes = _standardised(_context(layout, c, batches), selection)
    cells = _cells(layout, c, batches) if shape.cells else None
    output = selection.gather(lambda block, rows, at: _forward(block, rows, at, context, cells, slow))
    if output.shape != (len(nodes), context.shape[1], shape.outputs):
        raise CriticShapeError(
            f"The critic {spec.critic} of sites {[n.site for n in nodes]} returned shape "
            f"{tuple(output.shape)} instead of {(len(nodes), context.shape[1], shape.outputs)} "
            "(sites, rows, 1 + components * cardinality)."
        )
    return replace(_dueling(layout, c, batch, selection, output), writes=writes)


def _standardised(context: Tensor, selection: Selection, decay: float = 0.95) -> tuple[Tensor, tuple[Write, ...]]:
    """Context features in units of their spread in earlier steps, and the moments' writes."""
    if not context.shape[-1]:
        return context, ()
    mean, square, count = (selection.read(name) for name in ("context_mean", "context_square", "count"))
    writes = (
        *selection.write("context_mean", update_mean(mean, context.mean(1), count, decay)),
        *selection.write("context_square", update_mean(square, context.square().mean(1), count, decay)),
    )
    # A feature that hardly varied so far is held down, not blown up, when it moves.
    spread = (square - mean.square()).clamp(min=1e-4).sqrt()
    return ((context - mean.unsqueeze(1)) / spread.unsqueeze(1)).clamp(-6.0, 6.0), writes


def _dueling(layout: Layout, c: int, batch: SiteBatch, selection: Selection, output: Tensor) -> CriticBatch:
    sites = [layout.place[node.site][1] for node in layout.q_nodes[c]]
    unit = batch.scale if layout.membership(c, batch.probs) is None else batch.scale[sites]
    lead = (-1, *(1,) * len(batch.batch_shape))
    mean, spread, step = (selection.read(name).reshape(lead) for name in ("mean", "spread_level", "spread_advantage"))
    level = unit * (mean + spread * output[..., 0].reshape(-1, *batch.batch_shape))
    if batch.cls.spec.components is None:
        return CriticBatch(selection, level, None, unit)
    split = batch.components
    advantage = output[..., 1:].reshape(-1, *batch.batch_shape, split.size, split.cardinality)
    return CriticBatch(selection, level, (unit * step)[..., None, None] * advantage, unit)


def regression(
    critic: CriticBatch,
    value: Tensor,
    target: Tensor,
    level_weight: float,
    decay: float = 0.98,
    chosen: Tensor | None = None,
) -> tuple[Tensor, list[Write], dict[str, Tensor]]:
    r"""Squared error of the critics, in units of their targets' spread.

    With several particles, differences within a data point count fully and the level ``level_weight``:

        L = |δ - mean_m δ|² / σ_A² + w |mean_m δ|² / σ_V²,   δ = q - target

    Args:
        critic: The evaluated critics.
        value: Their value at the sample, ``(Q, M, plates)``, in nats, with gradient.
        target: Targets of the same shape, detached.
        level_weight: Weight ``w``.
        decay: Weight of the past in the running mean and spreads.
        chosen: Which Q-nodes learn, ``(Q,)`` of zeros and ones; ``None`` for all.

    Returns:
        The loss (a scalar), the writes of the running statistics, and diagnostics per Q-node.
    """
    particles = target.shape[1]
    error, scaled = (value - target) / critic.unit, target / critic.unit
    read = critic.selection.read
    count, mean = read("count"), read("mean")
    new_mean = update_mean(mean, site_mean(scaled), count, decay)
    lead = (-1, *(1,) * (target.dim() - 1))
    if particles > 1:
        row = scaled.mean(1, keepdim=True)
        inner = (scaled - row).square() * (particles / (particles - 1.0))
        outer = row - new_mean.reshape(lead)
    else:
        # Never the critic's own error: a scale that it moves itself feeds back.
        outer = scaled - new_mean.reshape(lead)
        inner = outer.square()
    level = update_mean(read("spread_level").square(), site_mean(outer.square()), count, decay).sqrt()
    step = update_mean(read("spread_advantage").square(), site_mean(inner), count, decay).sqrt()
    floor = 1e-3 * (new_mean.abs() + level) + torch.finfo(target.dtype).tiny
    step = torch.maximum(step, floor)
    # The mean over particles moves less than they do: in its own unit it would drown their differences.
    level = torch.maximum(level, step)
    loss = _loss(error, level.reshape(lead), step.reshape(lead), level_weight)
    # The first step only sets the statistics: its error is that of an unknown level.
    seen = (count > 0).to(loss.dtype)
    seen = seen if chosen is None else seen * chosen
    writes = [
        *critic.writes,
        *critic.selection.write("mean", new_mean),
        *critic.selection.write("spread_level", level),
        *critic.selection.write("spread_advantage", step),
        *critic.selection.write("count", count + 1),
    ]
    with torch.no_grad():
        explained = 1.0 - site_mean(_centre(error).square()) / site_mean(_centre(scaled).square()).clamp(min=1e-30)
    return (loss * seen).sum(), writes, {"td_loss": loss.detach(), "explained": explained}


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


def _key(name: str, site: str, share: str | None) -> str:
    return name if share is None else share + name[len(site) :]


def _kind(critic: Critic | None, shape: CriticShape) -> str:
    return f"critic {critic} {shape.features} {shape.components} {shape.cardinality} {shape.cells}"


def _builder(
    critic: Critic | None, shape: CriticShape, bank: CriticBank, like: Tensor
) -> Callable[[tuple[str, ...]], Block]:
    assert critic is not None

    def make(keys: tuple[str, ...]) -> Block:
        own = CriticShape(len(keys), shape.features, shape.components, shape.cardinality, shape.cells)
        try:
            module = critic.build(own, bank.generator(_kind(critic, shape), keys))
        except OptionError as error:
            raise OptionError(f"Sites {list(keys)}: {error}") from error
        ones = torch.ones(len(keys))
        buffers = {"mean": 0 * ones, "spread_level": ones.clone(), "spread_advantage": ones.clone()}
        if shape.features:
            buffers["context_mean"] = torch.zeros(len(keys), shape.features)
            buffers["context_square"] = torch.ones(len(keys), shape.features)
        return Block(_kind(critic, shape), keys, module, {**buffers, "count": 0 * ones}).to(like.device, like.dtype)

    return make


def _forward(
    block: Block, rows: Tensor | None, at: Tensor | None, context: Tensor, cells: Tensor | None, slow: bool = False
) -> Tensor:
    critic, weights = (block.slow, block.slow_weights()) if slow else (block.critic, block.weights())
    assert critic is not None
    if at is not None:
        context, cells = context[at], None if cells is None else cells[at]
    if rows is None:
        return critic(context, cells)
    chosen = {name: weight[rows] for name, weight in weights.items()}
    return torch.func.functional_call(critic, chosen, (context, cells))


def _pool(value: Tensor, source: SiteBatch, target: SiteBatch) -> Tensor:
    """Averages over the plates that the target is outside of."""
    dims = [plate.dim - 1 for plate in source.plates if plate not in target.plates]
    return value.mean(dims, keepdim=True) if dims else value


def _context(layout: Layout, c: int, batches: Sequence[SiteBatch]) -> Tensor:
    """Detached context features ``(Q, N, F)`` of the Q-nodes of a class."""
    batch, queries = batches[c], len(layout.q_nodes[c])
    lead = (queries, *batch.batch_shape)
    parts = []
    for plan in layout.contexts[c]:
        source = batches[plan.source]
        values = _pool(source.encoded, source, batch)
        padded = torch.cat((values, torch.zeros_like(values[:1])))
        window = torch.as_tensor(plan.window, device=values.device)
        parts += [padded[window[:, w]].expand(*lead, -1) for w in range(window.shape[1])]
        if plan.rest is not None:
            rest = torch.as_tensor(plan.rest, dtype=values.dtype, device=values.device)
            mixed = (rest @ values.flatten(1)).reshape(queries, *values.shape[1:])
            parts.append(mixed.expand(*lead, -1))
    sites = [layout.place[node.site][1] for node in layout.q_nodes[c]]
    if batch.cls.spec.has_params and batch.cls.spec.components is not None:
        parts.append(batch.parameters[sites])
    if batch.cls.spec.context:
        parts.append(batch.context[sites].to(batch.probs.dtype))
    rows = 1
    for size in batch.batch_shape:
        rows *= size
    if not parts:
        return batch.probs.new_zeros(queries, rows, 0)
    return torch.cat(parts, -1).reshape(queries, rows, -1)


def _cells(layout: Layout, c: int, batches: Sequence[SiteBatch]) -> Tensor:
    """Joint state of the rest of the scope, ``(Q, N)``."""
    batch, queries = batches[c], len(layout.q_nodes[c])
    cell = torch.zeros((queries, *batch.batch_shape), dtype=torch.long, device=batch.probs.device)
    for plan in layout.contexts[c]:
        source = batches[plan.source]
        if any(plate not in batch.plates for plate in source.plates):
            raise OptionError(
                f"TabularCritic of {list(batch.cls.names)}: its scope has sites in plates that it lacks; "
                "write critic=MLPCritic() instead."
            )
        padded = torch.cat((source.index, torch.zeros_like(source.index[:1])))
        window = torch.as_tensor(plan.window, device=cell.device)
        for w in range(window.shape[1]):
            for d in range(source.components.size):
                cell = cell * source.components.cardinality + padded[window[:, w]][..., d]
    return cell.reshape(queries, -1)
