"""One step: the surrogate of all sites, and the critics' loss.

There is one estimator call per class of like-shaped sites. If sampled values steer the program, particles may have
different sites; then there is one call per site, for the particles that have it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.critics.bank import Block, CriticBank, Selection, Write, average_writes
from pyro_bpq.errors import OptionError, UnsupportedSiteError
from pyro_bpq.estimators.base import Estimator, SiteContext, initial_statistics
from pyro_bpq.rollout.features import Standardised
from pyro_bpq.rollout.sums import Ranks, total, writes_of_ranks
from pyro_bpq.step.classes import SiteClass
from pyro_bpq.step.learning import Info, Learning, Notes, critic_loss, sweep
from pyro_bpq.step.signal_table import OTHER_NEEDS, SIGNALS
from pyro_bpq.step.signals import Signals

# Signals that belong to the runs of like structure: estimators that need them serve each of these alone.
_OF_RUNS = frozenset({"program", "hindsight"})
# The cost in nats that a step in program order adds to the recent costs of each site.
Seen = Mapping[str, float]


@dataclass(frozen=True)
class Step:
    """The result of one step."""

    loss: Tensor  # The loss of the runs in nats; its gradient has no meaning
    surrogate: Tensor  # Sum of the sites' surrogate terms over particles; only its gradient has meaning
    critic_loss: Tensor | None = None  # Regression loss of the critics, or `None`
    writes: list[Write] = field(default_factory=list)  # New running statistics, to be committed after the step
    info: Info = field(default_factory=dict)
    learns: bool = False  # Whether the step counts as a training step
    # The costs through which pathwise gradients flow, summed over particles
    paths: Tensor = field(default_factory=lambda: torch.zeros(()))
    # What is added to the recent costs of sites
    seen: Seen = field(default_factory=dict)


def step(
    signals: Sequence[Signals], loss: Tensor, bank: CriticBank, learning: Learning, is_learning: bool = False
) -> Step:
    """Forms surrogate, critic loss and new statistics of a step from the signals of all particles, or of each.

    There is one of ``signals`` for each particle if sampled values steer the program. ``loss`` is a scalar in nats; the
    step teaches nothing if it is not finite. Nothing in the bank changes, except that missing rows are built and that
    critics may learn in a sweep. Numbers leave the device only in :func:`may_learn`.
    """
    learns, notes, terms, taught = is_learning and may_learn(loss, learning, _told(signals)), Notes(), [], None
    if learns:
        classes = [cls for one in signals for cls in one.layout.classes]
        notes.info = {name: {"estimator": cls.spec.estimator} for cls in classes for name in cls.names}
        if learning.sweep is not None:
            for one in signals:
                sweep(one, learning, notes)
            signals = [one.again() for one in signals]
    for cls, context in _contexts(signals, learning.gamma, learning.ranks if learns else None):
        told = notes if learns else None
        terms.append(estimate(cls.spec.estimator, context, bank, learning.num_steps, told, cls.width).sum())
    if learns and learning.sweep is None and any(one.critics for one in signals):
        taught = critic_loss(signals, learning, notes=notes)
    # Several particles, or sites that share a critic, may write to the same row.
    writes = average_writes(notes.writes, bank.blocks) if len(signals) > 1 else notes.writes
    paths = total([run.differentiable for one in signals for run in one.rollout.runs])
    return Step(loss, total(terms), taught, writes, notes.info, learns, paths)


def _told(signals: Sequence[Signals]) -> Iterator[str]:
    """What has to be the same in all processes that learn together."""
    for one in signals:
        yield from (f"sites {one.layout.classes[c].names}" for c in one.active)
        yield from (f"critics {critic.group.keys}" for critic in one.critics.values())


def _contexts(signals: Sequence[Signals], gamma: float, ranks: Ranks | None) -> list[tuple[SiteClass, SiteContext]]:
    """The input of each estimator call: a class of sites, or one site of the particles that have it."""
    found, apart = dict[Any, list[tuple[SiteContext, int]]](), list[tuple[SiteClass, SiteContext]]()
    for one in signals:
        for cls, context in ((one.layout.classes[c], _context(one, c, gamma, ranks)) for c in one.active):
            if len(signals) == 1 or not _OF_RUNS.isdisjoint(cls.spec.estimator.needs):
                apart.append((cls, context))
                continue
            for i, name in enumerate(context.names):
                found.setdefault((name, cls.spec, context.cost.shape[2:]), []).append((context, i))
    return apart + [(SiteClass(spec, (name,)), _of_site(name, rows)) for (name, spec, _), rows in found.items()]


def _context(signals: Signals, c: int, gamma: float, ranks: Ranks | None) -> SiteContext:
    """The input of the estimator of a class of sites, with what it asks for itself."""
    context = replace(signals.context(c, gamma), signals=_asked_for(signals, c), ranks=ranks)
    estimator = signals.layout.classes[c].spec.estimator
    if estimator.takes_outdated or "program" not in estimator.needs or not signals.rerun.is_outdated:
        return context
    known = context.program.sampled_cost()
    return replace(context, cost=known, excess=context.cost - known)


def _asked_for(signals: Signals, c: int) -> dict[str, Any]:
    """The signals that the estimator of a class needs, by name."""
    estimator = signals.layout.classes[c].spec.estimator
    unknown = sorted(estimator.needs - SIGNALS.keys() - OTHER_NEEDS)
    if unknown:
        raise OptionError(
            f"{estimator} needs {', '.join(map(repr, unknown))}, which is no signal. Write one of "
            f"{sorted({*SIGNALS, *OTHER_NEEDS})}, or add a row to pyro_bpq.step.signal_table."
        )
    return {name: SIGNALS[name](signals, c) for name in sorted(estimator.needs & SIGNALS.keys())}


def _of_site(name: str, rows: Sequence[tuple[SiteContext, int]]) -> SiteContext:
    """The input for one site of several particles, from each particle's input and the position of the site in it."""
    parts = {item.name: [(getattr(own, item.name), i) for own, i in rows] for item in fields(SiteContext)}
    number = sum(own.num_particles for own, _ in rows)
    return replace(SiteContext(**{n: _joined(p) for n, p in parts.items()}), names=(name,), num_particles=number)


def _joined(parts: Sequence[tuple[Any, int]]) -> Any:
    """The rows of a tensor in several particles, or of the tensors of a dictionary; zero where a particle lacks one."""
    like = next((value for value, _ in parts if value is not None), None)
    if isinstance(like, Tensor):
        rows = [torch.zeros_like(like[:1]) if value is None else value[i : i + 1] for value, i in parts]
        return torch.cat(rows, 1)
    if isinstance(like, Standardised):
        return Standardised(*(_joined([(value[n], i) for value, i in parts]) for n in range(len(like))))
    if isinstance(like, Mapping):
        names = dict.fromkeys(name for value, _ in parts for name in value)
        return {name: _joined([(value.get(name), i) for value, i in parts]) for name in names}
    return like


def estimate(
    estimator: Estimator, context: SiteContext, bank: CriticBank, step: int, notes: Notes | None, width: int = 1
) -> Tensor:
    """The surrogate of a class of sites, by the estimator with the running statistics of the sites.

    New statistics and diagnostics are added to ``notes``; without them nothing is learned. ``width`` is the number of
    features of an encoded value.
    """
    rows, statistics = _statistics(estimator, context, bank, width, notes is not None)
    context = replace(context, statistics=statistics, count=statistics.get("count"))
    try:
        term = estimator.at(step)(context)
    except UnsupportedSiteError as error:
        raise error.at(*context.names) from error
    surrogate = term.surrogate
    if context.excess is not None:
        surrogate = surrogate.reshape(*context.score.shape, -1).sum(-1) + context.excess * context.score
    if notes is None:
        return surrogate
    if rows is not None:
        new = [write for name, value in term.statistics.items() for write in rows.write(name, value)]
        notes.writes += writes_of_ranks(context.ranks, new, context.cost[0].numel())
        count = statistics["count"]
        # Half precision cannot count far.
        notes.writes += rows.write("count", (rows.read("count") if count.element_size() < 4 else count) + 1)
    shown = {k: v for k, v in term.statistics.items() if k in ("scales", "baseline")} | {"cost_to_go": context.cost}
    for i, name in enumerate(context.names):
        notes.show(name, **{k: v[i] for k, v in shown.items()})
    return surrogate


def _statistics(
    estimator: Estimator, context: SiteContext, bank: CriticBank, width: int, build: bool
) -> tuple[Selection | None, dict[str, Tensor]]:
    """Running statistics of a class of sites; initial values for sites that have none yet."""
    initial, names, like = initial_statistics(estimator, width), context.names, context.cost
    if not initial:
        return None, {}

    def make(keys: tuple[str, ...]) -> Block:
        tensors = {k: torch.as_tensor(v) for k, v in initial.items()}
        buffers = {k: v.repeat(len(keys), *(1,) * v.dim()) for k, v in tensors.items()}
        return Block(kind, keys, None, {**buffers, "count": torch.zeros(len(keys))}).to(like.device, like.dtype)

    sizes = "".join(f" {tuple(v.shape)}" for v in initial.values() if isinstance(v, Tensor))
    # torch.compile does not find a formatted string in a dict.
    kind = " ".join(("statistics", type(estimator).__name__, str(tuple(initial)))) + sizes
    selection = bank.select(kind, names, make if build else None)
    if selection is not None:
        return selection, {name: selection.read(name, like.dtype) for name in (*initial, "count")}
    # A site must not notice which other sites are missing, because that follows from sampled values.
    rows, new = [bank.select(kind, (site,), None) for site in names], make(names)

    def read(name: str) -> Tensor:
        values = [getattr(new, name)[i : i + 1] if row is None else row.read(name) for i, row in enumerate(rows)]
        return torch.cat([value.to(like.dtype) for value in values])

    return None, {name: read(name) for name in (*initial, "count")}


def may_learn(loss: Tensor, learning: Learning, told: Iterable[str] = ()) -> bool:
    """Whether the loss is finite, on all ranks; ``told`` are texts that have to be the same on all of them."""
    if learning.is_recorded:
        return True
    if learning.ranks is None:
        return math.isfinite(loss.item())
    return learning.ranks.agree([f"step {learning.num_steps}", *told], torch.isfinite(loss.detach()))
