r"""What comparisons of runs share: values at which programs run, their costs there, and whether these agree.

Sampled values may hardly vary, so they do not show whether rows of a run are mixed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_bpq.rollout.features import finite_components
from pyro_bpq.rollout.runs import Program
from pyro_bpq.tracing.cost_statement import SkipCosts
from pyro_bpq.tracing.linear_reads import nodes_behind
from pyro_bpq.tracing.sandbox import Sandbox
from pyro_bpq.tracing.substitute import Substitute
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.watch import is_enumerated, samples

# Wraps model and guide with a function, and traces the program.
Trace = Callable[[Program, Callable[[Any], Any]], TracedRun]

# What was found is checked again after 1, 2, 4, ... uses, and then every ``LONGEST`` uses.
LONGEST = 128
# Number of tracked runs that are all compared.
_NEW = 16


class Kind(IntEnum):
    """Kinds of values of a row at which runs are compared."""

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
    """Draws values of a site that differ in each component from given ones, where it is finite; else new ones."""
    split = finite_components(fn)
    if split is None or split.cardinality < 2:
        return probe(fn, value.unsqueeze(0), [Kind.EVEN], generator)[0]
    old = split.index(value, fn)
    more = torch.randint(1, split.cardinality, old.shape, generator=generator).to(old.device)
    return split.value((old + more) % split.cardinality, fn).to(value.dtype).reshape(value.shape)


class RunsAt:
    """Runs programs at given values, and leaves generators and buffers unchanged.

    Args:
        trace: Wraps model and guide with a function, and traces the program.
        subsamples: Indices of subsampled plates, by name.
        has_buffers: Whether the programs may call modules with buffers.

    Attributes:
        draw_alike: Whether all runs, which start from one seed, have drawn the same number of random numbers.
    """

    def __init__(self, trace: Trace, subsamples: Mapping[str, Any], has_buffers: bool) -> None:
        self.trace, self.subsamples, self.has_buffers = trace, subsamples, has_buffers
        self.draw_alike = True
        self._after: list[Tensor] | None = None

    def costs(self, program: Program, values: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The costs of a run; ``None`` if it fails."""
        put, sandbox = Substitute({**values, **self.subsamples}), Sandbox(0, self.has_buffers)
        try:
            with sandbox, pyro.validation_enabled(False), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # Cost functions may be expensive, so they are called only once per step.
                run = self.trace(program, lambda part: SkipCosts()(put(part))).run
        except Exception:
            return None
        after = self._after = self._after or sandbox.after
        self.draw_alike &= all(torch.equal(*pair) for pair in zip(after, sandbox.after, strict=True))
        return {name: cost.detach() for name, cost in run.costs.items()}


def drawn_sites(run: TracedRun) -> dict[str, Any]:
    """The sites of a run whose values may be put in: latent ones that do not hold all their values at once."""
    return {
        name: site
        for trace in (run.model_trace, run.guide_trace)
        for name, site in samples(trace).items()
        if not site["is_observed"] and not is_enumerated(site) and isinstance(site["value"], Tensor)
    }


def leaves_of(costs: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that costs depend on."""
    variables = (getattr(node, "variable", None) for node in nodes_behind(*costs))
    leaves = (leaf for leaf in variables if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return [leaf for leaf in leaves if leaf.layout is torch.strided]


@contextlib.contextmanager
def moved(leaves: Sequence[Tensor], generator: torch.Generator) -> Iterator[None]:
    """Moves parameters by about a hundredth, and back; autograd takes no notice."""
    kept = [leaf.data for leaf in leaves]
    try:
        for leaf, data in zip(leaves, kept, strict=True):
            noise = torch.randn(data.shape, generator=generator).to(data)
            leaf.data = data + 0.01 * (1.0 + data.abs()) * noise
        yield
    finally:
        for leaf, data in zip(leaves, kept, strict=True):
            leaf.data = data


def is_due(uses: int) -> bool:
    """Whether a finding is checked again after this number of uses: 1, 2, 4, ..., and every 128."""
    return uses & (uses - 1) == 0 or uses % LONGEST == 0


class TrackedRuns:
    """Counts tracked runs: their structure may be new. Where most runs are tracked, few of them count."""

    def __init__(self) -> None:
        self.number = 0

    def may_be_new(self, traced: TracedRun) -> bool:
        """Whether particles of this run are to be compared as if for the first time; counts it if it is tracked."""
        if traced.reads is None:
            return False
        self.number += 1
        return self.number <= _NEW or is_due(self.number)


def agree(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    r"""Whether the costs of two runs agree up to rounding, element by element and in total.

    With ``t = eps ** 0.75`` of the coarsest type,

        |a_i - b_i| <= t (1 + |b_i|)   and   |Σ_i (a_i - b_i)| <= t (1 + |b|).

    The total matters: a mixed mean over many rows changes each cost by less than its rounding.
    """
    if any(a.shape != b.shape for a, b in zip(found, expected, strict=True)):
        return False
    if not found:
        return True
    types = [cost.dtype for cost in (*found, *expected) if cost.is_floating_point()]
    tolerance = max((torch.finfo(dtype).eps for dtype in types), default=0.0) ** 0.75
    # Some devices lack float64.
    wide = torch.float32 if found[0].device.type == "mps" else torch.float64
    left, right = (torch.cat([cost.detach().reshape(-1).to(wide) for cost in costs]) for costs in (found, expected))
    difference = torch.where(left == right, 0.0, left - right)
    difference = torch.where(left.isnan() & right.isnan(), 0.0, difference)
    finite = torch.where(right.isfinite(), right, 0.0)
    is_near = (difference.abs() <= tolerance * (1.0 + finite.abs())).all()
    return bool(is_near & (difference.sum().abs() <= tolerance * (1.0 + finite.norm())))
