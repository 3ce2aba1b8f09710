"""The bound of each program of ``gallery/`` after equal processor time: ours, and Pyro's own ELBOs.

Methods: ``TraceBackpropQ_ELBO()``, ``TraceGraph_ELBO`` with Pyro's decaying-average baseline at every site, and
``Trace_ELBO``; one particle in Pyro's, what the default takes in ours. All share the optimiser, its rate and the seeds;
runs take turns. Bounds are medians over seeds of the ELBO in nats after 4 s of processor time, with ``--full`` 20 s;
*spread* is the largest less the smallest. More is better. ``TraceGraph_ELBO`` is biased on programs that sampled values
steer: the grammar and the black box.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from common import (
    Method,
    Runner,
    about,
    arguments,
    median,
    progress,
    read_csv,
    table,
    write_csv,
    write_markdown,
)
from race import PYRO, Whole, loss_of

from pyro_bpq import TraceBackpropQ_ELBO

GALLERY = Path(__file__).parent.parent / "gallery"
METHODS = (Method("TraceBackpropQ_ELBO", TraceBackpropQ_ELBO), *reversed(PYRO))
SLICE = 0.5


def programs() -> list[ModuleType]:
    """The modules of the gallery."""
    sys.path.append(str(GALLERY))
    return [importlib.import_module(path.stem) for path in sorted(GALLERY.glob("*.py"))]


def title(program: ModuleType) -> str:
    """The name of a program in tables."""
    return program.__name__.replace("_", " ")


def measure(program: ModuleType, seconds: float, seeds: int, particles: int) -> dict[str, Any]:
    """Medians over seeds of the bound, and numbers of steps."""
    bounds: dict[str, list[float]] = {method.name: [] for method in METHODS}
    times: dict[str, list[float]] = {method.name: [] for method in METHODS}
    task = Whole(lambda: program, program.data())
    for seed in range(seeds):
        runs = [Runner(task, method, program.LR, seed) for method in METHODS]
        for turn in range(1, max(1, round(seconds / SLICE)) + 1):
            for run in runs:
                run.train(turn * SLICE)
        for run in runs:
            bounds[run.method.name].append(-loss_of(run, particles))
            times[run.method.name].append(1e3 * run.seconds / run.steps)
    row: dict[str, Any] = {"program": title(program)}
    row |= {method: round(median(values), 2) for method, values in bounds.items()}
    row |= {f"spread of {method}": round(max(values) - min(values), 2) for method, values in bounds.items()}
    return row | {f"ms of {method}": round(median(values), 2) for method, values in times.items()}


def main() -> None:
    """Measures and writes ``results/gallery.csv`` and ``gallery.md``."""
    options = arguments(__doc__, "smoke seeds only")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seconds, seeds, particles = (20.0, 5, 200) if options.full else (4.0, 2, 30)
    if options.smoke:
        seconds, seeds, particles = 0.5, 1, 2
    seeds = options.seeds or seeds
    measure(programs()[0], 0.01, 1, 2)  # imports, and what torch does once
    old = {row["program"]: row for row in read_csv(options.output / "gallery.csv")} if options.only else {}
    for program in progress([one for one in programs() if title(one).startswith(options.only)], "programs"):
        old[title(program)] = measure(program, seconds, seeds, particles)
        rows = [row for _, row in sorted(old.items())]
        write_csv(options.output / "gallery.csv", rows)
    shown = [{name: v for name, v in row.items() if not name.startswith(("spread", "ms"))} for row in rows]
    # Two decimals, where a table has three digits.
    shown = [{name: v if name == "program" else f"{v:.2f}" for name, v in row.items()} for row in shown]
    more = [{name: v for name, v in row.items() if name not in {m.name for m in METHODS}} for row in rows]
    write_markdown(options.output / "gallery.md", "Gallery", [*about(__doc__), table(shown), table(more)])


if __name__ == "__main__":
    main()
