r"""Evaluates the critics of a step, in one call for like-shaped sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_bpq.batching.classes import QGroup
from pyro_bpq.batching.layout import Layout
from pyro_bpq.batching.site_batch import SiteBatch
from pyro_bpq.critics.attention import MemberCritic, Members
from pyro_bpq.critics.bank import CriticBank
from pyro_bpq.critics.block import Block, Selection, Write
from pyro_bpq.critics.joint import JointCritic, JointOutput, SiteValue
from pyro_bpq.critics.nets import Critic, CriticShape
from pyro_bpq.critics.value_critic import reads_value
from pyro_bpq.errors import CriticShapeError, OptionError
from pyro_bpq.rollout.sums import Sums
from pyro_bpq.step.critic_inputs import cells_of, context_of, members_of, site_value, standardised
from pyro_bpq.step.regression import CriticRows


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
    reads_members = isinstance(spec.critic, MemberCritic)
    if reads_members:
        shape = replace(shape, members=tuple(batches[plan.source].cls.width for plan in group.contexts))
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
    context, writes = standardised(context_of(layout, group, batches), selection)
    cells = cells_of(group, batches) if shape.cells else None
    if isinstance(spec.critic, JointCritic):
        site, leaf, moved = site_value(group, batch, selection)
        packed = selection.gather(lambda block, rows, at: _forward(block, rows, at, context, cells, site, slow))
        expected, table, unit, joint = _joint(layout, group, batch, selection, packed)
        joint = replace(joint, leaf=leaf)
        if reads_value(spec.critic):
            # E[Q] is not known. The value minus a variate of mean zero is right on average.
            joint = replace(joint, mean=joint.value.detach() - joint.variate)
        return CriticBatch(group, kind, keys, selection, expected, table, unit, (*writes, *moved), joint)
    more = members_of(group, batches) if reads_members else None
    output = selection.gather(lambda block, rows, at: _forward(block, rows, at, context, cells, more, slow))
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


def _keys(group: QGroup, share: str | None) -> tuple[str, ...]:
    return tuple(node.name if share is None else share + node.name[len(node.site) :] for node in group.nodes)


def _kind(critic: Critic | None, shape: CriticShape) -> str:
    # torch.compile does not find a formatted string in a dict.
    sizes = (shape.features, shape.components, shape.cardinality, shape.cells, *shape.members)
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
        return Block(_kind(critic, shape), keys, module, buffers, repr(critic)).to(like.device, like.dtype)

    return make


def _forward(
    block: Block,
    rows: Tensor | None,
    at: Tensor | None,
    context: Tensor,
    cells: Tensor | None,
    more: SiteValue | Members | None = None,
    slow: bool = False,
) -> Tensor:
    critic, weights = (block.slow, block.slow_weights()) if slow else (block.critic, block.weights())
    assert critic is not None
    # Critics have a type of their own, and so has what follows from the rollout.
    dtype, own = context.dtype, next((w.dtype for w in weights.values() if w.is_floating_point()), context.dtype)
    if at is not None:
        context, cells = context[at], None if cells is None else cells[at]
        more = None if more is None else more.map(lambda part: part[at])
    if own != dtype and more is not None:
        more = more.map(lambda part: part.to(own) if part.is_floating_point() else part)
    given = (context.to(own), cells) if more is None else (context.to(own), cells, more)
    if rows is None:
        output: Tensor = critic(*given)
    else:
        chosen = {name: weight[rows] for name, weight in weights.items()}
        output = torch.func.functional_call(critic, chosen, given)
    return output.to(dtype)
