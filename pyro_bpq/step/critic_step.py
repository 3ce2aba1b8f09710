"""Evaluates the critics of a step, in one call for like-shaped sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_bpq.batching.classes import QGroup
from pyro_bpq.batching.layout import Layout
from pyro_bpq.batching.site_batch import SiteBatch
from pyro_bpq.critics.bank import Block, CriticBank, Rows, Selection, Write
from pyro_bpq.critics.joint import JointCritic, JointOutput, SiteValue, reads_value
from pyro_bpq.critics.nets import Critic, CriticShape
from pyro_bpq.errors import CriticShapeError, OptionError
from pyro_bpq.step.critic_inputs import cells_of, context_of, site_value, standardised
from pyro_bpq.step.regression import CriticRows


class Learned(NamedTuple):
    """The critics' outputs for the sites of a class, in nats, detached."""

    level: Tensor  # `V` of a dueling critic, `E[Q]` of a joint critic; `(G, M, plates)`
    table: Tensor | None = None  # Table `(G, M, plates, D, K)` of the critic, or `None`
    own: Tensor | None = None  # Residual of mean zero of a joint critic, `(G, M, plates)`, or `None`

    def plus(self, other: Learned) -> Learned:
        """The sum over two groups of Q-nodes of the same sites."""
        pairs = zip(self, other, strict=True)
        total = [a if b is None else b if a is None else a + b for a, b in pairs]
        return Learned(*total)  # type: ignore[arg-type]


@dataclass(frozen=True)
class CriticBatch:
    """Critics of a group of Q-nodes, evaluated at one rollout."""

    group: QGroup  # The Q-nodes
    kind: str  # Kind of their rows in the bank
    keys: tuple[str, ...]  # Key of each row
    selection: Selection  # Their rows in the bank
    level: Tensor  # `V` in nats, `(Q, M, plates)`, with the critics' gradient
    advantage: Tensor | None  # `A` in nats, `(Q, M, plates, D, K)`, with the critics' gradient, or `None`
    unit: Tensor  # Scale of the sites (subsampling); targets are divided by it
    writes: tuple[Write, ...] = ()  # New running moments of the context features
    # Values of joint critics. `level` and `advantage` are then `E[Q]` and the table of the all-action term, without
    # gradient.
    joint: JointValue | None = None

    def rows(self) -> CriticRows:
        """The regression rows of all critics of the group."""
        return CriticRows(tuple(node.site for node in self.group.nodes), self.selection, self.unit)

    def row(self, i: int, bank: CriticBank) -> CriticRows:
        """The regression row of the critic of the ``i``-th Q-node."""
        selection = bank.select(self.kind, (self.keys[i],), None)
        assert selection is not None
        return CriticRows((self.group.nodes[i].site,), selection, self.unit[i : i + 1])


@dataclass(frozen=True)
class JointValue:
    """Values of joint critics in nats, ``(Q, M, plates)``."""

    value: Tensor  # `Q(x)`, with the critics' gradient
    mean: Tensor  # `E[Q]` or an estimate of it, detached
    own: Tensor  # Residual of mean zero that belongs to the table, detached
    # The sampled values `(Q, N, D)` that `value` has a gradient to; `None` if no estimator asks for it
    leaf: Tensor | None = None


def evaluate_critics(
    layout: Layout, group: QGroup, batches: Sequence[SiteBatch], bank: CriticBank, build: bool, slow: bool = False
) -> CriticBatch | None:
    """Evaluates the critics of a group, or their ``slow`` copies; ``None`` if some are missing and not built."""
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
        members=tuple((plan.slots, batches[plan.source].cls.width) for plan in group.contexts),
    )
    kind, share = _kind(spec.critic, shape), spec.share
    keys = tuple(node.name if share is None else share + node.name[len(node.site) :] for node in group.nodes)
    selection = bank.select(kind, keys, _builder(spec.critic, shape, bank, batch.like) if build else None)
    if selection is None and layout.is_steered:
        # A site must not notice which other sites are missing, because that follows from sampled values.
        known = [i for i, key in enumerate(keys) if bank.select(kind, (key,), None) is not None]
        group, keys = group.take(known), tuple(keys[i] for i in known)
        selection = bank.select(kind, keys, None) if known else None
    if selection is None:
        return None
    context, writes = standardised(context_of(group, batches), selection)
    cells = cells_of(group, batches) if shape.cells else None
    is_joint = isinstance(spec.critic, JointCritic)
    site, leaf, moved = site_value(group, batch, selection) if is_joint else (None, None, ())
    output = selection.gather(lambda block, rows, at: _forward(block, rows, at, context, cells, site, slow))
    expected = (len(group.nodes), context.shape[1], shape.outputs)
    if not is_joint and output.shape != expected:
        raise CriticShapeError(
            f"The critic {spec.critic} of sites {[n.site for n in group.nodes]} returned shape {tuple(output.shape)} "
            f"instead of {expected} (sites, rows, 1 + components * cardinality)."
        )
    level, table, unit, joint = _in_nats(group, batch, selection, output, leaf)
    return CriticBatch(group, kind, keys, selection, level, table, unit, (*writes, *moved), joint)


def _in_nats(
    group: QGroup, batch: SiteBatch, selection: Selection, output: Tensor, leaf: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, JointValue | None]:
    """Level or expectation, table, unit of the sites, and values of joint critics."""
    spec, unit, lead = batch.cls.spec, group.pick(batch.scale), (-1, *(1,) * len(batch.batch_shape))
    names = ("mean", "spread_level", "spread_advantage")
    # In units of the sites' scale.
    mean, spread, step = (selection.read(name, batch.like.dtype).reshape(lead) for name in names)
    output = output.reshape(-1, *batch.batch_shape, output.shape[-1])
    level, step = unit * (mean + spread * output[..., 0]), unit * step
    if not isinstance(spec.critic, JointCritic):
        if spec.components is None:
            return level, None, unit, None
        advantage = output[..., 1:].reshape(*output.shape[:-1], *spec.parts)
        return level, step[..., None, None] * advantage, unit, None
    _, value, centre, own, table = JointOutput.unpacked(output, *spec.parts)
    expected = (level + step * centre).detach()
    value, own = level + step * value, step * own
    # A critic that reads the value does not know E[Q]. Q minus a residual of mean zero has the mean E[Q].
    known = value.detach() - own if reads_value(spec.critic) else expected
    return expected, step[..., None, None] * table, unit, JointValue(value, known, own, leaf)


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
        n = len(keys)
        buffers = {"mean": torch.zeros(n), "spread_level": torch.ones(n), "spread_advantage": torch.ones(n)}
        if shape.features:
            buffers |= {"context_mean": torch.zeros(n, shape.features), "context_square": torch.ones(n, shape.features)}
        if reads_value(critic):
            moments = torch.zeros(n, shape.components), torch.ones(n, shape.components)
            buffers |= {"value_mean": moments[0], "value_square": moments[1]}
        buffers |= {"rows": torch.ones(n), "count": torch.zeros(n)}
        return Block(_kind(critic, shape), keys, module, buffers, repr(critic)).to(like.device, like.dtype)

    return make


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
    if own != dtype and site is not None:
        site = site.map(lambda part: part.to(own))
    given = (context.to(own), cells) if site is None else (context.to(own), cells, site)
    if rows is None:
        output: Tensor = critic(*given)
    else:
        chosen = {name: weight[rows] for name, weight in weights.items()}
        output = torch.func.functional_call(critic, chosen, given)
    return output.to(dtype)
