"""The default against its own options and Pyro's ELBOs, at equal CPU time, on programs of many kinds.

Methods: the default, its rules without measurement (``choice="fixed"``), a candidate pinned from the first step,
``Trace_ELBO`` and, with ``--all``, more candidates and ``TraceGraph_ELBO`` with decaying averages. Where the default
has nothing to try, its rules alone are the same method, and have no row. The loss is minus the ELBO of fresh samples
from the trained guide, in nats per row of digits or per program, with two standard errors. The first seeds,
``--tuning`` of them, pick the learning rate of a method; ``--rates FILE`` takes those of an earlier result, and for
*fixed* that of the default. All runs of a seed take turns. The default is trained half as long again, for the time
that it takes to the loss at which another method ends: *time*, over the other's. Where another method does what the
default does, its curve is another draw of the same, and *time* is that of a step of the default over that of the
other method. Rows that the result file has are kept: ``--only`` measures programs anew. The programs that
``programs.HELD_OUT`` names are left out unless asked for with ``--held-out``. A candidate that refuses a program has
no row.

``--compile`` races our own methods with compiled steps, into ``choice_compiled.csv``; what it takes to make these, by
the clock, is told apart.

    python benchmarks/choice.py [--seconds 12] [--seeds 2] [--tuning 1] [--only NAME;NAME] [--held-out] [--all]
        [--methods NAME;NAME] [--rates FILE] [--grid RATE ...] [--samples 1] [--compile]
        [--output DIRECTORY]
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import random
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch
from common import RESULTS, Row, read_csv, table, timed_step, write_csv, write_markdown
from programs import Program, selected
from pyro import poutine
from pyro.infer import ELBO, SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.optim import Adam
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.choice import Candidate
from pyro_bpq.choice.candidates import BY_NAME, FIXED
from pyro_bpq.errors import BPQError

STEERED = ("program order, 4 particles",)
PLAIN = (
    *("leave-one-out, 4 particles", "leave-one-out, 8 particles"),
    *("no critics", "sums over values, 8 particles", "the rules, one particle"),
)
DEFAULT = "default"
# Others that ``--methods`` may name, each of which ``criterion.md`` has on the programs that it is made for.
FURTHER = tuple(name for name in BY_NAME if name not in (*STEERED, *PLAIN, FIXED.name))
AVERAGE = {"use_decaying_avg_baseline": True}
# Where the rules' loss is looked at, in parts of a run of the others.
MARKS = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0, 1.15, 1.3, 1.5)
# A step that takes longer, in seconds, records and compiles.
MAKING = 0.3
# Learning rates: with rows of data, and without. There the loss ends at a floor of noise, which a coarser grid misses.
RATES = {True: (1e-3, 3e-3, 1e-2), False: (1e-2, 1.7e-2, 3e-2, 5.5e-2, 1e-1)}


def digits() -> Tensor:
    """Images of the training set, in [0, 1]."""
    path = Path(os.environ.get("PYRO_BPQ_DATA", "data")) / "digits.npz"
    return torch.tensor(np.load(path)["x_train"]).float().flatten(1) / 16.0


def pinned(candidate: Candidate, compile: bool = False) -> Callable[[], ELBO]:
    """Makes the ELBO of a candidate; with compiled steps it gets what the candidate stands for by hand."""
    if not compile:
        return lambda: TraceBackpropQ_ELBO(choice=candidate)
    options: dict[str, Any] = {"estimator": candidate.estimator} if candidate.estimator is not None else {}
    options |= {} if candidate.critics else {"critic": None}
    if candidate.num_particles is not None:
        options |= {"num_particles": candidate.num_particles, "vectorize_particles": candidate.vectorized}
    return lambda: TraceBackpropQ_ELBO(compile=True, **options)


def methods(
    program: Program, everything: bool, chosen: str = "", compile: bool = False
) -> dict[str, Callable[[], ELBO]]:
    """The rivals on a program."""
    names = STEERED if program.steered else PLAIN
    found: dict[str, Callable[[], ELBO]] = {
        DEFAULT: lambda: TraceBackpropQ_ELBO(compile=compile),
        "fixed": lambda: TraceBackpropQ_ELBO(choice="fixed", compile=compile),
        "Trace_ELBO": Trace_ELBO,
    }
    if compile:
        # Of Pyro's ELBOs the step of none is compiled.
        chosen = chosen or ";".join((DEFAULT, *names))
    if chosen:
        found |= {"TraceGraph_ELBO": TraceGraph_ELBO} | {name: pinned(one, compile) for name, one in BY_NAME.items()}
        return {name: found[name] for name in chosen.split(";") if name in (*names, *FURTHER) or name not in BY_NAME}
    if everything:
        found["TraceGraph_ELBO"] = TraceGraph_ELBO
    return found | {name: pinned(BY_NAME[name]) for name in (names if everything else names[:1])}


class Run:
    """A training run, which takes turns with others; parameters and random numbers are its own.

    Args:
        program: What is trained.
        method: Name of the method.
        elbo: Its ELBO.
        rate: Learning rate of Adam.
        seed: Seed of weights, batches and draws.
    """

    def __init__(self, program: Program, method: str, elbo: ELBO, rate: float, seed: int) -> None:
        self.program, self.method, self.elbo, self.rate = program, method, elbo, rate
        self.used, self.making, self.steps = 0.0, 0.0, 0
        self.losses: dict[float, float] = {}
        self.generator = torch.Generator().manual_seed(seed)
        with pyro.get_param_store().scope() as self.state:
            pyro.set_rng_seed(seed)
            self.module = program.make()
            guide = self.module.guide
            if isinstance(elbo, TraceGraph_ELBO):
                guide = poutine.infer_config(guide, lambda site: {**site["infer"], "baseline": AVERAGE})
            self.svi = SVI(self.module.model, guide, Adam({"lr": rate}), elbo)
            self.draws = torch.get_rng_state()

    def train(self, until: float, data: Tensor) -> None:
        """Trains until so many seconds of CPU time are spent in all."""
        with pyro.get_param_store().scope(self.state) as self.state:
            torch.set_rng_state(self.draws)
            while self.used < until:
                self.step(data)
            self.draws = torch.get_rng_state()

    def step(self, data: Tensor) -> None:
        """One step; only the part after the batch is timed."""
        rows = self.program.rows
        args = (data[torch.randint(len(data), (rows,), generator=self.generator)],) if rows else ()
        seconds, making = timed_step(lambda: self.svi.step(*args), self.elbo, MAKING)
        self.used, self.making, self.steps = self.used + seconds, self.making + making, self.steps + 1

    def measure(self, mark: float, data: Tensor, times: int) -> None:
        """Notes the loss of ``times`` as many samples as usual, more exactly at the end."""
        program = self.program
        few, many = (2, 5) if program.rows else (200, 1000) if program.steered else (100, 500)
        args = (data,) if program.rows else ()
        with pyro.get_param_store().scope(self.state) as self.state, torch.no_grad():
            number = times * (many if mark == 1.0 else few)
            losses = [Trace_ELBO().loss(self.module.model, self.module.guide, *args) for _ in range(number)]
        self.losses[mark] = statistics.fmean(losses) / (len(data) if program.rows else 1)


def done_by(elbo: ELBO) -> str:
    """What an ELBO does at each site, without the reasons; empty for Pyro's ELBOs."""
    if not isinstance(elbo, TraceBackpropQ_ELBO):
        return ""
    lines = [line for line in str(elbo.plan).splitlines() if not line.startswith("no extra run of the model:")]
    told = [re.sub(", because [^;]*", "", line) for line in lines]
    way = dataclasses.replace(elbo.particles.now, nesting=0.0)
    return "; ".join([str(way), *told])


def turns(runs: Sequence[Run], options: argparse.Namespace, data: Tensor) -> dict[Run, Exception]:
    """Lets runs take turns, in changing order; those that fail drop out."""
    shuffle, failed = random.Random(0), dict[Run, Exception]()
    for mark in MARKS:
        for run in shuffle.sample(runs, len(runs)):
            if run in failed or (mark > 1.0 and run.method != DEFAULT):
                continue
            try:
                run.train(options.seconds * mark, data)
                if mark == 1.0 or run.method == DEFAULT:
                    run.measure(mark, data, options.samples)
            except (BPQError, RuntimeError, ValueError) as error:
                if run.method not in BY_NAME:
                    raise
                # A pinned candidate may not serve a program.
                failed[run] = error
    return failed


def race(
    program: Program, options: argparse.Namespace, data: Tensor, known: Mapping[tuple[str, str], float]
) -> list[Row]:
    """The rows of a program; ``known`` are learning rates by program and method."""
    rivals = methods(program, options.all, options.methods, options.compile)
    runs: dict[str, dict[float, list[Run]]] = {name: {} for name in rivals}
    for seed in range(options.seeds):
        lanes = []
        for name, make in rivals.items():
            grid = options.grid or RATES[bool(program.rows)]
            rates = (known[program.name, name],) if (program.name, name) in known else grid
            rates = (best_rate(runs[name]),) if seed >= options.tuning else rates
            lanes += [Run(program, name, make(), rate, seed) for rate in rates]
        failed = turns(lanes, options, data)
        for run, error in failed.items():
            print(f"{program.name}, {run.method}: {error}", flush=True)
        rivals = {name: make for name, make in rivals.items() if name not in {run.method for run in failed}}
        for run in lanes:
            if run.method in rivals:
                runs[run.method].setdefault(run.rate, []).append(run)
    found = [row_of(program, runs[name], options) for name in rivals]
    print(table(compared(found)), flush=True)
    return found


def best_rate(runs: Mapping[float, Sequence[Run]]) -> float:
    """The learning rate whose mean loss is least, of those that ran on most seeds."""
    most = max(map(len, runs.values()))
    means = {rate: statistics.fmean(run.losses[1.0] for run in own) for rate, own in runs.items() if len(own) == most}
    return min(means, key=means.__getitem__)


def row_of(program: Program, tried: Mapping[float, Sequence[Run]], options: argparse.Namespace) -> Row:
    """The row of a method, from its runs by learning rate."""
    runs = tried[best_rate(tried)]
    losses = [run.losses[1.0] for run in runs]
    error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else math.nan
    return {
        "program": program.name,
        "method": runs[0].method,
        "loss": statistics.fmean(losses),
        "two standard errors": 2.0 * error,
        "learning rate": runs[0].rate,
        "ms a step": statistics.fmean(1e3 * run.used / run.steps for run in runs),
        **({"seconds to make": runs[0].making} if options.compile else {}),
        "seconds": options.seconds,
        "seeds": len(runs),
        "in turns": "yes",
        "tuning": options.tuning,
        "rates": len(tried),
        "samples": options.samples,
        "does": done_by(runs[0].elbo),
        "curve": " ".join(f"{statistics.fmean(run.losses[at] for run in runs):.6g}" for at in runs[0].losses),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tuning", type=int, default=1, help="number of seeds that learning rates are picked on")
    parser.add_argument("--only", default="", help="names of programs, separated by semicolons")
    parser.add_argument("--held-out", action="store_true", help="the programs that rules were not made on")
    parser.add_argument("--all", action="store_true", help="every candidate, and TraceGraph_ELBO")
    parser.add_argument("--methods", default="", help="names of methods, separated by semicolons")
    parser.add_argument("--rates", type=Path, help="a result file, whose learning rates serve again")
    parser.add_argument("--grid", type=float, nargs="+", help="other learning rates, where the best lies at an end")
    parser.add_argument("--samples", type=int, default=1, help="how many times the usual number of samples evaluate")
    parser.add_argument("--compile", action="store_true", help="compiled steps of our own methods")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    stem = "choice_compiled" if options.compile else "choice"
    rows = read_csv(options.output / f"{stem}.csv")
    chosen = selected(options.only, options.held_out)
    if options.only:
        rows = [row for row in rows if row["program"] not in {program.name for program in chosen}]
    data = digits()
    earlier = [] if options.rates is None else read_csv(options.rates)
    known = {(row["program"], row["method"]): row["learning rate"] for row in earlier}
    known = {(program, "fixed"): rate for (program, method), rate in known.items() if method == DEFAULT} | known
    # The first step in a process makes torch and Pyro ready.
    Run(chosen[0], "", Trace_ELBO(), 1e-3, 0).train(1e-3, data)
    for program in chosen:
        if all(row["program"] != program.name for row in rows):
            rows += race(program, options, data, known)
            write(options.output, stem, rows)


def time_to(curve: str, loss: float) -> float:
    """When a curve first reaches a loss, in parts of a run of the others; infinite if it does not."""
    losses = [float(one) for one in str(curve).split()]
    before, at = losses[0], 0.0
    for part, now in zip(MARKS, losses, strict=True):
        if now <= loss:
            return part if now == before or at == 0.0 else at + (part - at) * (before - loss) / (before - now)
        before, at = now, part
    return math.inf


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows with the time of the default to each method's loss over that method's own, exactly and within noise."""
    defaults = {row["program"]: row for row in rows if row["method"] == DEFAULT and row.get("curve")}
    found = []
    for row in rows:
        own, times = defaults.get(row["program"]), ("", "", "")
        if own is not None and row["method"] != DEFAULT:
            is_same = bool(row.get("does")) and row["does"] == own.get("does")
            noise = math.hypot(float(row["two standard errors"]), float(own["two standard errors"]))
            # As exact as the curve is written.
            exact, within = (time_to(own["curve"], float(f"{row['loss'] + more:.6g}")) for more in (0.0, noise))
            if is_same:
                times = (float(own["ms a step"]) / float(row["ms a step"]), within, "yes")
            else:
                times = (exact, within, "")
        shown = {k: v for k, v in row.items() if k not in ("curve", "does")}
        found.append({**shown, "time": times[0], "within noise": times[1], "same": times[2]})
    return found


def write(output: Path, stem: str, rows: list[Row]) -> None:
    """Writes CSV and Markdown."""
    write_csv(output / f"{stem}.csv", rows)
    text = (
        "Loss in nats, minus the ELBO of fresh samples from the trained guide, per row of digits or per program; less "
        "is better. CPU seconds of a run, number of seeds and the learning rate, the best of *rates* for the first "
        "seed (or for so many as *tuning* says), stand beside it; so does how many times the usual number of samples "
        "evaluated. *default* is "
        "`TraceBackpropQ_ELBO()`, *fixed* its rules without measurement, where it has something to try; the others are "
        "candidates pinned from the first step, and Pyro's ELBOs. "
        "*time*: when the mean loss of *default* first reaches that at which the method ends, over the method's time; "
        "*inf* if not in one and a half times that. *within noise*: the same to that loss and noise, the root of the "
        "sum of both squared, doubled standard errors. *same*: whether the method does at each site what *default* "
        "does, with as many particles; *time* is then the time of a step of *default* over that of the method. *in "
        "turns*: whether the runs of a seed took turns; in older rows each method ran in a block. One thread."
    )
    if stem == "choice_compiled":
        text += (
            " Steps are compiled. *seconds to make*: what this took in the run of the first seed, by the clock, and is "
            "not among the seconds."
        )
    write_markdown(output / f"{stem}.md", "The choice of an estimator at equal time", [text, table(compared(rows))])


if __name__ == "__main__":
    main()
