r"""The rules against each estimator pinned, and against Pyro's ELBOs, at equal CPU time, on 39 programs of many kinds.

Each method trains each program of ``programs.py`` for so many seconds of CPU time, from the same weights and on the
same batches; the runs of a seed take turns. Its learning rate is the best one of a grid on the first seed. Pinned
estimators that do not serve a program drop out. ``--compiled`` races compiled steps of our own methods on 25 of the
programs: what it takes to make them is not among the seconds. The digits are those of ``digits.npz`` in the folder
that the environment variable PYRO_BPQ_DATA names.

Loss in nats, minus the ELBO of fresh samples from the trained guide, per row of digits or per program; less is better.
*default* is ``TraceBackpropQ_ELBO()``; the others are its options, pinned from the first step, and Pyro's ELBOs.
*time*: when the mean loss of *default* first reaches that at which the method ends, over the method's time; *inf* if
not in one and a half times that. *within noise*: the same to that loss and noise, the root of the sum of both squared,
doubled standard errors. *same*: the method does at each site what *default* does, with as many particles; *time* is
then the time of a step of *default* over that of the method. *seconds to make* compiled steps: in the run of the first
seed, by the clock. One thread.

    python benchmarks/race.py [--full | --smoke] [--compiled] [--seeds N] [--seconds N] [--only NAME;NAME]
"""

from __future__ import annotations

import argparse
import math
import random
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyro
import torch
from common import Data, Method, Row, Runner, arguments, data_file, only, others, publish, with_averages
from programs import PROGRAMS, Program
from pyro.infer import ELBO, Trace_ELBO, TraceGraph_ELBO
from torch import Tensor

from pyro_bpq import AllAction, LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQError
from pyro_bpq.estimators import CrossedLeaveOneOut, Hindsight

LOO = ScoreFunction(LeaveOneOut())


def pinned(number: int, **options: Any) -> dict[str, Any]:
    """Options of an estimator without critics, with so many particles in one call."""
    return {"num_particles": number, "vectorize_particles": True, "critic": None, **options}


DEFAULT = "default"
PYRO = (Method("Trace_ELBO", Trace_ELBO), Method("TraceGraph_ELBO", TraceGraph_ELBO, "average"))
PINNED: Mapping[str, dict[str, Any]] = {
    **{f"leave-one-out, {number} particles": pinned(number, estimator=LOO) for number in (2, 4, 8)},
    "sums over values, 8 particles": pinned(8, estimator=AllAction()),
    "crossed costs, 8 particles": pinned(8, estimator=CrossedLeaveOneOut()),
    "hindsight, 4 particles": pinned(4, estimator=Hindsight(crossed=True, draws=1)),
    "the rules, one particle": {"num_particles": 1},
    "no critics": {"critic": None},
}
STEERED = {"program order, 4 particles": {"num_particles": 4, "estimator": LOO, "structure": "dense"}}
NOT_COMPILED = ("chain of 50", "labels and styles", "chains of 32 rows")
# Where the default's loss is looked at, in parts of a run of the others.
MARKS = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0, 1.15, 1.3, 1.5)
# Learning rates: with rows of data, and without. There the loss ends at a floor of noise, which a coarser grid misses.
RATES = {True: (1e-3, 3e-3, 1e-2), False: (1e-2, 1.7e-2, 3e-2, 5.5e-2, 1e-1)}


def digits() -> Tensor | None:
    """Images of the training set, in [0, 1]; ``None`` where the file is missing."""
    path = data_file("digits.npz")
    return None if path is None else torch.tensor(np.load(path)["x_train"]).float().flatten(1) / 16.0


def methods(program: Program, compiled: bool) -> list[Method]:
    """The rivals on a program; of Pyro's ELBOs the step of none is compiled."""
    own: dict[str, dict[str, Any]] = {DEFAULT: {}, **(STEERED if program.steered else PINNED)}
    compile = {"compile": True} if compiled else {}
    found = [Method(name, partial(TraceBackpropQ_ELBO, **options, **compile)) for name, options in own.items()]
    return found if compiled else [*found, *PYRO]


@dataclass(frozen=True)
class Whole:
    """A task whose data are known as a whole.

    Args:
        make: Makes the program: something with a model and a guide.
        data: Arguments of both.
        rows: Number of rows of data in a batch; 0 for all that there is.
    """

    make: Callable[[], Any]
    data: Data = ()
    rows: int = 0

    def programs(self, program: str) -> Any:
        """The program; its guide has baselines if it is ``"average"``."""
        found = self.make()
        return SimpleNamespace(model=found.model, guide=with_averages(found.guide) if program else found.guide)

    def batch(self, generator: torch.Generator) -> Data:
        """Some rows, or all."""
        if not self.rows:
            return self.data
        return (self.data[0][torch.randint(len(self.data[0]), (self.rows,), generator=generator)],)


def loss_of(run: Runner, number: int) -> float:
    """The mean of so many fresh losses of all data."""
    with pyro.get_param_store().scope(run.state) as run.state, torch.no_grad():
        programs = run.programs.model, run.programs.guide
        return statistics.fmean(Trace_ELBO().loss(*programs, *run.task.data) for _ in range(number))


def turns(program: Program, runs: Sequence[Runner], seconds: float) -> set[str]:
    """Lets runs take turns, in changing order; returns the methods that failed, which drop out."""
    shuffle, failed = random.Random(0), dict[str, Exception]()
    few, many = (2, 5) if program.rows else (200, 1000) if program.steered else (100, 500)
    for mark in MARKS:
        for run in shuffle.sample(runs, len(runs)):
            method = run.method.name
            if method in failed or (mark > 1.0 and method != DEFAULT):
                continue
            try:
                run.train(seconds * mark)
                if mark == 1.0 or method == DEFAULT:
                    loss = loss_of(run, many if mark == 1.0 else few)
                    run.curve.append({"part": mark, "loss": loss / (len(run.task.data[0]) if program.rows else 1)})
            except (BPQError, RuntimeError, ValueError) as error:
                if method not in PINNED:
                    raise
                failed[method] = error
    for name, error in failed.items():
        print(f"{program.name}, {name}: {error}", flush=True)
    return {*failed}


def race(program: Program, options: argparse.Namespace, data: Tensor) -> list[Row]:
    """The rows of a program."""
    rivals = methods(program, options.compiled)
    runs: dict[str, dict[float, list[Runner]]] = {method.name: {} for method in rivals}
    task = Whole(program.make, (data,) if program.rows else (), program.rows)
    for seed in range(options.seeds):
        lanes = []
        for method in rivals:
            rates = (best_rate(runs[method.name]),) if seed else RATES[bool(program.rows)]
            lanes += [Runner(task, method, rate, seed) for rate in rates]
        failed = turns(program, lanes, options.seconds)
        rivals = [method for method in rivals if method.name not in failed]
        for run in lanes:
            if run.method in rivals:
                runs[run.method.name].setdefault(run.rate, []).append(run)
    return [row_of(program, runs[method.name], options) for method in rivals]


def losses(run: Runner) -> dict[float, float]:
    """Its losses by the part of the time after which they were measured."""
    return {point["part"]: point["loss"] for point in run.curve}


def best_rate(runs: Mapping[float, Sequence[Runner]]) -> float:
    """The learning rate whose mean loss is least, of those that ran on most seeds."""
    most = max(map(len, runs.values()))
    means = {r: statistics.fmean(losses(run)[1.0] for run in own) for r, own in runs.items() if len(own) == most}
    return min(means, key=means.__getitem__)


def row_of(program: Program, tried: Mapping[float, Sequence[Runner]], options: argparse.Namespace) -> Row:
    """The row of a method, from its runs by learning rate."""
    runs = tried[best_rate(tried)]
    curves = [losses(run) for run in runs]
    ends = [curve[1.0] for curve in curves]
    noise = 2.0 * statistics.stdev(ends) / len(ends) ** 0.5 if len(ends) > 1 else math.nan
    row: Row = {"program": program.name, "method": runs[0].method.name}
    row |= {"loss": statistics.fmean(ends), "two standard errors": noise, "learning rate": runs[0].rate}
    row["ms a step"] = statistics.fmean(1e3 * run.seconds / run.steps for run in runs)
    row |= {"seconds to make": runs[0].making} if options.compiled else {}
    row |= {"seconds": options.seconds, "seeds": len(runs), "does": done_by(runs[0].elbo)}
    return row | {"curve": " ".join(f"{statistics.fmean(curve[at] for curve in curves):.6g}" for at in curves[0])}


def done_by(elbo: ELBO) -> str:
    """What an ELBO does at each site, without the reasons; empty for Pyro's ELBOs."""
    if not isinstance(elbo, TraceBackpropQ_ELBO):
        return ""
    lines = [line for line in str(elbo.plan).splitlines() if not line.startswith("no extra run of the model:")]
    told = [re.sub(", because [^;]*", "", line) for line in lines]
    return "; ".join(told)


def time_to(curve: str, loss: float) -> float:
    """When a curve first reaches a loss, in parts of a run of the others; infinite if it does not."""
    values = [float(one) for one in str(curve).split()]
    before, at = values[0], 0.0
    for part, now in zip(MARKS, values, strict=True):
        if now <= loss:
            return part if now == before or at == 0.0 else at + (part - at) * (before - loss) / (before - now)
        before, at = now, part
    return math.inf


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows with the time of the default to each method's loss over that method's own, exactly and within noise."""
    defaults = {row["program"]: row for row in rows if row["method"] == DEFAULT}
    found = []
    for row in rows:
        own, more = defaults.get(row["program"]), {"time": "", "within noise": "", "same": ""}
        if own is not None and row is not own:
            noise = math.hypot(float(row["two standard errors"]), float(own["two standard errors"]))
            more["same"] = "yes" if row["does"] and row["does"] == own["does"] else ""
            if len(str(own["curve"]).split()) == len(MARKS):
                # As exact as the curve is written.
                exact, within = (time_to(own["curve"], float(f"{row['loss'] + n:.6g}")) for n in (0.0, noise))
                more["time"] = float(own["ms a step"]) / float(row["ms a step"]) if more["same"] else exact
                more["within noise"] = within
        found.append({**{k: v for k, v in row.items() if k not in ("curve", "does")}, **more})
    return found


def main() -> None:
    """Races, prints, writes ``race.csv`` and ``race.md``, or ``race_compiled``."""
    options = arguments(__doc__, "smoke compiled seeds only", seconds={"type": float, "default": 0.0})
    data = digits()
    if data is None:
        return
    options.seconds = options.seconds or (0.01 if options.smoke else 6.0 if options.full else 1.0)
    options.seeds = options.seeds or (5 if options.full else 1)
    options.only = options.only or ("two layers;branch" if options.smoke else "")
    served = [p.name for p in PROGRAMS if not options.compiled or not (p.steered or p.name in NOT_COMPILED)]
    path, names = options.output / ("race_compiled" if options.compiled else "race"), only(options, served)
    rows = others(options, path.with_suffix(".csv"), names)
    for program in PROGRAMS:
        if program.name in names:
            rows += race(program, options, data)
            publish(path, "The race on 39 programs", __doc__, rows, compared(rows))


if __name__ == "__main__":
    main()
