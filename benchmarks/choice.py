"""The default against its own options and Pyro's ELBOs, at equal CPU time, on programs of many kinds.

Methods: the rules (``choice="fixed"``), the choice by measurement (``choice="auto"``), candidates pinned from the first
step, ``Trace_ELBO`` and, where asked for, ``TraceGraph_ELBO``. The loss is minus the ELBO of fresh samples from the
trained guide, in nats per row of digits or per program, with two standard errors over seeds. Each method has the
learning rate of a grid that does best. The programs that ``programs.HELD_OUT`` names are left out unless asked for with
``--held-out``.

    python benchmarks/choice.py [--seconds 8] [--seeds 1] [--only NAME] [--held-out] [--all] [--output DIRECTORY]
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
from common import RESULTS, Row, machine, write_csv
from programs import HELD_OUT, PROGRAMS, Program
from pyro.infer import ELBO, SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.optim import Adam
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.choice import Candidate
from pyro_bpq.choice.candidates import BY_NAME

STEERED = ("program order", "program order, 2 particles", "program order, 4 particles", "no critics")
PLAIN = ("leave-one-out, 2 particles", "leave-one-out, 4 particles", "leave-one-out, 8 particles", "no critics")


def digits() -> Tensor:
    """Images of the training set, in [0, 1]."""
    path = Path(os.environ.get("PYRO_BPQ_DATA", "data")) / "digits.npz"
    return torch.tensor(np.load(path)["x_train"]).float().flatten(1) / 16.0


def pinned(candidate: Candidate) -> Callable[[], ELBO]:
    """Makes the ELBO of a candidate."""
    return lambda: TraceBackpropQ_ELBO(choice=candidate)


def methods(program: Program, everything: bool) -> dict[str, Callable[[], ELBO]]:
    """The rivals on a program."""
    names = STEERED if program.steered else PLAIN
    found: dict[str, Callable[[], ELBO]] = {
        "fixed": lambda: TraceBackpropQ_ELBO(choice="fixed"),
        "auto": lambda: TraceBackpropQ_ELBO(choice="auto"),
        "Trace_ELBO": Trace_ELBO,
    }
    if everything:
        found["TraceGraph_ELBO"] = TraceGraph_ELBO
    return found | {name: pinned(BY_NAME[name]) for name in (names if everything else names[1:3])}


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
        losses = [Trace_ELBO().loss(module.model, module.guide, *args) for _ in range(10 if program.rows else 1000)]
    return statistics.fmean(losses) / rows, 1e3 * used / steps


def race(program: Program, options: argparse.Namespace, data: Tensor) -> list[Row]:
    """The rows of a program."""
    found: list[Row] = []
    for name, make in methods(program, options.all).items():
        best: Row | None = None
        for rate in options.rates:
            runs = [train(program, make(), data, rate, options.seconds, seed) for seed in range(options.seeds)]
            losses = [loss for loss, _ in runs]
            error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else float("nan")
            row: Row = {
                "program": program.name,
                "method": name,
                "loss": statistics.fmean(losses),
                "two standard errors": 2.0 * error,
                "learning rate": rate,
                "ms a step": statistics.fmean(ms for _, ms in runs),
                "seconds": options.seconds,
            }
            if best is None or row["loss"] < best["loss"]:
                best = row
        assert best is not None
        print({key: f"{value:.4g}" if isinstance(value, float) else value for key, value in best.items()}, flush=True)
        found.append(best)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-2])
    parser.add_argument("--only", default="", help="names of programs, separated by semicolons")
    parser.add_argument("--held-out", action="store_true", help="the programs that rules were not made on")
    parser.add_argument("--all", action="store_true", help="every candidate, and TraceGraph_ELBO")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [program for program in PROGRAMS if (program.name in HELD_OUT) is options.held_out]
    if options.only:
        chosen = [program for program in PROGRAMS if program.name in options.only.split(";")]
    data = digits()
    rows = [row for program in chosen for row in race(program, options, data)]
    write_csv(options.output / "choice.csv", rows)
    print(machine())


if __name__ == "__main__":
    main()
