r"""Values of sites at which runs of a program are compared.

Sampled values may hardly vary, so they do not show whether rows of a run are mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.rollout.features import finite_components
from pyro_bpq.tracing.sandbox import Sandbox


class Kind(IntEnum):
    """Kinds of values of a row at which ways are compared."""

    EVEN = 0  # drawn evenly
    FIRST = 1  # the first one of each component
    LAST = 2  # the last one of each component
    SAMPLED = 3  # those that were sampled


def probe_generator(seed: int) -> torch.Generator:
    """The generator of the values at which runs are compared; spreads the bits of small seeds."""
    return torch.Generator().manual_seed(0x9E3779B97F4A7C15 * (seed + 1) % (1 << 63))


def kinds_at(places: Sequence[int]) -> list[Kind]:
    """Kinds of values of rows by their places: all kinds in turn."""
    return [(Kind.FIRST, Kind.EVEN, Kind.LAST, Kind.SAMPLED)[place % 4] for place in places]


def probe(fn: Any, value: Tensor, kinds: Sequence[Kind], generator: torch.Generator) -> Tensor:
    """Draws values of a site to compare runs at, by kind if it is finite or a count, else from its distribution.

    Sampled values may hardly vary, and equal rows do not show that rows are mixed. Nor do values that are drawn evenly,
    if the program looks for a single one: ``z.max()`` of many bits is 1 in nearly all rows. So in some rows all sites
    have their first value, or their last one.

    Args:
        fn: Distribution of the site.
        value: The sampled values, shape ``(rows, batch, event)``.
        kinds: The kind of each row.
        generator: Draws.

    Returns:
        Values of the same shape; the sampled ones if the distribution cannot be drawn from.
    """
    try:
        return _drawn(fn, value, kinds, generator)
    except Exception:
        # A user's own distribution may lack a support, or its sample() may fail here.
        return value


def _drawn(fn: Any, value: Tensor, kinds: Sequence[Kind], generator: torch.Generator) -> Tensor:
    kind = torch.tensor(kinds, device=value.device)
    split = finite_components(fn)
    if split is not None:
        index = split.index(value, fn)
        kind = kind.reshape(-1, *(1,) * (index.dim() - 1))
        drawn = torch.randint(split.cardinality, index.shape, generator=generator).to(index.device)
        drawn = torch.where(kind == Kind.SAMPLED, index, drawn).masked_fill(kind == Kind.FIRST, 0)
        drawn = drawn.masked_fill(kind == Kind.LAST, split.cardinality - 1)
        return split.value(drawn, fn).to(value.dtype).reshape(value.shape)
    shape = value.shape[: value.dim() - len(fn.event_shape)]
    with Sandbox(int(torch.randint(1 << 31, (), generator=generator)), has_buffers=False):
        drawn = fn.sample(() if shape == fn.batch_shape else (len(kinds),)).detach()
    if drawn.shape != value.shape:
        return value
    kind = kind.reshape(-1, *(1,) * (value.dim() - 1))
    if getattr(fn.support, "is_discrete", False) and not fn.event_shape:
        # Counts may nearly always be zero, so they are raised by up to 2, or by 3. The first one is zero.
        more = drawn + torch.randint(3, drawn.shape, generator=generator).to(drawn)
        more = torch.where(kind == Kind.FIRST, 0, torch.where(kind == Kind.LAST, drawn + 3, more))
        drawn = torch.where(fn.support.check(more), more, drawn)
    return torch.where(kind == Kind.SAMPLED, value, drawn.to(value.dtype))


def contrasted(fn: Any, value: Tensor, kind: Kind, last: int, index: int, generator: torch.Generator) -> Tensor:
    """Draws values of a site at which one row differs from all others.

    It has the first value or the last one, as its kind says, or differs from the row that differed last. Sites of
    infinitely many values get new ones in all rows.

    Args:
        fn: Distribution of the site.
        value: Its values, shape ``(rows, batch, event)``.
        kind: ``EVEN``, ``FIRST`` or ``LAST``.
        last: The row that differed last.
        index: The row that differs.
        generator: Draws.

    Returns:
        Values of the same shape.
    """
    split = finite_components(fn)
    if split is None or split.cardinality < 2:
        return probe(fn, value, [Kind.EVEN] * len(value), generator)
    old = split.index(value, fn)
    further = torch.randint(1, split.cardinality, (2, *old.shape), generator=generator).to(old.device)
    own = old[last] + further[0, index]
    if kind != Kind.EVEN:
        own = torch.full_like(own, 0 if kind == Kind.FIRST else split.cardinality - 1)
    new = own + further[1]
    new[index] = own
    return split.value(new % split.cardinality, fn).to(value.dtype).reshape(value.shape)


def shifted(fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
    """Draws values of a site that differ in each component from given ones, where it is finite; else new ones.

    Args:
        fn: Distribution of the site.
        value: Its values.
        generator: Draws.

    Returns:
        Values of the same shape.
    """
    split = finite_components(fn)
    if split is None or split.cardinality < 2:
        return probe(fn, value.unsqueeze(0), [Kind.EVEN], generator)[0]
    old = split.index(value, fn)
    more = torch.randint(1, split.cardinality, old.shape, generator=generator).to(old.device)
    return split.value((old + more) % split.cardinality, fn).to(value.dtype).reshape(value.shape)
