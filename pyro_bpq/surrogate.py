r"""From the signals of a step to the sum of its sites' surrogate terms, and to the critics' loss.

One estimator call per class of like-shaped sites. Where sampled values steer a program, its particles need not have
the same sites: then one call per site, over those particles that have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.bank import Block, CriticBank, Selection, Write, average_writes
from pyro_bpq.critic_step import CriticRows, regression
from pyro_bpq.estimators.base import Estimator, SiteContext, Statistics, at_step, initial_statistics
from pyro_bpq.layout import SiteClass
from pyro_bpq.moments import Standardised
from pyro_bpq.signals import Signals

__all__ = ["Learning", "StepResult", "step"]


@dataclass(frozen=True)
class Learning:
    """How critics learn, as far as targets are concerned.

    Args:
        lam: Weight of the return against the critic.
        gamma: Discount per edge.
        level_weight: Weight of the level against differences within a data point.
        num_steps: Number of steps taken, for estimators with a schedule.
    """

    lam: float = 0.9
    gamma: float = 1.0
    level_weight: float = 0.1
    num_steps: int = 0


@dataclass(frozen=True)
class StepResult:
    """What one step yields.

    Args:
        surrogate: Sum of the sites' surrogate terms over particles; only its gradient has meaning.
        critic_loss: Regression loss of the critics, or ``None``.
        writes: New running statistics, to be committed after the step.
        info: Detached diagnostics, by name of site, and its ``"estimator"``.
        terms: The summands of the surrogate: names of the sites and a tensor, as the estimator returned it.
    """

    surrogate: Tensor
    critic_loss: Tensor | None
    writes: list[Write] = field(default_factory=list)
    info: dict[str, dict[str, Any]] = field(default_factory=dict)
    terms: tuple[tuple[tuple[str, ...], Tensor], ...] = ()


def step(signals: Sequence[Signals], bank: CriticBank, learning: Learning, build: bool) -> StepResult:
    """Computes surrogate and critic loss of the rollouts of a step.

    Args:
        signals: One for all particles; or one for each, where sampled values steer the program.
        bank: Critics and running statistics.
        learning: How targets are formed.
        build: Whether the step learns: missing statistics are built, a critic loss is formed.

    Returns:
        The result; nothing in the bank has changed but for newly built rows.
    """
    writes: list[Write] = []
    info: dict[str, dict[str, Any]] = {}
    if build:
        classes = [cls for one in signals for cls in one.layout.classes]
        info = {name: {"estimator": cls.spec.estimator} for cls in classes for name in cls.names}
    number = learning.num_steps
    terms = [
        (context.names, _estimate(cls, at_step(cls.spec.estimator, number), context, bank, build, writes, info))
        for cls, context in _contexts(signals)
    ]
    loss = _critic_loss(signals, bank, learning, writes, info) if build else None
    if len(signals) > 1:
        # Particles, and sites of a family that shares a critic, each have a say.
        writes = average_writes(writes)
    sums = [term.sum() for _, term in terms]
    return StepResult(sum(sums[1:], sums[0]) if sums else torch.zeros(()), loss, writes, info, tuple(terms))


# Estimators.


def _contexts(signals: Sequence[Signals]) -> list[tuple[SiteClass, SiteContext]]:
    """What each estimator call sees: classes of sites, or single sites of those particles that have them."""
    if len(signals) == 1:
        (only,) = signals
        return [(only.layout.classes[c], only.context(c)) for c in only.active]
    found: dict[Any, list[SiteContext]] = {}
    for one in signals:
        for c in one.active:
            spec, context = one.layout.classes[c].spec, one.context(c)
            for i, name in enumerate(context.names):
                found.setdefault((name, spec, context.cost.shape[2:]), []).append(_row(context, i))
    return [(SiteClass(spec, (name,)), _join(contexts)) for (name, spec, _), contexts in found.items()]


def _tensors(context: SiteContext) -> dict[str, Tensor]:
    pairs = ((item.name, getattr(context, item.name)) for item in fields(context))
    return {name: value for name, value in pairs if isinstance(value, Tensor)}


def _row(context: SiteContext, i: int) -> SiteContext:
    rows: dict[str, Any] = {name: value[i : i + 1] for name, value in _tensors(context).items()}
    if context.moments is not None:
        rows["moments"] = Standardised(*(part[i : i + 1] for part in context.moments))
    return replace(context, names=(context.names[i],), **rows)


def _join(contexts: Sequence[SiteContext]) -> SiteContext:
    """One site of several particles; a part that some of them lack is zero there."""
    if len(contexts) == 1:
        return contexts[0]
    tensors = [_tensors(context) for context in contexts]
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for found in tensors for name in found):
        like = next(found[name] for found in tensors if name in found)
        joined[name] = torch.cat([found.get(name, torch.zeros_like(like)) for found in tensors], 1)
    if contexts[0].moments is not None:
        moments = [context.moments for context in contexts if context.moments is not None]
        joined["moments"] = Standardised(*(torch.cat(parts, 1) for parts in zip(*moments, strict=True)))
    return replace(contexts[0], num_particles=sum(context.num_particles for context in contexts), **joined)


def _estimate(
    cls: SiteClass,
    present: Estimator,
    context: SiteContext,
    bank: CriticBank,
    build: bool,
    writes: list[Write],
    info: dict[str, dict[str, Any]],
) -> Tensor:
    """Calls the estimator of some sites, as it presently is, with its running statistics."""
    estimator = cls.spec.estimator
    initial = initial_statistics(estimator, context.num_particles, cls.width)
    selection, statistics = _statistics(estimator, initial, context, bank, build)
    context = replace(context, statistics=statistics, count=statistics.get("count"))
    term = present(context)
    if selection is not None and build:
        for name, value in term.statistics.items():
            writes += selection.write(name, value)
        writes += selection.write("count", statistics["count"] + 1)
    if build:
        for i, name in enumerate(context.names):
            info[name] = {k: v[i] for k, v in term.statistics.items() if k in ("scales", "baseline")}
            info[name]["cost_to_go"] = context.cost[i]
            info[name]["estimator"] = estimator
    return term.surrogate


def _statistics(
    estimator: Estimator, initial: Statistics, context: SiteContext, bank: CriticBank, build: bool
) -> tuple[Selection | None, dict[str, Tensor]]:
    """Rows of running statistics of a class of sites; initial values where there are none yet."""
    if not initial:
        return None, {}
    like = context.cost

    def make(keys: tuple[str, ...]) -> Block:
        buffers = {k: torch.as_tensor(v).repeat(len(keys), *(1,) * _ndim(v)) for k, v in initial.items()}
        buffers["count"] = torch.zeros(len(keys))
        return Block(kind, keys, None, buffers).to(like.device, like.dtype)

    sizes = "".join(f" {tuple(v.shape)}" for v in initial.values() if isinstance(v, Tensor))
    kind = f"statistics {type(estimator).__name__} {tuple(initial)}{sizes}"
    selection = bank.select(kind, context.names, make if build else None)
    if selection is not None:
        return selection, {name: selection.read(name) for name in (*initial, "count")}
    # Which other sites are missing must not matter to a site: they come with its value.
    rows = [bank.select(kind, (site,), None) for site in context.names]
    new = make(context.names)
    found = {
        name: torch.cat(
            [getattr(new, name)[i : i + 1] if row is None else row.read(name) for i, row in enumerate(rows)]
        )
        for name in (*initial, "count")
    }
    return None, found


def _ndim(value: Any) -> int:
    return torch.as_tensor(value).dim()


# Learning.


def _critic_loss(
    signals: Sequence[Signals],
    bank: CriticBank,
    learning: Learning,
    writes: list[Write],
    info: dict[str, dict[str, Any]],
) -> Tensor | None:
    """Regression of all critics on their lambda-returns; ``None`` if there are no critics."""
    found: dict[Any, list[tuple[CriticRows, Tensor, Tensor]]] = {}
    for one in signals:
        for g, (value, target) in one.values_and_targets(learning.lam, learning.gamma).items():
            critic = one.critics[g]
            writes += critic.writes
            weight = learning.level_weight if one.layout.classes[critic.group.c].spec.has_params else 1.0
            if len(signals) == 1:
                found[g, weight] = [(critic.rows(), value, target)]
                continue
            for i, node in enumerate(critic.group.nodes):
                key = (node.name, critic.kind, value.shape[2:], weight)
                found.setdefault(key, []).append((critic.row(i, bank), value[i : i + 1], target[i : i + 1]))
    losses = []
    for (*_, weight), parts in found.items():
        rows = parts[0][0] if len(parts) == 1 else CriticRows.join([part[0] for part in parts])
        value, target = (torch.cat([part[k] for part in parts], 1) for k in (1, 2))  # type: ignore[misc]
        loss, wrote, diagnostics = regression(rows, value, target, weight)
        losses.append(loss)
        writes += wrote
        for i, site in enumerate(rows.sites):
            info.setdefault(site, {}).update({k: v[i] for k, v in diagnostics.items()})
    return sum(losses[1:], losses[0]) if losses else None
