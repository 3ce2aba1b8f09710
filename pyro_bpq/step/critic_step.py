r"""Evaluates the critics of a step, and turns their targets into a regression loss."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_bpq.batching.layout import Layout, QGroup
from pyro_bpq.batching.site_batch import SiteBatch
from pyro_bpq.critics.bank import Block, CriticBank, Selection, Write
from pyro_bpq.critics.joint import JointCritic, JointOutput, SiteValue
from pyro_bpq.critics.nets import Critic, CriticShape
from pyro_bpq.critics.value_critic import reads_value
from pyro_bpq.errors import CriticShapeError, OptionError
from pyro_bpq.estimators.base import site_mean, update_mean
from pyro_bpq.rollout.distributed import Ranks, joint_mean
from pyro_bpq.rollout.sums import Sums
from pyro_bpq.step.critic_inputs import site_value, standardised

__all__ = ["CriticBatch", "CriticRows", "JointValue", "Learned", "evaluate_critics", "regression"]


class Learned(NamedTuple):
    """What critics say of the sites of a class, in nats, detached.

    Args:
        level: ``V`` of a dueling critic, ``E[Q]`` of one that reads the value as a whole; ``(G, M, plates)``.
        table: Its table ``(G, M, plates, D, K)``, or ``None``.
        own: Residual ``(G, M, plates)`` of a critic that reads the value as a whole, or ``None``.
        variate: Its control variate for earlier sites, of the same shape.
    """

    level: Tensor
    table: Tensor | None = None
    own: Tensor | None = None
    variate: Tensor | None = None

    def plus(self, other: Learned) -> Learned:
        """The sum over two groups of Q-nodes of the same sites."""
        pairs = zip(self, other, strict=True)
        total = [a if b is None else b if a is None else a + b for a, b in pairs]
        return Learned(*total)  # type: ignore[arg-type]


@dataclass(frozen=True)
class CriticRows:
    """What the regression of some critics needs besides their values and targets.

    Args:
        sites: Site of each.
        selection: Their rows in the bank.
        unit: Scale of the sites (subsampling), which targets are divided by; broadcasts to ``(Q, M, plates)``.
    """

    sites: tuple[str, ...]
    selection: Selection
    unit: Tensor

    @staticmethod
    def join(parts: Sequence[CriticRows]) -> CriticRows:
        """The same critics in several particles."""
        return replace(parts[0], unit=torch.cat([part.unit for part in parts], 1))


@dataclass(frozen=True)
class CriticBatch:
    """Critics of a group of Q-nodes, evaluated at one rollout.

    Args:
        group: The Q-nodes.
        kind: Kind of their rows in the bank.
        keys: Key of each row.
        selection: Their rows.
        level: ``V`` in nats, ``(Q, M, plates)``, with the critics' gradient.
        advantage: ``A`` in nats, ``(Q, M, plates, D, K)``, with the critics' gradient, or ``None``.
        unit: Scale of the sites (subsampling), which targets are divided by.
        writes: New running moments of the context features.
        joint: What a critic that reads the value as a whole says of it, in nats: ``level`` and ``advantage``
            then are ``E[Q]`` and the table of its all-action term, without gradient.
    """

    group: QGroup
    kind: str
    keys: tuple[str, ...]
    selection: Selection
    level: Tensor
    advantage: Tensor | None
    unit: Tensor
    writes: tuple[Write, ...] = ()
    joint: JointValue | None = None

    def per_site(self, member: Sums | None) -> Learned:
        """Sums over the Q-nodes of each site, with the matrix (sites × Q-nodes) or one node each."""

        def total(part: Tensor) -> Tensor:
            return part.detach() if member is None else member @ part.detach()

        table = None if self.advantage is None else total(self.advantage)
        if self.joint is None:
            return Learned(total(self.level), table)
        return Learned(total(self.level), table, total(self.joint.own), total(self.joint.variate))

    def rows(self) -> CriticRows:
        """All of them."""
        return CriticRows(tuple(node.site for node in self.group.nodes), self.selection, self.unit)

    def row(self, i: int, bank: CriticBank) -> CriticRows:
        """One of them."""
        selection = bank.select(self.kind, (self.keys[i],), None)
        assert selection is not None
        return CriticRows((self.group.nodes[i].site,), selection, self.unit[i : i + 1])


@dataclass(frozen=True)
class JointValue:
    """A joint critic's values.

    Args:
        value: ``Q(x)``, ``(Q, M, plates)``, with the critics' gradient.
        mean: Its expectation, or what stands for it, of the same shape, detached.
        own: Residual that goes with the table, of the same shape, detached.
        variate: What corrects earlier sites, of mean zero, of the same shape, detached.
        leaf: The sampled values ``(Q, N, D)``, rows flattened, that ``value`` has a gradient to; ``None`` if no
            estimator asks for that gradient.
    """

    value: Tensor
    mean: Tensor
    own: Tensor
    variate: Tensor
    leaf: Tensor | None = None


def evaluate_critics(
    layout: Layout, group: QGroup, batches: Sequence[SiteBatch], bank: CriticBank, build: bool, slow: bool = False
) -> CriticBatch | None:
    """Evaluates the critics of a group in one batched call.

    Args:
        layout: The layout.
        group: The Q-nodes.
        batches: Stacked tensors of all classes.
        bank: Holds the critics.
        build: Whether missing critics may be built.
        slow: Whether to evaluate their slow copies instead.

    Returns:
        The evaluated critics; ``None`` if there are none yet and they may not be built.
    """
    batch = batches[group.c]
    spec = batch.cls.spec
    components, cardinality = spec.parts
    shape = CriticShape(
        sites=len(group.nodes),
        features=layout.num_features(group),
        components=components,
        cardinality=cardinality,
        cells=layout.cells(group) if spec.critic is not None and spec.critic.uses_cells else 0,
        context=spec.context,
    )
    kind, keys = _kind(spec.critic, shape), _keys(group, spec.share)
    selection = bank.select(kind, keys, _builder(spec.critic, shape, bank, batch.like) if build else None)
    if selection is None and layout.is_steered:
        # Which other sites are missing must not matter to a site: they come with its value.
        known = [i for i, key in enumerate(keys) if bank.select(kind, (key,), None) is not None]
        group, keys = group.take(known), tuple(keys[i] for i in known)
        selection = bank.select(kind, keys, None) if known else None
    if selection is None:
        return None
    nodes = group.nodes
    context, writes = standardised(_context(layout, group, batches), selection)
    cells = _cells(group, batches) if shape.cells else None
    if isinstance(spec.critic, JointCritic):
        site, leaf, moved = site_value(group, batch, selection)
        packed = selection.gather(lambda block, rows, at: _forward(block, rows, at, context, cells, site, slow))
        expected, table, unit, joint = _joint(layout, group, batch, selection, packed)
        joint = replace(joint, leaf=leaf)
        if reads_value(spec.critic):
            # E[Q] is not known. The value minus a variate of mean zero is right on average.
            joint = replace(joint, mean=joint.value.detach() - joint.variate)
        return CriticBatch(group, kind, keys, selection, expected, table, unit, (*writes, *moved), joint)
    output = selection.gather(lambda block, rows, at: _forward(block, rows, at, context, cells, None, slow))
    if output.shape != (len(nodes), context.shape[1], shape.outputs):
        raise CriticShapeError(
            f"The critic {spec.critic} of sites {[n.site for n in nodes]} returned shape "
            f"{tuple(output.shape)} instead of {(len(nodes), context.shape[1], shape.outputs)} "
            "(sites, rows, 1 + components * cardinality)."
        )
    level, advantage, unit = _dueling(layout, group, batch, selection, output)
    return CriticBatch(group, kind, keys, selection, level, advantage, unit, writes)


def _joint(
    layout: Layout, group: QGroup, batch: SiteBatch, selection: Selection, packed: Tensor
) -> tuple[Tensor, Tensor, Tensor, JointValue]:
    """Expectation, table, unit of the sites and values of critics that read a value as a whole, in nats."""
    unit, mean, spread, step = _units(layout, group, batch, selection)
    output = JointOutput.unpacked(packed, *batch.cls.spec.parts)
    level, value, centre, own, variate, table = (
        part.reshape(part.shape[0], *batch.batch_shape, *part.shape[2:]) for part in output
    )
    level, step = unit * (mean + spread * level), unit * step
    expected = (level + step * centre).detach()
    joint = JointValue(level + step * value, expected, step * own, step * variate)
    return expected, step[..., None, None] * table, unit, joint


def _units(
    layout: Layout, group: QGroup, batch: SiteBatch, selection: Selection
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scale of the sites, and mean and spreads of the targets in its unit."""
    unit = group.pick(batch.scale)
    lead = (-1, *(1,) * len(batch.batch_shape))
    names = ("mean", "spread_level", "spread_advantage")
    mean, spread, step = (selection.read(name, batch.like.dtype).reshape(lead) for name in names)
    return unit, mean, spread, step


def _dueling(
    layout: Layout, group: QGroup, batch: SiteBatch, selection: Selection, output: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Level, advantage and unit of the sites, in nats."""
    unit, mean, spread, step = _units(layout, group, batch, selection)
    level = unit * (mean + spread * output[..., 0].reshape(-1, *batch.batch_shape))
    if batch.cls.spec.components is None:
        return level, None, unit
    advantage = output[..., 1:].reshape(-1, *batch.batch_shape, *batch.cls.spec.parts)
    return level, (unit * step)[..., None, None] * advantage, unit


def regression(
    critic: CriticRows,
    value: Tensor,
    target: Tensor,
    level_weight: float,
    decay: float = 0.98,
    chosen: Tensor | None = None,
    ranks: Ranks | None = None,
) -> tuple[Tensor, list[Write], dict[str, Tensor]]:
    r"""Squared error of the critics, in units of their targets' spread.

    With several particles, differences within a data point count fully and the level ``level_weight``:

        L = |δ - mean_m δ|² / σ_A² + w |mean_m δ|² / σ_V²,   δ = q - target

    Args:
        critic: The critics.
        value: Their value at the sample, ``(Q, M, plates)``, in nats, with gradient.
        target: Targets of the same shape, detached.
        level_weight: Weight ``w``.
        decay: Weight of the past in the running mean and spreads.
        chosen: Which Q-nodes learn, ``(Q,)`` of zeros and ones; ``None`` for all.
        ranks: The processes that learn together: the mean of their losses is that of the joint batch.

    Returns:
        The loss (a scalar), the writes of the running statistics, and diagnostics per Q-node.
    """
    particles, samples = target.shape[1], value[0].numel()
    error, scaled = (value - target) / critic.unit, target / critic.unit
    selection = critic.selection
    count, mean, old_level, old_step = (
        selection.read(name, target.dtype) for name in ("count", "mean", "spread_level", "spread_advantage")
    )
    own_mean, total = joint_mean(ranks, site_mean(scaled), samples)
    new_mean = update_mean(mean, own_mean, count, decay)
    lead = (-1, *(1,) * (target.dim() - 1))
    if particles > 1:
        row = scaled.mean(1, keepdim=True)
        inner = (scaled - row).square() * (particles / (particles - 1.0))
        outer = row - new_mean.reshape(lead)
    else:
        # Never the critic's own error: a scale that it moves itself feeds back.
        outer = scaled - new_mean.reshape(lead)
        inner = outer.square()
    squares, _ = joint_mean(ranks, torch.stack((site_mean(outer.square()), site_mean(inner))), samples)
    level = update_mean(old_level.square(), squares[0], count, decay).sqrt()
    step = update_mean(old_step.square(), squares[1], count, decay).sqrt()
    floor = 1e-3 * (new_mean.abs() + level) + torch.finfo(target.dtype).tiny
    step = torch.maximum(step, floor)
    # The mean over particles moves less than they do: in its own unit it would drown their differences.
    level = torch.maximum(level, step)
    loss = _loss(error, level.reshape(lead), step.reshape(lead), level_weight)
    # The first step only sets the statistics: its error is that of an unknown level.
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
        # Nothing can be said of a single particle and row.
        explained = torch.where(variance > 0, 1.0 - site_mean(_centre(error).square()) / variance, torch.nan)
    # The mean of the ranks' gradients counts all ranks alike; they may have different numbers of rows.
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


def _keys(group: QGroup, share: str | None) -> tuple[str, ...]:
    return tuple(node.name if share is None else share + node.name[len(node.site) :] for node in group.nodes)


def _kind(critic: Critic | None, shape: CriticShape) -> str:
    # torch.compile does not find a formatted string in a dict.
    sizes = (shape.features, shape.components, shape.cardinality, shape.cells)
    return " ".join(("critic", repr(critic), *map(str, sizes)))


def _builder(
    critic: Critic | None, shape: CriticShape, bank: CriticBank, like: Tensor
) -> Callable[[tuple[str, ...]], Block]:
    assert critic is not None

    def make(keys: tuple[str, ...]) -> Block:
        own = replace(shape, sites=len(keys))
        try:
            module = critic.build(own, bank.generator(_kind(critic, shape), keys))
        except OptionError as error:
            raise OptionError(f"Sites {list(keys)}: {error}") from error
        ones = torch.ones(len(keys))
        buffers = {"mean": 0 * ones, "spread_level": ones.clone(), "spread_advantage": ones.clone()}
        if shape.features:
            buffers["context_mean"] = torch.zeros(len(keys), shape.features)
            buffers["context_square"] = torch.ones(len(keys), shape.features)
        if reads_value(critic):
            buffers["value_mean"] = torch.zeros(len(keys), shape.components)
            buffers["value_square"] = torch.ones(len(keys), shape.components)
        buffers |= {"rows": ones.clone(), "count": 0 * ones}
        return Block(_kind(critic, shape), keys, module, buffers).to(like.device, like.dtype)

    return make


def _forward(
    block: Block,
    rows: Tensor | None,
    at: Tensor | None,
    context: Tensor,
    cells: Tensor | None,
    site: SiteValue | None = None,
    slow: bool = False,
) -> Tensor:
    critic, weights = (block.slow, block.slow_weights()) if slow else (block.critic, block.weights())
    assert critic is not None
    # Critics have a type of their own, and so has what follows from the rollout.
    dtype, own = context.dtype, next((w.dtype for w in weights.values() if w.is_floating_point()), context.dtype)
    if at is not None:
        context, cells = context[at], None if cells is None else cells[at]
        site = None if site is None else SiteValue(*(None if part is None else part[at] for part in site))
    if own != dtype and site is not None:
        site = SiteValue(*(part.to(own) if part is not None and part.is_floating_point() else part for part in site))
    given = (context.to(own), cells) if site is None else (context.to(own), cells, site)
    if rows is None:
        output: Tensor = critic(*given)
    else:
        chosen = {name: weight[rows] for name, weight in weights.items()}
        output = torch.func.functional_call(critic, chosen, given)
    return output.to(dtype)


def _pool(value: Tensor, source: SiteBatch, target: SiteBatch) -> Tensor:
    """Averages over the plates that the target is outside of."""
    dims = [plate.dim - 1 for plate in source.plates if plate not in target.plates]
    return value.mean(dims, keepdim=True) if dims else value


def _context(layout: Layout, group: QGroup, batches: Sequence[SiteBatch]) -> Tensor:
    """Detached context features ``(Q, N, F)`` of the Q-nodes of a group."""
    batch, queries = batches[group.c], len(group.nodes)
    lead = (queries, *batch.batch_shape)
    parts = []
    for k, plan in enumerate(group.contexts):
        source = batches[plan.source]
        values = _pool(source.encoded, source, batch)
        padded = torch.cat((values, torch.zeros_like(values[:1])))
        window = group.constant(("window", k), plan.window, values.device, torch.long)
        parts += [padded[window[:, w]].expand(*lead, -1) for w in range(window.shape[1])]
        if plan.rest is not None:
            rest = group.rest(k, values)
            mixed = values.new_zeros(queries, *values.shape[1:]) if rest is None else rest @ values
            parts.append(mixed.expand(*lead, -1))
    if batch.cls.spec.share is not None:

        def index_features() -> list[tuple[float, float]]:
            return [_index_features(node.site) for node in group.nodes]

        index = group.constant("index", index_features, batch.like.device, batch.like.dtype)
        parts.append(index.reshape(queries, *(1,) * len(batch.batch_shape), -1).expand(*lead, -1))
    if batch.cls.spec.has_params and (batch.cls.spec.components is not None or batch.cls.spec.has_moments):
        parts.append(group.pick(batch.parameters))
    if batch.cls.spec.context:
        parts.append(group.pick(batch.context).to(batch.like.dtype))
    rows = 1
    for size in batch.batch_shape:
        rows *= size
    if not parts:
        return batch.like.new_zeros(queries, rows, 0)
    return torch.cat(parts, -1).reshape(queries, rows, -1)


def _index_features(site: str) -> tuple[float, float]:
    """Logarithm and tenth of the last number in the name of a site of a family, 0 without one."""
    numbers = re.findall(r"\d+", site)
    index = int(numbers[-1]) if numbers else 0
    return math.log1p(index), 0.1 * index


def _cells(group: QGroup, batches: Sequence[SiteBatch]) -> Tensor:
    """Joint state of the rest of the scope, ``(Q, N)``."""
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
