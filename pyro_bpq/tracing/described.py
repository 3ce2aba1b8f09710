r"""Distributions, data and errors in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from pyro_bpq.tracing.watch import distribution_name

_SHAPES = "\nTrace Shapes:"


def own_text(error: Exception) -> str:
    """The text of an error without the table of shapes that Pyro appends."""
    return str(error).partition(_SHAPES)[0]


def told(error: Exception, *lines: str) -> str:
    """The text of an error, what to write, and the table of shapes that Pyro appends."""
    text, mark, shapes = str(error).partition(_SHAPES)
    return "\n".join([text.rstrip(), *lines]) + mark + shapes


def left_torch(sites: Iterable[str], number: int, text: str = "") -> str:
    """Says that Python asked for one value where each of so many particles has its own, and what to write."""
    return (
        f"A sampled value of {', '.join(map(repr, sorted(sites)))} left torch (as by .item(), int(), if, .numpy()) "
        f"while {number} particles ran at once, and each particle has a value of its own{text and f': {text}'}. Write "
        "vectorize_particles=False, so that they run one after the other; or stay in torch, as by torch.where(z > 0, "
        "a, b) or table[z.long()]."
    )


def described(fn: Any) -> str:
    """Name and support of a distribution."""
    return f"{distribution_name(fn)} (support {support(fn)})"


def support(fn: Any) -> str:
    """The support of a distribution in words, without the dimensions of events."""
    try:
        found = fn.support
    except (NotImplementedError, AttributeError):
        return "unknown"
    return str(getattr(found, "base_constraint", found))


def is_discrete(fn: Any) -> bool | None:
    """Whether a support is discrete; ``None`` if it is not known."""
    try:
        found = fn.support.is_discrete
    except (NotImplementedError, AttributeError):
        return None
    return bool(found)


def number_missing(value: Any) -> int:
    """Number of NaN in data."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0
    return int(value.detach().isnan().sum())


def nan_line(site: Any) -> str:
    """Says how many elements of a site's data are NaN, and how to leave them out."""
    name, value, events = site["name"], site["value"], site["fn"].event_dim
    base = getattr(site["fn"], "base_dist", None)
    how = f'with pyro.poutine.mask(mask=~data.isnan()): pyro.sample("{name}", fn, obs=data.nan_to_num())'
    if events and base is not None and not base.event_dim:
        # A mask of the elements of an event belongs inside of to_event.
        fn = f"dist.{distribution_name(base)}(...).mask(~data.isnan()).to_event({events})"
        how = f'pyro.sample("{name}", {fn}, obs=data.nan_to_num())'
    count = f"{number_missing(value)} of {value.numel()}"
    return f"The observed data of site {name!r} has NaN in {count} elements. Leave these out, as by {how}."


def support_line(site: Any) -> str:
    """Says how many values of a site's data lie outside of the support; empty if that is not known."""
    value, fn = site["value"], site["fn"]
    try:
        inside = fn.support.check(value)
    except (NotImplementedError, AttributeError, RuntimeError):
        return ""
    number, first = int((~inside).sum()), value[~inside].flatten()[:1].tolist() if inside.dim() == value.dim() else []
    shown = f", {first[0]} among them" if first else ""
    return (
        f"The data of site {site['name']!r} has {number} of {inside.numel()} values outside of the support of its "
        f"distribution, {described(fn)}{shown}. Give other data, or a distribution with their support."
    )


def data_line(site: Any, rows: tuple[int, ...]) -> str:
    """Says how the shape of a site's data differs from that of its distribution, and what to write; else empty."""
    value, fn = site["value"], site["fn"]
    if not site["is_observed"] or not isinstance(value, Tensor) or not hasattr(fn, "event_shape"):
        return ""
    given, drawn = tuple(value.shape), (*fn.batch_shape, *fn.event_shape)
    if given == drawn[len(drawn) - len(given) :]:
        return ""
    line = f"The data of site {site['name']!r} has the shape {given}; the distribution has the shape {drawn}."
    more = given[len(rows) :]
    if not fn.event_dim and more == (1,):
        return f"{line} Write obs=data.squeeze(-1), and give the parameters the shape {rows} too."
    if not fn.event_dim and more and given[: len(rows)] == rows:
        return (
            f"{line} The data has values of shape {more} in each row: give the parameters the shape {given} too, as by "
            f"mean[..., {', '.join(['None'] * len(more))}].expand{given}, and write .to_event({len(more)})."
        )
    if len(given) == len(drawn) and sorted(given) == sorted(drawn):
        return f"{line} Bring the dimensions of the data into the order of the distribution, as by data.permute(...)."
    return f"{line} Shapes are matched from the right; make both the same."
