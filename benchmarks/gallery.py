"""The bound of each program of ``gallery/`` after equal processor time: ours, and Pyro's own ELBOs.

Methods: ``TraceBackpropQ_ELBO()``, ``TraceGraph_ELBO`` with Pyro's decaying-average baseline at every site that is not
reparameterised, and ``Trace_ELBO``; one particle in Pyro's, what the default takes in ours. All share the
optimiser, its rate and the seeds; runs take turns. ``--full``: 20 seconds and five seeds, else 4 and two.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyro
import torch
from common import arguments, median, progress, read_csv, table, write_csv, write_markdown
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.diagnostics.compare import GraphELBO

GALLERY = Path(__file__).parent.parent / "gallery"
METHODS: dict[str, Callable[[], Any]] = {
    "TraceBackpropQ_ELBO": TraceBackpropQ_ELBO,
    "TraceGraph_ELBO": lambda: GraphELBO(has_baselines=True),
    "Trace_ELBO": Trace_ELBO,
}
SLICE = 0.5


def programs() -> list[ModuleType]:
    """The modules of the gallery."""
    found = []
    for path in sorted(GALLERY.glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"gallery_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.title = path.stem.replace("_", " ")
        found.append(module)
    return found


class Run:
    """Training of a program with a param store of its own."""

    def __init__(self, program: ModuleType, method: str, seed: int) -> None:
        self.program, self.args, self.elbo = program, program.data(), METHODS[method]()
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        self.optimiser = Adam({"lr": program.LR})
        self.svi = SVI(program.model, program.guide, self.optimiser, self.elbo)
        self.store, self.noise = pyro.get_param_store().get_state(), torch.get_rng_state()
        self.seconds, self.steps = 0.0, 0

    def train_for(self, seconds: float) -> None:
        """Trains for a slice of processor time."""
        self._enter()
        start = time.process_time()
        while time.process_time() - start < seconds:
            self.svi.step(*self.args)
            self.steps += 1
        self.seconds += time.process_time() - start
        self.store, self.noise = pyro.get_param_store().get_state(), torch.get_rng_state()

    def bound(self, particles: int) -> float:
        """The ELBO in nats, of so many particles."""
        self._enter()
        pyro.set_rng_seed(1)
        with torch.no_grad():
            return -Trace_ELBO(num_particles=particles).loss(self.program.model, self.program.guide, *self.args)

    def _enter(self) -> None:
        # The optimiser knows its parameters by object: they are put back, not copied.
        pyro.clear_param_store()
        pyro.get_param_store().set_state(self.store)
        torch.set_rng_state(self.noise)


def measure(program: ModuleType, seconds: float, seeds: int, particles: int) -> dict[str, Any]:
    """Medians over seeds of the bound, and numbers of steps."""
    found: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
    for seed in range(seeds):
        runs = {method: Run(program, method, seed) for method in METHODS}
        for _ in range(max(1, round(seconds / SLICE))):
            for run in runs.values():
                run.train_for(SLICE)
        for method, run in runs.items():
            found[method].append((run.bound(particles), 1e3 * run.seconds / run.steps))
    row: dict[str, Any] = {"program": program.title}
    for method, values in found.items():
        row[method] = round(median(bound for bound, _ in values), 2)
    for method, values in found.items():
        bounds = [bound for bound, _ in values]
        row[f"spread of {method}"] = round(max(bounds) - min(bounds), 2)
    for method, values in found.items():
        row[f"ms of {method}"] = round(median(ms for _, ms in values), 2)
    return row


def main() -> None:
    """Measures and writes ``results/gallery.csv`` and ``gallery.md``."""
    options = arguments(__doc__, resumes=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seconds, seeds, particles = (20.0, 5, 200) if options.full else (4.0, 2, 30)
    if options.smoke:
        seconds, seeds, particles = 0.5, 1, 2
    seeds = options.seeds or seeds
    for method in METHODS:
        Run(programs()[0], method, 0).train_for(0.01)  # imports, and what torch does once
    old = {row["program"]: row for row in read_csv(options.output / "gallery.csv")} if options.only else {}
    chosen = [program for program in programs() if program.title.startswith(options.only)]
    for program in progress(chosen, "programs"):
        old[program.title] = measure(program, seconds, seeds, particles)
        rows = [row for _, row in sorted(old.items())]
        write_csv(options.output / "gallery.csv", rows)
    text = (
        f"The ELBO in nats after {seconds:g} s of processor time, median of {seeds} seeds, of {particles} particles; "
        "spread is the largest less the smallest. More is better. TraceGraph_ELBO has Pyro's own baseline. "
        "It is biased on programs that sampled values steer: the grammar and the black box."
    )
    shown = [{name: v for name, v in row.items() if not name.startswith(("spread", "ms"))} for row in rows]
    more = [{name: v for name, v in row.items() if name not in METHODS} for row in rows]
    write_markdown(options.output / "gallery.md", "Gallery", [text, _exact(shown), table(more)])


def _exact(rows: list[dict[str, Any]]) -> str:
    """A Markdown table with two decimals, where :func:`table` has three digits."""
    return table([{name: f"{v:.2f}" if isinstance(v, float) else v for name, v in row.items()} for row in rows])


if __name__ == "__main__":
    main()
