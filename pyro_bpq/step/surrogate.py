"""One step: the surrogate of all sites, and the critics' loss.

There is one estimator call per class of like-shaped sites. If sampled values steer the program, particles may have
different sites; then there is one call per site, for the particles that have it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.batching.classes import SiteClass
from pyro_bpq.critics.bank import CriticBank, Write, average_writes
from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.base import SiteContext
from pyro_bpq.rollout.distributed import Ranks
from pyro_bpq.rollout.features import Standardised
from pyro_bpq.step.critic_loss import critic_loss
from pyro_bpq.step.estimate import add_time, estimate, may_learn
from pyro_bpq.step.signal_table import OTHER_NEEDS, SIGNALS
from pyro_bpq.step.signals import Signals
from pyro_bpq.step.sweep import sweep
from pyro_bpq.step.values import Info, Learning, Step


def step(
    signals: Sequence[Signals], loss: Tensor, bank: CriticBank, learning: Learning, is_learning: bool = False
) -> Step:
    """Forms surrogate, critic loss and new statistics of a step from the signals of all particles, or of each.

    There is one of ``signals`` for each particle if sampled values steer the program. ``loss`` is a scalar in nats; the
    step teaches nothing if it is not finite. Nothing in the bank changes, except that missing rows are built and that
    critics may learn in a sweep. Numbers leave the device only in :func:`may_learn`.
    """
    build = is_learning and may_learn(loss, learning, _told(signals))
    writes: list[Write] = []
    info: Info = {}
    swept: dict[str, dict[str, Tensor]] = {}
    if build and learning.sweep is not None:
        for one in signals:
            new, found = sweep(one, bank, learning.sweep, learning.lam, learning.gamma, learning.ranks)
            writes, swept = writes + new, swept | found
        signals = [one.again() for one in signals]
    if build:
        classes = [cls for one in signals for cls in one.layout.classes]
        info = {name: {"estimator": cls.spec.estimator} for cls in classes for name in cls.names}
    terms = []
    for cls, context in _contexts(signals, learning.gamma, learning.ranks if build else None):
        start = time.perf_counter()
        term = estimate(cls, context, bank, learning.num_steps, build, writes, info)
        terms.append((context.names, term))
        if build:
            add_time(info, context.names, start)
    taught = None
    if build and learning.sweep is None and any(one.critics for one in signals):
        taught = critic_loss(signals, bank, learning, writes=writes, info=info)
    for site, own in swept.items():
        info.setdefault(site, {}).update(own)
    if len(signals) > 1:
        # Several particles, or sites that share a critic, may write to the same row.
        writes = average_writes(writes)
    sums = [term.sum() for _, term in terms]
    surrogate = sum(sums[1:], sums[0]) if sums else torch.zeros(())
    paths = sum((run.differentiable for one in signals for run in one.rollout.runs), torch.zeros(()))
    return Step(loss, surrogate, taught, writes, info, tuple(terms), build, paths)


def _told(signals: Sequence[Signals]) -> Iterator[str]:
    """What has to be the same in all processes that learn together."""
    for one in signals:
        yield from (f"sites {one.layout.classes[c].names}" for c in one.active)
        yield from (f"critics {critic.group.keys}" for critic in one.critics.values())


def _contexts(signals: Sequence[Signals], gamma: float, ranks: Ranks | None) -> list[tuple[SiteClass, SiteContext]]:
    """The input of each estimator call: a class of sites, or one site of the particles that have it."""
    if len(signals) == 1:
        (only,) = signals
        return [(only.layout.classes[c], _context(only, c, gamma, ranks)) for c in only.active]
    found: dict[Any, list[SiteContext]] = {}
    for one in signals:
        for c in one.active:
            spec, context = one.layout.classes[c].spec, _context(one, c, gamma, ranks)
            for i, name in enumerate(context.names):
                found.setdefault((name, spec, context.cost.shape[2:]), []).append(_row(context, i))
    return [(SiteClass(spec, (name,)), _join(contexts)) for (name, spec, _), contexts in found.items()]


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


def _tensors(context: SiteContext) -> dict[tuple[str, str], Tensor]:
    """All tensors of a context, by field and by name within the field."""
    own: dict[tuple[str, str], Any] = {(item.name, ""): getattr(context, item.name) for item in fields(context)}
    own |= {("signals", name): value for name, value in context.signals.items()}
    own |= {} if context.moments is None else {("moments", n): v for n, v in context.moments._asdict().items()}
    return {key: value for key, value in own.items() if isinstance(value, Tensor)}


def _with_tensors(context: SiteContext, tensors: Mapping[tuple[str, str], Tensor], **others: Any) -> SiteContext:
    """A context with other tensors."""
    inner = {name: {n: v for (part, n), v in tensors.items() if part == name} for name in ("signals", "moments")}
    own: dict[str, Any] = {name: value for (name, inside), value in tensors.items() if not inside}
    own["signals"] = {**context.signals, **inner["signals"]}
    own["moments"] = Standardised(**inner["moments"]) if inner["moments"] else None
    return replace(context, **own, **others)


def _row(context: SiteContext, i: int) -> SiteContext:
    rows = {key: value[i : i + 1] for key, value in _tensors(context).items()}
    return _with_tensors(context, rows, names=(context.names[i],))


def _join(contexts: Sequence[SiteContext]) -> SiteContext:
    """One site of several particles; a tensor that some particles lack is zero there."""
    found, joined = [_tensors(context) for context in contexts], {}
    for key in dict.fromkeys(key for own in found for key in own):
        like = next(own[key] for own in found if key in own)
        joined[key] = torch.cat([own.get(key, torch.zeros_like(like)) for own in found], 1)
    return _with_tensors(contexts[0], joined, num_particles=sum(context.num_particles for context in contexts))
