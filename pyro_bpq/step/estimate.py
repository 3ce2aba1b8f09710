"""Calls an estimator with the running statistics of its sites, and notes the new ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from pyro_bpq.critics.bank import CriticBank
from pyro_bpq.critics.blocks import Block, Selection
from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators.base import Estimator, SiteContext, initial_statistics
from pyro_bpq.rollout.distributed import writes_of_ranks
from pyro_bpq.step.values import Learning, Notes


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
