r"""The variance of the gradient at fixed weights, times CPU time: ours beside Pyro's ELBOs, leave-one-out and DisARM.

Programs: those of a paper on static factorisation, without its second hidden Markov model, which runs as the first
(``factorised.py``), and three or four of each of seven kinds. Data are made up. Weights: after 96 steps of Adam with
the default, the same for all methods. *variance*: of one step's gradient of the guide's parameters, summed over these,
from 64 steps, or 32 of those that take more than 50 ms. *ms*: mean CPU time of such a step; ours include what is
learned and recorded. Methods take turns in one process, with one thread, without validation and garbage collection.
Critics and baselines go on learning. *first eight*: that of the first eight steps of the training.

*Factor*: variance times ms, over that of the default; above 1 the default needs less time for the same precision. Of
the numbers of particles, 2, 8 and 32 for leave-one-out, 1 and 8 for DisARM, 1 and 32 for Pyro's ELBOs, the best counts;
they run in a plate where the program allows it. ``TraceGraph_ELBO`` has Pyro's decaying-average baseline; leave-one-out
is ours, or on Pyro's bare traces, whichever is better. *exact*: ours is a sum over all values, without variance. A
star: biased, as values leave torch there. Empty: it does not serve the program. The default has the number of particles
that it takes by itself; what it has *with 32* stands beside, and, where there are no rows, with 1024, if a first step
takes less than a second. *z*: squared distance of the mean gradient from that of the default, in units of its
expectation. *error*: standard error of the variance, over the variance. Where it is above 0.3 the gradient has heavy
tails, and factors are rough.

    python benchmarks/variances.py [--full | --smoke] [--only NAME] [--output DIRECTORY]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import torch
from common import (
    PlainLeaveOneOut,
    Row,
    arguments,
    flat,
    grouped,
    median,
    only,
    others,
    ours,
    progress,
    publish,
    uncollected,
    with_averages,
    write_csv,
)
from factorised import PUBLISHED
from programs import MORE, PROGRAMS, Program
from pyro import poutine
from pyro.infer import ELBO, SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.optim import Adam
from torch import Tensor

from pyro_bpq import LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQError
from pyro_bpq.estimators import DisARM

KINDS: dict[str, tuple[str, ...]] = {
    "published": tuple(program.name for program in PUBLISHED if not program.steered),
    "published, with branches": tuple(program.name for program in PUBLISHED if program.steered),
    "VAE": ("linear VAE", "VAE, 400 hidden", "one-hot VAE, 200 hidden"),
    "stack of layers": ("two layers", "three layers", "four layers"),
    "chain": ("chain of 20", "count of 20", "chains of 32 rows"),
    "branches": ("loop", "gates", "sentence"),
    "counts": ("Poisson factors", "Poisson chain", "births and deaths"),
    "black box": ("schedule", "spelling", "warehouse"),
    "subsets and orders": ("items, a chain", "pairs, a chain", "pairs, one site", "ranking, one site"),
}
KIND = {name: kind for kind, names in KINDS.items() for name in names}
FAMILIES = ("Trace_ELBO", "TraceGraph_ELBO", "leave-one-out", "DisARM", "default with 32")
LOO, FEW = ScoreFunction(LeaveOneOut()), (2, 8, 32)
# Images of ten kinds, 8 by 8.
IMAGES = torch.rand(10, 64, generator=torch.Generator().manual_seed(0)).round().repeat(100, 1)
NOISE = torch.rand(1000, 64, generator=torch.Generator().manual_seed(1)) < 0.1
DIGITS = torch.where(NOISE, 1.0 - IMAGES, IMAGES)
TRAINING, DRAWS = 96, 64


def methods(program: Program) -> dict[str, Callable[[], ELBO]]:
    """ELBOs by family and number of particles."""
    found: dict[str, Callable[[], ELBO]] = {"default, 1": partial(TraceBackpropQ_ELBO, 1)}
    if program.steered:
        found["tracked, 1"] = partial(TraceBackpropQ_ELBO, structure="dynamic")
        found |= {f"leave-one-out, {n}": partial(TraceBackpropQ_ELBO, n, estimator=LOO, structure="dense") for n in FEW}
        return found | {"Trace_ELBO, 1": Trace_ELBO, "TraceGraph_ELBO, 1": TraceGraph_ELBO}
    found |= {f"leave-one-out, {n}": partial(ours, LOO, n) for n in FEW}
    found |= {f"leave-one-out, {n}, plain": partial(PlainLeaveOneOut, n) for n in FEW[1:]}
    found |= {f"DisARM, {n}": partial(ours, DisARM(), n) for n in (1, 8)}
    if not program.rows:
        found["leave-one-out with 1024, 1024"] = partial(ours, LOO, 1024)
    for n in (1, 32) if program.rows else (1, 32, 1024):
        options = {"num_particles": n, "vectorize_particles": n > 1, "max_plate_nesting": 1}
        if n > 1:
            found[f"default with {n}, {n}"] = partial(TraceBackpropQ_ELBO, **options)
        if n < 1024:
            found |= {f"{kind.__name__}, {n}": partial(kind, **options) for kind in (Trace_ELBO, TraceGraph_ELBO)}
    return found


class Lane:
    """A method at fixed weights."""

    def __init__(self, method: str, elbo: ELBO, programs: Any, state: Any) -> None:
        self.method, self.elbo, self.model, self.guide = method, elbo, programs.model, programs.guide
        if isinstance(elbo, TraceGraph_ELBO):
            self.guide = with_averages(self.guide)
        # Parameters are shared; baselines are not, nor what a run makes that comes where none was.
        self.state = {part: dict(values) for part, values in state.items()}
        self.first: Any = ""
        self.seconds, self.gradients = 0.0, list[dict[str, Tensor]]()

    def step(self, args: tuple[Tensor, ...]) -> None:
        """Takes a gradient."""
        with pyro.get_param_store().scope(self.state) as self.state:
            start = time.process_time()
            self.elbo.loss_and_grads(self.model, self.guide, *args)
            self.seconds += time.process_time() - start
            self.gradients.append(taken())


def taken() -> dict[str, Tensor]:
    """The gradients of the store's parameters, which have none then."""
    found = {name: p.grad for name, p in pyro.get_param_store().named_parameters() if p.grad is not None}
    for _, p in pyro.get_param_store().named_parameters():
        p.grad = None
    return found


def read_by(part: Callable[..., None], args: tuple[Tensor, ...]) -> set[str]:
    """Names of the parameters on which the laws of a part of the program depend."""
    found = set[str]()
    for _ in range(8):
        total = poutine.trace(part).get_trace(*args).log_prob_sum()
        if total.requires_grad:
            total.backward()
        found |= taken().keys()
    return found


def lanes_of(program: Program, args: tuple[Tensor, ...], smoke: bool) -> tuple[list[Lane], set[str]]:
    """The methods that serve a program, at trained weights; the parameters that are the model's alone."""
    pyro.set_rng_seed(0)
    programs, default = program.make(), TraceBackpropQ_ELBO()
    with pyro.get_param_store().scope() as state:
        svi = SVI(programs.model, programs.guide, Adam({"lr": 3e-3 if program.rows else 2e-2}), default)
        marks = [time.process_time()]
        for _ in range(2 if smoke else TRAINING):
            svi.step(*args)
            marks.append(time.process_time())
        svi.optim.optim_objs.clear()
        taken()
        left_out = read_by(programs.model, args) - read_by(programs.guide, args)
    lanes = [Lane("default", default, programs, state)]
    lanes[0].first = 1e3 * (marks[:9][-1] - marks[0])
    for method, make in methods(program).items():
        lane = Lane(method, make(), programs, state)
        try:
            lane.step(args)
        except BPQError:
            continue
        if lane.seconds < 1.0:
            lanes.append(lane)
            # What learns gets ready: baselines, critics, recordings.
            for _ in range(0 if smoke else 31 if "default" in method else 10 if "Graph" in method else 1):
                lane.step(args)
    return lanes, left_out


def measure(program: Program, smoke: bool) -> list[Row]:
    """The rows of a program."""
    args = (DIGITS[: program.rows],) if program.rows else ()
    lanes, left_out = lanes_of(program, args, smoke)
    for lane in lanes:
        lane.seconds, lane.gradients = 0.0, []
    with uncollected():
        for i in range(2 if smoke else DRAWS):
            for lane in lanes:
                # Half as many of those that take long.
                if i % 2 == 0 or lane.seconds < 0.05 * len(lane.gradients):
                    lane.step(args)
    shapes = {name: g for lane in lanes for found in lane.gradients for name, g in found.items()}
    zeros = {name: torch.zeros_like(g) for name, g in sorted(shapes.items()) if name not in left_out}
    rows, reference = list[Row](), None
    for lane in lanes:
        drawn = torch.stack([flat(found.get(name, zero) for name, zero in zeros.items()) for found in lane.gradients])
        mean, spread, n = drawn.mean(0), drawn.var(0), len(drawn)
        squares = (drawn - mean).square().sum(1)
        reference = reference or (mean, spread / n)
        expected = float((spread / n + reference[1]).sum())
        distance = float((mean - reference[0]).square().sum())
        ms, variance = 1e3 * lane.seconds / n, float(spread.sum())
        row: Row = {"kind": KIND[program.name], "program": program.name, "method": lane.method}
        row |= {"particles": lane.elbo.num_particles, "ms": ms, "first eight": lane.first, "variance": variance}
        row |= {"error": float(squares.std() / squares.mean().clamp(min=1e-30)) / n**0.5}
        rows.append(row | {"z": distance / max(expected, 1e-30)})
    # Rounding is no variance.
    is_exact = rows[0]["variance"] < 1e-9 * max(row["variance"] for row in rows)
    own = 0.0 if is_exact else rows[0]["variance"] * rows[0]["ms"]
    return [row | {"factor": row["variance"] * row["ms"] / own if own else math.inf} for row in rows]


def is_biased(row: Row) -> bool:
    """Whether values of a program leave torch, out of the sight of ``TraceGraph_ELBO``."""
    return row["method"].startswith("TraceGraph") and ("branch" in row["kind"] or row["kind"] == "black box")


def shown(factor: float) -> str:
    """A factor, with three digits."""
    return "exact" if math.isinf(factor) else f"{factor:.3g}"


def best(rows: list[Row]) -> dict[str, Row]:
    """The best row of each family."""
    found = {f: [row for row in rows if row["method"].startswith(f"{f},")] for f in FAMILIES}
    return {f: min(mine, key=lambda row: row["variance"] * row["ms"]) for f, mine in found.items() if mine}


def by_kind(rows: list[Row]) -> list[Row]:
    """Medians and ranges over the programs of a kind."""
    found = []
    for (kind,), mine in grouped(rows, "kind").items():
        programs = [best(own) for own in grouped(mine, "program").values()]
        row: Row = {"kind": kind, "programs": len(programs)}
        for family in FAMILIES:
            factors = sorted(one[family]["factor"] for one in programs if family in one)
            star = "*" * any(is_biased(one[family]) for one in programs if family in one)
            middle = shown(median(factors)) if factors else ""
            ends = f" ({shown(factors[0])} to {shown(factors[-1])})" if len(factors) > 1 else ""
            row[family] = f"{middle}{star}{ends}"
        found.append(row)
    return found


def by_program(rows: list[Row]) -> list[Row]:
    """Factors with the number of particles of the best, and variances of one particle."""
    found = []
    for (program,), mine in grouped(rows, "program").items():
        own, alone = best(mine), {row["method"]: row["variance"] for row in mine}
        row: Row = {"program": program, "default's particles": mine[0]["particles"], "ms": mine[0]["ms"]}
        many = [shown(each["factor"]) for each in mine if "with 1024" in each["method"]]
        for f in FAMILIES:
            row[f] = f"{shown(own[f]['factor'])}{'*' * is_biased(own[f])} ({own[f]['particles']})" if f in own else ""
        row["leave-one-out and default with 1024"] = ", ".join(many)
        ones = [f"{family}, 1" for family in ("default", *FAMILIES[:2], "DisARM")]
        found.append(row | {f"variance of {one}": alone.get(one, "") for one in ones})
    return found


def main() -> None:
    """Measures, prints, writes ``variances.csv`` and ``variances.md``."""
    options = arguments(__doc__, "smoke only")
    pyro.enable_validation(False)
    every = {program.name: program for program in (*PUBLISHED, *PROGRAMS, *MORE)}
    options.only = options.only or ("geometric;Poisson chain;linear VAE;spelling" if options.smoke else "")
    path, names = options.output / "variances.csv", only(options, KIND)
    rows = others(options, path, names)
    for name in progress(names, "programs"):
        rows += measure(every[name], options.smoke)
        rows.sort(key=lambda row: [*KIND].index(row["program"]))
        write_csv(path, rows)
    publish(path, "Variance of the gradient times time", __doc__, rows, by_kind(rows), by_program(rows))


if __name__ == "__main__":
    main()
