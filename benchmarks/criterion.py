"""How often the choice by measurement picks well: its regret, against many gradients at fixed weights.

The default is trained for some steps. At these weights every candidate then gives many gradients; methods take turns,
and critics and baselines are taught before. A candidate that refuses the program has no row. ``J`` is the median CPU
time of a step times the mean of ``Σ_p |g_p|² / s_p`` (:mod:`pyro_bpq.choice.measured`). A look is simulated with
rounds that are drawn from these gradients, and counted time. *regret*: mean over looks of the ``J`` of the pick over
the best. Rows that the result file has are kept. The programs that ``programs.HELD_OUT`` names are left out unless
asked for.

Progress under Adam, with its momentum, is that of the race of ``choice.py``, whose losses at equal time stand in
``choice.csv``: pairs of candidates whose ``J`` differ by a tenth or more are compared with it.

    python benchmarks/criterion.py [--steps 300] [--draws 60] [--only NAME;NAME] [--held-out] [--output DIRECTORY]
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import pyro
import torch
from choice import DEFAULT, digits
from common import RESULTS, Row, read_csv, table, write_csv, write_markdown
from programs import Program, selected
from pyro.infer import SVI
from pyro.optim import Adam
from random_programs import drawn
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.choice.candidates import FIXED, candidates_for
from pyro_bpq.choice.measured import HOPELESS, ROUNDS, better_than, normalised, products
from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.tracing.work import WorkMode

LOOKS, TEACHING, COUNTED = 60, 40, 9


class Gradients:
    """Steps of a candidate at fixed weights."""

    def __init__(self, elbo: TraceBackpropQ_ELBO, module: Any) -> None:
        self.elbo, self.module = elbo, module
        self.parameters = list(module.parameters())
        self.squares: list[list[float]] = []
        self.seconds: list[float] = []
        self.counted: list[float] = []

    def draw(self, args: tuple[Tensor, ...], keeps: bool = True) -> None:
        """Takes a step, and notes the squared norm of each tensor's gradient."""
        start = time.process_time()
        self.elbo.loss_and_grads(self.module.model, self.module.guide, *args)
        if keeps:
            self.seconds.append(time.process_time() - start)
            found = [None if p.grad is None else p.grad.double().square().sum() for p in self.parameters]
            self.squares.append([0.0 if one is None else float(one) for one in found])
        for p in self.parameters:
            p.grad = None

    def count(self, args: tuple[Tensor, ...]) -> None:
        """Counts the work of a step."""
        with WorkMode() as mode:
            self.draw(args, False)
        self.counted.append(mode.total.step_seconds())


def look(found: dict[str, Gradients], seconds: dict[str, float], draws: random.Random) -> str:
    """The pick of a simulated look."""
    names, present = list(found), FIXED.name
    rounds = {name: draws.choices(one.squares, k=ROUNDS[-1]) for name, one in found.items()}
    for number in ROUNDS:
        moments = normalised({name: rounds[name][:number] for name in names}, present)
        own = {name: seconds[name] for name in names}
        best, values = better_than(own, moments, present), products(own, moments)
        if best != present:
            return best
        limit = HOPELESS * min(values.values())
        names = [name for name in names if name == present or values[name] <= limit]
    return present


def measure(program: Program, options: argparse.Namespace, data: Tensor) -> list[Row]:
    """The rows of a program."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    module, rules = program.make(), TraceBackpropQ_ELBO(choice="fixed")
    generator = torch.Generator().manual_seed(0)

    def batch() -> tuple[Tensor, ...]:
        rows = torch.randint(len(data), (program.rows,), generator=generator)
        return (data[rows],) if program.rows else ()

    svi = SVI(module.model, module.guide, Adam({"lr": 3e-3 if program.rows else 1e-2}), rules)
    for _ in range(options.steps):
        svi.step(*batch())
    found = {
        one.name: Gradients(rules if one == FIXED else TraceBackpropQ_ELBO(choice=one), module)
        for one in candidates_for(rules._rules.facts(has_ranks=False), tries_all=True)
    }
    for name, one in list(found.items()):
        try:
            for _ in range(TEACHING):
                one.draw(batch(), False)
        except UnsupportedProgramError as error:
            # A pinned candidate may not serve a program.
            print(f"{program.name}, {name}: {str(error).splitlines()[-1]}", flush=True)
            del found[name]
            continue
        for _ in range(COUNTED):
            one.count(batch())
    for _ in range(options.draws):
        args = batch()
        for one in found.values():
            one.draw(args)
    least = statistics.median if program.steered else min
    seconds = {name: least(one.counted) for name, one in found.items()}
    moments = normalised({name: one.squares for name, one in found.items()}, FIXED.name)
    truth = {n: statistics.median(one.seconds) * statistics.fmean(moments[n]) for n, one in found.items()}
    best, draws = min(truth.values()), random.Random(0)
    picks = [look(found, seconds, draws) for _ in range(LOOKS)]
    regret = statistics.fmean(truth[pick] / best for pick in picks)
    return [
        {
            "program": program.name,
            "candidate": name,
            "ms": 1e3 * statistics.median(one.seconds),
            "counted ms": 1e3 * seconds[name],
            "squared gradient": statistics.fmean(moments[name]),
            "J over the best": truth[name] / best,
            "share of picks": picks.count(name) / LOOKS,
            "regret": regret,
        }
        for name, one in found.items()
    ]


def under_adam(rows: list[Row], raced: list[Row]) -> list[Row]:
    """For each program how many pairs of candidates the race under Adam orders as ``J`` does."""
    ends = {(row["program"], str(row["method"]).replace(DEFAULT, FIXED.name)): row for row in raced}
    found = []
    for program in dict.fromkeys(row["program"] for row in rows):
        own = [row for row in rows if row["program"] == program and (program, row["candidate"]) in ends]
        verdicts = []
        for one, other in itertools.combinations(sorted(own, key=lambda row: float(row["J over the best"])), 2):
            if 1.1 * float(one["J over the best"]) <= float(other["J over the best"]):
                better, worse = (ends[program, row["candidate"]] for row in (one, other))
                gain = float(worse["loss"]) - float(better["loss"])
                noise = math.hypot(float(worse["two standard errors"]), float(better["two standard errors"]))
                verdicts.append("noise" if abs(gain) <= noise else "same" if gain > 0.0 else "other")
        if verdicts:
            found.append(
                {
                    "program": program,
                    "pairs": len(verdicts),
                    "the same order": verdicts.count("same"),
                    "within noise": verdicts.count("noise"),
                    "the other order": verdicts.count("other"),
                }
            )
    return found


def seeds(text: str) -> range:
    """The seeds from a first to a last one, such as ``0-19``."""
    first, last = map(int, text.split("-"))
    return range(first, last + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--only", default="", help="names of programs, separated by semicolons")
    parser.add_argument("--held-out", action="store_true", help="the programs that rules were not made on")
    parser.add_argument("--random", type=seeds, default=None, help="random programs in place of these: seeds, as 0-19")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen, name = selected(options.only, options.held_out), "criterion"
    if options.random is not None:
        chosen, name = [drawn(seed) for seed in options.random], "criterion_random"
    rows, data = read_csv(options.output / f"{name}.csv"), digits()
    for program in chosen:
        if all(row["program"] != program.name for row in rows):
            rows += measure(program, options, data)
            write_csv(options.output / f"{name}.csv", rows)
            print(program.name, f"regret {rows[-1]['regret']:.3g}", flush=True)
    text = (
        f"{options.draws} gradients of each candidate after {options.steps} steps of the default, one thread; "
        f"candidates took turns. {LOOKS} simulated looks of each program."
    )
    parts = [text, table(rows)]
    if options.random is None:
        order = "## Pairs of candidates, `J` against the loss of the race under Adam"
        parts += [order, table(under_adam(rows, read_csv(RESULTS / "choice.csv")))]
    write_markdown(options.output / f"{name}.md", "Regret of the choice by measurement", parts)


if __name__ == "__main__":
    main()
