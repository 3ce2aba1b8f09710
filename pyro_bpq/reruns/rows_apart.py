r"""Checks by values whether rows of a plate meet, after operators through which rows are not followed."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.reruns.comparisons import (
    Kind,
    RunsAt,
    Trace,
    agree,
    drawn_sites,
    leaves_of,
    moved,
    probe,
    probe_generator,
    shifted,
)
from pyro_bpq.rollout.runs import Program
from pyro_bpq.tracing.traced_run import TracedRun

# Pyro's record of a vectorised plate: its name, the dimension that it has in a batch, and its size.
Frame = Any

_KINDS = (Kind.EVEN, Kind.FIRST, Kind.LAST)


def rows_that_meet(
    trace: Trace, program: Program, run: TracedRun, has_buffers: bool, seed: int, is_first: bool
) -> dict[str, tuple[str, ...]]:
    """Finds costs in which a row reads other rows, among the costs whose rows were not followed.

    All rows of a plate get probed values: drawn evenly, or the first or the last one of each site. Then half of the
    rows get other ones, and the others have to cost the same as before; then so with the other half. A weight of zero
    hides what it multiplies, so that parameters are moved by a hundredth where rows have their last value.

    Args:
        trace: Wraps model and guide with a function, and traces the program.
        program: The program.
        run: A tracked run of it. Its ``unfollowed`` are the costs to judge.
        has_buffers: Whether the programs may call modules with buffers.
        seed: Seed of the values.
        is_first: Whether to try all kinds of values, or one of them.

    Returns:
        The costs and plates; nothing where runs fail, draw more noise at some values than at others, or cost something
        else each time.
    """
    sites = drawn_sites(run)
    runs, generator = RunsAt(trace, run.subsamples, has_buffers), probe_generator(seed)
    sampled = {name: site["value"].detach() for name, site in sites.items()}
    leaves, found = leaves_of(run.run.costs.values()), dict[str, tuple[str, ...]]()
    kinds = _KINDS if is_first else (_KINDS[seed % len(_KINDS)],)

    def put(frame: Frame, values: Mapping[str, Tensor], draw: Callable[[Any, Tensor], Tensor]) -> dict[str, Tensor]:
        """New values of the sites in a plate."""
        return {n: draw(sites[n], v) if _has(sites[n], v, frame) else v for n, v in values.items()}

    def meeting(frame: Frame, kind: Kind) -> set[str]:
        """Costs whose rows do not all stay as they are if others change, from values of a kind on."""
        own = [cost for cost, plates in run.unfollowed.items() if frame.name in plates]
        start = put(frame, sampled, lambda site, value: probe(site["fn"], value.unsqueeze(0), [kind], generator)[0])
        before, met = runs.costs(program, start), set[str]()
        for half in _halves(frame.size, generator) if before is not None else ():
            change = functools.partial(_changed, rows=half, frame=frame, generator=generator)
            after = runs.costs(program, put(frame, start, change))
            if before is not None and after is not None:
                met |= {name for name in own if not _is_kept(before.get(name), after.get(name), half, frame)}
        # Costs that change from run to run, as by a counter or a clock, show nothing.
        again = [before or {}, *((runs.costs(program, start) or {}) for _ in range(2 if met else 0))]
        for one, other in itertools.pairwise(again):
            met = {n for n in met if n in one and n in other and agree([one[n]], [other[n]])}
        return met

    for frame in _frames(sites, run.unfollowed):
        for kind in kinds:
            with moved(leaves, generator) if kind is Kind.LAST else contextlib.nullcontext():
                met = meeting(frame, kind)
            found |= {name: (frame.name,) for name in sorted(met)}
            if met:
                break
    return found if runs.draw_alike else {}


def plated_costs(run: TracedRun) -> dict[str, tuple[str, ...]]:
    """The costs of a tracked run that read sampled sites of their own plates, with these plates."""
    found, sampled = {}, run.run.sites.keys()
    for entry, cost in zip(run.entries, run.run.costs, strict=True):
        inside = {plate for name in (run.reads or {})[cost] & sampled for plate in run.plates[name]}
        own = tuple(plate.name for plate in entry[1] if plate in inside)
        if own:
            found[cost] = own
    return found


def _frames(sites: Mapping[str, Any], unfollowed: Mapping[str, tuple[str, ...]]) -> list[Frame]:
    """The plates in which rows may meet."""
    names = {name for plates in unfollowed.values() for name in plates}
    frames = dict.fromkeys(frame for site in sites.values() for frame in site["cond_indep_stack"])
    return [frame for frame in frames if frame.vectorized and frame.name in names and frame.size > 1]


def _has(site: Any, value: Tensor, frame: Frame) -> bool:
    """Whether the rows of a site's value are those of a plate."""
    dim = frame.dim - len(site["fn"].event_shape)
    is_inside = any(own.name == frame.name and own.vectorized for own in site["cond_indep_stack"])
    return is_inside and value.dim() >= -dim and value.shape[dim] == frame.size


def _halves(size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """A random half of the rows, then the other one."""
    order = torch.randperm(size, generator=generator)
    half = torch.zeros(size, dtype=torch.bool)
    half[order[: size // 2]] = True
    yield half
    yield ~half


def _changed(site: Any, value: Tensor, rows: Tensor, frame: Frame, generator: torch.Generator) -> Tensor:
    """The value with other ones in some rows of a plate."""
    dim = frame.dim - len(site["fn"].event_shape)
    where = rows.reshape(-1, *(1,) * (-dim - 1)).to(value.device)
    return torch.where(where, shifted(site["fn"], value, generator), value)


def _is_kept(before: Tensor | None, after: Tensor | None, changed: Tensor, frame: Frame) -> bool:
    """Whether a cost is the same in all rows but those that have changed."""
    if before is None or after is None or before.shape != after.shape or before.dim() < -frame.dim:
        return True
    if before.shape[frame.dim] != frame.size:
        return True
    kept = (~changed).nonzero().reshape(-1).to(before.device)
    return agree(*([cost.index_select(frame.dim, kept).reshape(-1)] for cost in (after, before)))
