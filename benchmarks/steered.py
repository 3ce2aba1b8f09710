r"""Steps on programs that sampled values steer: milliseconds and variance of the gradient at fixed weights.

Methods take turns, ``--turn`` gradients at a time. In turns of one gradient each step finds the processor's caches
filled by the other methods, which no training run does; it costs most where a step has most code. *ms*: mean CPU time
of ``loss_and_grads``. *variance*: of the gradient of all parameters, summed. Weights are the initial ones and those
after 1,000 steps of Adam. Critics, scales and baselines learn at these weights before they are measured. ``tracked``
follows dependencies at every step, with critics (``structure="dynamic"``). *z*: squared distance of the mean from that
of leave-one-out with 8 particles, in units of its expectation: 1 if unbiased. Programs that are held
out are left out unless asked for.

    python benchmarks/steered.py [--full] [--draws N] [--turn N] [--only NAME;NAME] [--held-out] [--output DIRECTORY]
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from common import Row, flat, grouped, parser_of, table, uncollected, write_csv, write_markdown
from programs import PROGRAMS, Program
from pyro.infer import ELBO, SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.optim import Adam
from torch import Tensor

from pyro_bpq import LeaveOneOut, RunningBaseline, ScoreFunction, TraceBackpropQ_ELBO


def ordered(baseline: Any, particles: int) -> Callable[[], ELBO]:
    """Makes an ELBO that takes steps in program order."""
    return lambda: TraceBackpropQ_ELBO(particles, estimator=ScoreFunction(baseline), structure="dense")


METHODS: dict[str, Callable[[], ELBO]] = {
    "default": TraceBackpropQ_ELBO,
    "tracked": lambda: TraceBackpropQ_ELBO(structure="dynamic"),
    "program order": ordered(None, 1),
    "running mean": ordered(RunningBaseline(), 1),
    "leave-one-out, 2": ordered(LeaveOneOut(), 2),
    "leave-one-out, 4": ordered(LeaveOneOut(), 4),
    "leave-one-out, 8": ordered(LeaveOneOut(), 8),
    "Trace_ELBO": Trace_ELBO,
    "TraceGraph_ELBO": TraceGraph_ELBO,
}
REFERENCE = "leave-one-out, 8"
LEARNING = 200


class Drawer:
    """Draws gradients of a method at fixed weights."""

    def __init__(self, elbo: ELBO, module: Any, seed: int) -> None:
        self.elbo, self.module, self.seconds = elbo, module, 0.0
        self.gradients: list[Tensor] = []
        pyro.set_rng_seed(seed)
        self.rng = pyro.util.get_rng_state()

    def draw(self, keeps: bool = True) -> None:
        """Draws one gradient."""
        pyro.util.set_rng_state(self.rng)
        start = time.process_time()
        self.elbo.loss_and_grads(self.module.model, self.module.guide)
        taken = time.process_time() - start
        self.rng = pyro.util.get_rng_state()
        parameters = list(self.module.parameters())
        if keeps:
            self.seconds += taken
            zeros = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in parameters]
            self.gradients.append(flat(zeros))
        for p in parameters:
            p.grad = None

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the gradient."""
        stacked = torch.stack(self.gradients)
        return stacked.mean(0), stacked.var(0)


def trained(program: Program, steps: int) -> dict[str, Tensor]:
    """Weights after some steps of leave-one-out."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    module = program.make()
    svi = SVI(module.model, module.guide, Adam({"lr": 1e-2}), ordered(LeaveOneOut(), 4)())
    for _ in range(steps):
        svi.step()
    return copy.deepcopy(module.state_dict())


def measure(program: Program, steps: int, draws: int, turn: int) -> list[Row]:
    """Figures of a program at the weights of a step."""
    weights = trained(program, steps)
    pyro.clear_param_store()
    module = program.make()
    module.load_state_dict(weights)
    drawers = {name: Drawer(make(), module, seed) for seed, (name, make) in enumerate(METHODS.items())}
    for drawer in drawers.values():
        for _ in range(LEARNING):
            drawer.draw(False)
    with uncollected():
        for first in range(0, draws, turn):
            for drawer in drawers.values():
                for _ in range(first, min(first + turn, draws)):
                    drawer.draw()
    mean, variance = drawers[REFERENCE].moments
    base = 1e3 * drawers["Trace_ELBO"].seconds / draws
    rows: list[Row] = []
    for name, drawer in drawers.items():
        own, spread = drawer.moments
        error = ((variance + spread) / draws).sqrt().clamp(min=1e-12)
        ms = 1e3 * drawer.seconds / draws
        number = getattr(drawer.elbo, "num_particles", 1)
        rows.append(
            {
                "program": program.name,
                "steps": steps,
                "method": name,
                "particles": number,
                "ms": ms,
                "ms of a particle / Trace_ELBO": ms / number / base,
                "variance": float(spread.sum()),
                "variance x ms": float(spread.sum()) * ms,
                "z": float((own - mean).square().sum() / error.square().sum()),
            }
        )
    best = min(row["variance x ms"] for row in rows if row["method"] != "TraceGraph_ELBO")
    return [{**row, "over the best": row["variance x ms"] / best} for row in rows]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="names of programs, separated by semicolons")
    parser.add_argument("--draws", type=int, default=0, help="number of gradients of each method")
    parser.add_argument("--turn", type=int, default=10, help="number of gradients of a method in a row")
    parser.add_argument("--held-out", action="store_true", help="the programs that rules were not made on, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="pyro")
    options.draws = options.draws or (400 if options.full else 40)
    chosen = [p for p in PROGRAMS if p.steered and (options.held_out or not p.held_out)]
    if options.only:
        chosen = [program for program in PROGRAMS if program.name in options.only.split(";")]
    rows: list[Row] = []
    for program in chosen:
        for steps in (0, 1000) if options.full else (0,):
            rows += measure(program, steps, options.draws, options.turn)
            print(table(rows[-len(METHODS) :]), flush=True)
            write(options.output, rows, options)


def write(output: Path, rows: list[Row], options: argparse.Namespace) -> None:
    """Writes CSV and Markdown."""
    write_csv(output / "steered.csv", rows)
    best, times = [], []
    for (program, steps), mine in grouped(rows, "program", "steps").items():
        own = {row["method"]: row for row in mine}
        case: Row = {"program": program, "steps": steps}
        best.append(case | {name: own[name]["over the best"] for name in METHODS})
        case["ms of Trace_ELBO"] = own["Trace_ELBO"]["ms"]
        column = "ms of a particle / Trace_ELBO"
        times.append(case | {name: own[name][column] for name in METHODS if name != "Trace_ELBO"})
    biases = [
        {"program": row["program"], "steps": row["steps"], "z": row["z"]}
        for row in rows
        if row["method"] == "TraceGraph_ELBO"
    ]
    parts = [
        f"{options.draws} gradients of each method at the weights of a step, one thread; methods took turns, "
        f"{options.turn} gradients at a time.",
        "## Variance times time, over that of the best method\n\n"
        "`TraceGraph_ELBO` is not among the best where it is biased: see the last table.\n\n" + table(best),
        "## CPU time of a particle, over that of `Trace_ELBO`\n\n" + table(times),
        "## Squared distance of the mean gradient of `TraceGraph_ELBO` from that of leave-one-out\n\nIn units of its "
        "expectation: 1 if unbiased; above 4 it is biased.\n\n" + table(biases),
    ]
    write_markdown(output / "steered.md", "Programs that sampled values steer", parts)


if __name__ == "__main__":
    main()
