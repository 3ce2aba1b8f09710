"""The default against its own options and Pyro's ELBOs, at equal CPU time, on programs of many kinds.

Methods: the rules (``choice="fixed"``), the choice by measurement (``choice="auto"``), a candidate pinned from the
first step, ``Trace_ELBO`` and, with ``--all``, more candidates and ``TraceGraph_ELBO``. The loss is minus the ELBO of
fresh samples from the trained guide, in nats per row of digits or per program, with two standard errors. The first
seed picks each method's learning rate. Rows that the result file has are kept: ``--only`` measures programs anew. The
programs that ``programs.HELD_OUT`` names are left out unless asked for with ``--held-out``. A candidate that refuses a
program has no row.

    python benchmarks/choice.py [--seconds 12] [--seeds 2] [--only NAME;NAME] [--held-out] [--all] [--methods NAME;NAME]
        [--output DIRECTORY]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyro
import torch
from common import RESULTS, Row, read_csv, table, write_csv, write_markdown
from programs import Program, selected
from pyro.infer import ELBO, SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.optim import Adam
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.choice import Candidate
from pyro_bpq.choice.candidates import BY_NAME
from pyro_bpq.errors import BPQError

STEERED = ("program order, 4 particles",)
PLAIN = ("leave-one-out, 4 particles", "leave-one-out, 8 particles", "no critics")
# Learning rates: with rows of data, and without.
RATES = {True: (1e-3, 3e-3, 1e-2), False: (1e-2, 3e-2, 1e-1)}


def digits() -> Tensor:
    """Images of the training set, in [0, 1]."""
    path = Path(os.environ.get("PYRO_BPQ_DATA", "data")) / "digits.npz"
    return torch.tensor(np.load(path)["x_train"]).float().flatten(1) / 16.0


def pinned(candidate: Candidate) -> Callable[[], ELBO]:
    """Makes the ELBO of a candidate."""
    return lambda: TraceBackpropQ_ELBO(choice=candidate)


def methods(program: Program, everything: bool, chosen: str = "") -> dict[str, Callable[[], ELBO]]:
    """The rivals on a program."""
    names = STEERED if program.steered else PLAIN
    found: dict[str, Callable[[], ELBO]] = {
        "fixed": lambda: TraceBackpropQ_ELBO(choice="fixed"),
        "auto": lambda: TraceBackpropQ_ELBO(choice="auto"),
        "Trace_ELBO": Trace_ELBO,
    }
    if chosen:
        found |= {"TraceGraph_ELBO": TraceGraph_ELBO} | {name: pinned(one) for name, one in BY_NAME.items()}
        return {name: found[name] for name in chosen.split(";") if name in names or name not in BY_NAME}
    if everything:
        found["TraceGraph_ELBO"] = TraceGraph_ELBO
    return found | {name: pinned(BY_NAME[name]) for name in (names if everything else names[:1])}


def train(program: Program, elbo: ELBO, data: Tensor, rate: float, seconds: float, seed: int) -> tuple[float, float]:
    """Trains for some seconds of CPU time; the loss afterwards and milliseconds of a step."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    module = program.make()
    svi = SVI(module.model, module.guide, Adam({"lr": rate}), elbo)
    generator, used, steps = torch.Generator().manual_seed(seed), 0.0, 0

    def batch(rows: int) -> tuple[Tensor, ...]:
        return (data[torch.randint(len(data), (rows,), generator=generator)],) if rows else ()

    while used < seconds:
        args = batch(program.rows)
        start = time.process_time()
        svi.step(*args)
        used, steps = used + time.process_time() - start, steps + 1
    with torch.no_grad():
        rows = len(data) if program.rows else 1
        args = (data,) if program.rows else ()
        losses = [Trace_ELBO().loss(module.model, module.guide, *args) for _ in range(5 if program.rows else 500)]
    return statistics.fmean(losses) / rows, 1e3 * used / steps


def race(program: Program, options: argparse.Namespace, data: Tensor) -> list[Row]:
    """The rows of a program."""
    found: list[Row] = []
    for name, make in methods(program, options.all, options.methods).items():
        try:
            first = {rate: train(program, make(), data, rate, options.seconds, 0) for rate in RATES[bool(program.rows)]}
            rate = min(first, key=lambda one: first[one][0])
            others = [train(program, make(), data, rate, options.seconds, seed) for seed in range(1, options.seeds)]
        except (BPQError, RuntimeError, ValueError) as error:
            if name not in BY_NAME:
                raise
            # A pinned candidate may not serve a program.
            print(f"{program.name}, {name}: {error}", flush=True)
            continue
        losses = [loss for loss, _ in (first[rate], *others)]
        error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else float("nan")
        found.append(
            {
                "program": program.name,
                "method": name,
                "loss": statistics.fmean(losses),
                "two standard errors": 2.0 * error,
                "learning rate": rate,
                "ms a step": statistics.fmean(ms for _, ms in (first[rate], *others)),
                "seconds": options.seconds,
                "seeds": options.seeds,
            }
        )
        print(table(found[-1:]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="", help="names of programs, separated by semicolons")
    parser.add_argument("--held-out", action="store_true", help="the programs that rules were not made on")
    parser.add_argument("--all", action="store_true", help="every candidate, and TraceGraph_ELBO")
    parser.add_argument("--methods", default="", help="names of methods, separated by semicolons")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_csv(options.output / "choice.csv")
    chosen = selected(options.only, options.held_out)
    if options.only:
        rows = [row for row in rows if row["program"] not in {program.name for program in chosen}]
    data = digits()
    for program in chosen:
        if all(row["program"] != program.name for row in rows):
            rows += race(program, options, data)
            write(options.output, rows)


def write(output: Path, rows: list[Row]) -> None:
    """Writes CSV and Markdown."""
    write_csv(output / "choice.csv", rows)
    text = (
        "Loss in nats, minus the ELBO of fresh samples from the trained guide, per row of digits or per program; less "
        "is better. CPU seconds of a run, number of seeds and the learning rate, the best of three for the first "
        "seed, stand beside it. *fixed* and *auto* are `TraceBackpropQ_ELBO(choice=...)`; the others are candidates "
        "pinned from the first step, and Pyro's ELBO. One thread; other programs ran on the machine meanwhile."
    )
    write_markdown(output / "choice.md", "The choice of an estimator at equal time", [text, table(rows)])


if __name__ == "__main__":
    main()
