r"""How our default step grows with the number of sites and with the batch: CPU time, memory, and the first step.

Programs of binary sites with an observation each:

- ``chain``: every site reads the one before;
- ``dense``: every site of guide and model reads the sum of all earlier ones (``n²/2`` edges, cheap to run);
- ``recurrent``: the guide's sites read the state of a GRU that all earlier values went into.

An exponent is the slope of a quantity over the number of sites (or rows) on logarithmic scales, between a size and the
one before: 1 is linear. Time is the smallest CPU time of a whole SVI step on the cached structure; ``first step``
includes tracking and the build of network and layout, and is the smallest of several new programs. Sizes take turns, so
that a busy machine slows all of them. As in ``timeit``, Python's garbage collector is off meanwhile: it looks at all
objects of the process, in some steps of a small program and in every step of a large one, and the smallest time would
count it in the latter only. Memory is what a process of its own needs at its peak beyond what it held ahead
of the first step, the collector on.

    python benchmarks/scaling.py [--full] [--output DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import RESULTS, Row, progress, table, uncollected, write_csv, write_markdown
from overhead import WARM_UP, Program, resident
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_bpq import TraceBackpropQ_ELBO

KINDS = ("chain", "dense", "recurrent")
SITES = (125, 250, 500, 1000)
ROWS = (32, 128, 512, 2048, 4096)
REPEATS = 5
QUANTITIES = ("step", "first step", "megabytes")
ELBOS: dict[str, Callable[[], object]] = {"default": TraceBackpropQ_ELBO, "Trace_ELBO": Trace_ELBO}


def program(kind: str, sites: int, rows: int) -> Program:
    """Model and guide.

    Args:
        kind: Which sites read which.
        sites: Number of sites.
        rows: Rows of a plate that all sites are in.
    """
    torch.manual_seed(0)
    nets = nn.ModuleDict({"cell": nn.GRUCell(2, 8), "out": nn.Linear(8, 1)})
    data = torch.randn(sites, rows)

    def model() -> None:
        start, slope, means = (pyro.param(f"{name}", torch.zeros(2)) for name in ("prior", "next", "means"))
        with pyro.plate("rows", rows):
            read = torch.zeros(rows)
            for t in range(sites):
                z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=start[0] + slope[0] * read))
                pyro.sample(f"x_{t}", dist.Normal(means[0] + means[1] * z, 1.0), obs=data[t])
                read = (read * t + z) / (t + 1) if kind == "dense" else z

    def guide() -> None:
        pyro.module("nets", nets)
        slope = pyro.param("slope", torch.tensor(0.5))
        with pyro.plate("rows", rows):
            read, hidden = torch.zeros(rows), torch.zeros(rows, 8)
            for t in range(sites):
                logits = slope * (read + data[t])
                if kind == "recurrent":
                    hidden = nets["cell"](torch.stack((read, data[t]), -1), hidden)
                    logits = nets["out"](hidden).squeeze(-1)
                z: Tensor = pyro.sample(f"z_{t}", dist.Bernoulli(logits=logits))
                read = (read * t + z) / (t + 1) if kind == "dense" else z

    return model, guide


def memory(kind: str, sites: int, rows: int, elbo: str) -> float:
    """Megabytes at the peak beyond what was held before the first step; for a process of its own."""
    # What torch and Pyro load on first use is not to count.
    new_step("chain", 3, 2, elbo)()
    before = resident("VmRSS")
    step = new_step(kind, sites, rows, elbo)
    for _ in range(WARM_UP):
        step()
    return resident("VmHWM") - before


def times(kind: str, sizes: Sequence[tuple[int, int]], elbo: str) -> list[tuple[float, float]]:
    """Milliseconds of a cached step and of the first, by size; sizes take turns, so that a busy machine slows all."""
    new_step("chain", 3, 2, elbo)()
    first = [[milliseconds(new_step(kind, *size, elbo)) for size in sizes] for _ in range(REPEATS)]
    steps = [new_step(kind, *size, elbo) for size in sizes]
    for step in steps:
        for _ in range(4):
            step()
    cached = [[milliseconds(step) for step in steps] for _ in range(REPEATS)]
    return list(zip(map(min, zip(*cached, strict=True)), map(min, zip(*first, strict=True)), strict=True))


def new_step(kind: str, sites: int, rows: int, elbo: str) -> Callable[[], object]:
    """The step of a new program and ELBO; programs of one kind share their parameters."""
    return SVI(*program(kind, sites, rows), Adam({"lr": 1e-4}), ELBOS[elbo]()).step  # type: ignore[arg-type]


def milliseconds(step: Callable[[], object]) -> float:
    """CPU time of a step, without the garbage collector."""
    with uncollected():
        start = time.process_time()
        step()
        return 1000.0 * (time.process_time() - start)


def apart(what: str, *arguments: object) -> Any:
    """What :func:`memory` or :func:`times` gives, in a new process."""
    command = [sys.executable, __file__, "--measure", json.dumps((what, *arguments))]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def exponent(small: Row, large: Row, size: str, quantity: str) -> float:
    """Slope between two sizes on logarithmic scales."""
    return math.log(large[quantity] / small[quantity]) / math.log(large[size] / small[size])


def main() -> None:
    """Measures, prints, writes ``scaling.csv`` and ``scaling.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all sizes, Trace_ELBO too")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.measure:
        what, *arguments = options.measure
        print(json.dumps({"memory": memory, "times": times}[what](*arguments)))
        return
    sites, rows = (SITES, ROWS) if options.full else (SITES[1::2], ROWS[::2])
    jobs = [(kind, [(n, 1) for n in sites], elbo) for elbo in ELBOS for kind in KINDS]
    jobs += [("chain", [(20, n) for n in rows], elbo) for elbo in ELBOS]
    found: list[Row] = []
    for kind, sizes, elbo in progress(jobs, "programs"):
        for (n, b), (step, first) in zip(sizes, apart("times", kind, sizes, elbo), strict=True):
            taken = {"step": step, "first step": first, "megabytes": apart("memory", kind, n, b, elbo)}
            found.append({"program": kind, "elbo": elbo, "sites": n, "rows": b, **taken})
            print(found[-1], flush=True)
    slopes: list[Row] = []
    for elbo in ELBOS:
        groups = [(kind, "sites", [r for r in found if r["program"] == kind and r["rows"] == 1]) for kind in KINDS]
        groups.append(("chain", "rows", [r for r in found if r["rows"] > 1]))
        for kind, size, group in groups:
            own = [row for row in group if row["elbo"] == elbo]
            for small, large in pairwise(own):
                for name in QUANTITIES:
                    large[f"{name}, exponent"] = exponent(small, large, size, name)
            small, large = own[-2:]
            slope = {name: large[f"{name}, exponent"] for name in QUANTITIES}
            slopes.append({"program": kind, "elbo": elbo, "in": f"{size} {small[size]} to {large[size]}", **slope})
    for row in found:
        for name in QUANTITIES:
            row.setdefault(f"{name}, exponent", "")
    write_csv(options.output / "scaling.csv", found)
    page = table(slopes)
    print(page)
    parts = (
        "Default options, float32; one particle, but for 32 rows and more of `default`, which settles its own number. "
        "Exponents of growth between the two largest sizes: 1 is linear.",
        page,
        "CPU milliseconds of a cached step and of the first, the garbage collector off; megabytes at the peak, beyond "
        "what was held before, the collector on. Exponents from the size before.",
        table(found),
    )
    write_markdown(options.output / "scaling.md", "Growth with sites and batch", parts)


if __name__ == "__main__":
    main()
