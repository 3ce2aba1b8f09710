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
from pathlib import Path
from types import ModuleType

from common import Method, Row, Runner, arguments, median, only, others, progress, publish
from race import PYRO, Whole, loss_of

from pyro_bpq import TraceBackpropQ_ELBO

GALLERY = Path(__file__).parent.parent / "gallery"
METHODS = (Method("TraceBackpropQ_ELBO", TraceBackpropQ_ELBO), *reversed(PYRO))
SLICE = 0.5


def programs() -> dict[str, ModuleType]:
    """The modules of the gallery, by their names in tables."""
    sys.path.append(str(GALLERY))
    return {path.stem.replace("_", " "): importlib.import_module(path.stem) for path in sorted(GALLERY.glob("*.py"))}


def measure(program: ModuleType, seconds: float, seeds: int, particles: int) -> Row:
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
    row: Row = {method: round(median(values), 2) for method, values in bounds.items()}
    row |= {f"spread of {method}": round(max(values) - min(values), 2) for method, values in bounds.items()}
    return row | {f"ms of {method}": round(median(values), 2) for method, values in times.items()}


def main() -> None:
    """Measures and writes ``results/gallery.csv`` and ``gallery.md``."""
    options = arguments(__doc__, "smoke seeds only")
    seconds, seeds, particles = (20.0, 5, 200) if options.full else (4.0, 2, 30)
    if options.smoke:
        seconds, seeds, particles = 0.5, 1, 2
    seeds = options.seeds or seeds
    every, path = programs(), options.output / "gallery"
    names = only(options, every)
    measure(every[names[0]], 0.01, 1, 2)  # imports, and what torch does once
    rows = others(options, path.with_suffix(".csv"), names)
    for name in progress(names, "programs"):
        rows.append({"program": name, **measure(every[name], seconds, seeds, particles)})
    rows.sort(key=lambda row: row["program"])
    shown = [{name: v for name, v in row.items() if not name.startswith(("spread", "ms"))} for row in rows]
    # Two decimals, where a table has three digits.
    shown = [{name: v if name == "program" else f"{v:.2f}" for name, v in row.items()} for row in shown]
    more = [{name: v for name, v in row.items() if name not in {m.name for m in METHODS}} for row in rows]
    publish(path, "Gallery", __doc__, rows, shown, more)


if __name__ == "__main__":
    main()
