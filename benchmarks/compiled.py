r"""Whole steps, eager and compiled: ours, Pyro's, and a hand-written loop.

A step is ``SVI.step`` with Pyro's Adam, or ``CompiledSVI.step`` where it is recorded or compiled. The ways take turns
within one process, on parameters of their own:

- ``Trace_ELBO`` and ``JitTrace_ELBO`` (``torch.jit.trace``);
- our default, which takes eight particles on chains, eager, as a recorded graph (``compile="eager"``), and compiled
  (``compile=True``);
- leave-one-out of 32 particles in a plate, eager and compiled; on the chain of 50 sites also of 1000, compiled;
- on the chain ``by hand``: a plain torch loop of the score function with Adam, compiled by ``torch.compile``, and ours
  with the same estimator.

With ``--numpyro PYTHON``, an interpreter that has NumPyro, its jitted ``TraceGraph_ELBO`` joins on that chain, with one
particle and with 1000, in a process of its own.

Long chains (``--full``) are measured with Pyro's and our default only, and give the picture ``compiled.png``; that of
500 sites without ``JitTrace_ELBO``, which takes a quarter of an hour to trace it.

Milliseconds are the median of CPU time, with one thread. Seconds to make are wall-clock time to record and compile;
CPU seconds are those of the process and of the C++ compiler, which hardly depend on what else the machine does.
Caches on disk are empty at the start of each program, and off, so that each compilation is a cold one.

    python benchmarks/compiled.py [--full] [--only BEGINNING] [--numpyro PYTHON] [--output DIRECTORY]
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyro
import pyro.distributions as dist
import torch
from common import Row, arguments, median, only, picture, publish, read_csv, uncollected
from pyro.infer import ELBO, SVI, JitTrace_ELBO, Trace_ELBO
from pyro.optim import Adam
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from pyro_bpq import CompiledSVI, LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO, compile_report

Step = Callable[[], object]
Program = tuple[Callable[[], None], Callable[[], None]]
OBSERVED, LOG_SCALE = 0.7, 0.9189385332046727


def chain(steps: int, is_observed: bool) -> Program:
    """Binary sites, each conditioned on the one before.

    Args:
        steps: Number of sites.
        is_observed: Whether every site has an observation of its own, or the last one only.

    Returns:
        Model and guide.
    """

    def model() -> None:
        start, step, means = (pyro.param(f"{name}_{steps}", torch.zeros(2)) for name in ("prior", "next", "means"))
        z = pyro.sample("z_0", dist.Bernoulli(logits=start[0]))
        for t in range(1, steps):
            if is_observed:
                pyro.sample(f"x_{t}", dist.Normal(means[0] + means[1] * z, 1.0), obs=torch.tensor(OBSERVED))
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=step[0] + step[1] * z))
        pyro.sample("x", dist.Normal(means[0] + means[1] * z, 1.0), obs=torch.tensor(OBSERVED))

    def guide() -> None:
        logits = pyro.param(f"posterior_{steps}", torch.zeros(steps))
        slope = pyro.param(f"slope_{steps}", torch.tensor(0.5))
        z = torch.tensor(0.0)
        for t, logit in enumerate(logits.unbind()):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=logit + slope * z))

    return model, guide


def belief_network(visible: int, *hidden: int, rows: int = 100) -> Program:
    """Layers of Bernoulli units above binary data, with affine nets between them, and a guide of the same shape.

    One layer has a fair prior, as in a variational autoencoder; the upper one of several has a prior that is learned.

    Args:
        visible: Number of visible units.
        *hidden: Number of units of each layer of latents, from the data up.
        rows: Rows of data a step.

    Returns:
        Model and guide.
    """
    torch.manual_seed(0)
    sizes = [*itertools.pairwise((visible, *hidden))]
    up, down = nn.ModuleList(nn.Linear(a, b) for a, b in sizes), nn.ModuleList(nn.Linear(b, a) for a, b in sizes)
    nets, prior = nn.ModuleDict({"up": up, "down": down}), torch.zeros(hidden[-1])
    if len(hidden) > 1:
        prior = nn.Parameter(prior)
        nets.register_parameter("prior", prior)
    data = torch.bernoulli(torch.full((rows, visible), 0.3))
    name = f"nets_{visible}_{len(hidden)}"

    def units(site: str, logits: Tensor, obs: Tensor | None = None) -> Tensor:
        return pyro.sample(site, dist.Bernoulli(logits=logits).to_event(1), obs=obs)

    def model() -> None:
        pyro.module(name, nets)
        with pyro.plate("rows", rows):
            value = prior.expand(rows, hidden[-1])
            for i in reversed(range(len(hidden))):
                value = down[i](units(f"z_{i}", value))
            units("x", value, data)

    def guide() -> None:
        pyro.module(name, nets)
        with pyro.plate("rows", rows):
            value = data
            for i, net in enumerate(up):
                value = units(f"z_{i}", net(value))

    return model, guide


def leave_one_out(particles: int = 32) -> ELBO:
    """Leave-one-out, no critics."""
    estimator = ScoreFunction(LeaveOneOut())
    return TraceBackpropQ_ELBO(particles, 3, vectorize_particles=True, estimator=estimator, critic=None)


def score() -> ELBO:
    """The plain score function of one particle."""
    return TraceBackpropQ_ELBO(1, estimator=ScoreFunction(), critic=None)


ELBOS: Mapping[str, Callable[[], ELBO]] = {
    "Trace_ELBO": Trace_ELBO,
    "JitTrace_ELBO": lambda: JitTrace_ELBO(ignore_jit_warnings=True),
    **dict.fromkeys(("default, eager", "default, recorded", "default, compiled"), TraceBackpropQ_ELBO),
    **{f"one particle with critics, {how}": lambda: TraceBackpropQ_ELBO(1) for how in ("eager", "compiled")},
    **dict.fromkeys(("32 leave-one-out, eager", "32 leave-one-out, compiled"), leave_one_out),
    "1000 leave-one-out, compiled": lambda: leave_one_out(1000),
    **dict.fromkeys(("score, eager", "score, compiled"), score),
}
# How ``CompiledSVI`` makes the steps; the others are those of ``SVI``.
BACKENDS = {"recorded": "eager", "compiled": "inductor"}
OF_ONE_CHAIN = "chain, 50 sites"
BY_HAND = "score, by hand, compiled"
PROGRAMS: Mapping[str, Callable[[], Program]] = {
    "chain, 20 sites": lambda: chain(20, False),
    "chain, 50 sites": lambda: chain(50, False),
    "observed chain, 50 sites": lambda: chain(50, True),
    "belief network 64-20-20": lambda: belief_network(64, 20, 20),
    "belief network 784-200-200": lambda: belief_network(784, 200, 200),
    "VAE 784-200": lambda: belief_network(784, 200),
    "chain, 100 sites": lambda: chain(100, False),
    "chain, 200 sites": lambda: chain(200, False),
    "chain, 500 sites": lambda: chain(500, False),
}
# Programs of the quick run.
QUICK = 6
RIVAL = "NumPyro"
LONGEST = "chain, 500 sites"
# What the long chains are measured with: nothing that takes minutes to make and is known from the short ones.
ON_LONG = ("Trace_ELBO", "JitTrace_ELBO", "default, eager", "default, compiled")
# The lines of the picture.
SHOWN = (*ON_LONG, "score, by hand, compiled")


def by_hand(sites: int) -> Step:
    """The score function on the chain: a loop over sites, compiled by ``torch.compile``; Adam."""
    start, step, means, posterior = (torch.zeros(n, requires_grad=True) for n in (2, 2, 2, sites))
    slope = torch.tensor(0.5, requires_grad=True)
    optimiser = torch.optim.Adam([start, step, means, posterior, slope], lr=1e-3, fused=True)

    def log_prob(logit: Tensor, z: Tensor) -> Tensor:
        return -binary_cross_entropy_with_logits(logit, z)

    @torch.compile
    def losses() -> tuple[Tensor, Tensor]:
        z, log_q, log_p = torch.zeros(()), torch.zeros(()), torch.zeros(())
        for t, logit in enumerate(posterior.unbind()):
            q, p = logit + slope * z, step[0] + step[1] * z if t else start[0]
            z = torch.bernoulli(q.detach().sigmoid())
            log_q, log_p = log_q + log_prob(q, z), log_p + log_prob(p, z)
        log_p = log_p - 0.5 * (means[0] + means[1] * z - OBSERVED).square() - LOG_SCALE
        loss = log_q - log_p
        return loss.detach() * log_q - log_p, loss.detach()

    def take() -> float:
        optimiser.zero_grad()
        surrogate, loss = losses()
        surrogate.backward()
        optimiser.step()
        return loss.item()

    return take


def ways(program: str) -> list[str]:
    """What a program is measured with, but for the loop by hand."""
    if is_long(program):
        return [way for way in ON_LONG if way != "JitTrace_ELBO" or program != LONGEST]
    return [way for way in ELBOS if program == OF_ONE_CHAIN or not way.startswith(("1000", "one particle"))]


def measure(program: str, rounds: int) -> list[Row]:
    """All ways on one program, for a process of its own."""
    from torch._inductor import config

    config.force_disable_caches = True
    torch.set_num_threads(1)
    (model, guide), turns, rows = PROGRAMS[program](), dict[str, Callable[[], float]](), list[Row]()
    for way in ways(program):
        row: Row = {"program": program, "way": way, "milliseconds": 0.0}
        pyro.set_rng_seed(0)
        elbo, backend, start = ELBOS[way](), BACKENDS.get(way.split(", ")[-1]), time.perf_counter()
        svi: Any = SVI(model, guide, Adam({"lr": 1e-3}), elbo)
        if backend is not None:
            svi = CompiledSVI(model, guide, Adam({"lr": 1e-3}), elbo, compile=backend)
        with pyro.get_param_store().scope() as own:
            for _ in range(40):
                is_made, before = has_recorded(elbo), all_cpu_seconds()
                svi.step()
                if has_recorded(elbo) and not is_made:
                    row["CPU seconds to make"] = all_cpu_seconds() - before
        row["seconds to make"] = time.perf_counter() - start
        if backend is not None:
            entries = elbo.compiled.entries
            if not entries or entries[0].note:
                raise RuntimeError(compile_report(elbo))
            row |= {"seconds to make": sum(entries[0].seconds), "operators": entries[0].recording.num_operators}
        rows.append(row)
        turns[way] = partial(turn, svi.step, own)
    if program.startswith("chain") and not is_long(program):
        start, before, step = time.perf_counter(), all_cpu_seconds(), by_hand(int(program.split()[1]))
        step()
        made = {"seconds to make": time.perf_counter() - start, "CPU seconds to make": all_cpu_seconds() - before}
        rows.append({"program": program, "way": BY_HAND, **made})
        turns[BY_HAND] = partial(turn, step, None)
    times: dict[str, list[float]] = {way: [] for way in turns}
    end, shuffle = time.monotonic() + 60.0, random.Random(0)
    for i in range(rounds):
        if i < 3 or time.monotonic() < end:
            with uncollected():
                # In changing order: what one leaves to the garbage collector is cleared up during another's step.
                for way in shuffle.sample(list(turns), len(turns)):
                    times[way].append(1000 * turns[way]())
    return [row | {"milliseconds": median(times[row["way"]]), "least": min(times[row["way"]])} for row in rows]


def has_recorded(elbo: ELBO) -> bool:
    """Whether a step was recorded, and compiled."""
    return bool(getattr(getattr(elbo, "compiled", None), "entries", ()))


def all_cpu_seconds() -> float:
    """CPU time of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def is_long(program: str) -> bool:
    """Whether a program is a long chain."""
    return program in list(PROGRAMS)[QUICK:]


def turn(step: Step, own: Any) -> float:
    """The CPU time of one of twenty steps with parameters of their own."""
    with pyro.get_param_store().scope(own):
        step()
        start = time.process_time()
        for _ in range(20):
            step()
        return (time.process_time() - start) / 20


def in_new_process(program: str, rounds: int) -> list[Row]:
    """The same; compiled code of one program does not slow another one down."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        with ProcessPoolExecutor(1, get_context("spawn"), warnings.simplefilter, ("ignore",)) as pool:
            return pool.submit(measure, program, rounds).result()


def by_numpyro(python: str) -> list[Row]:
    """NumPyro's jitted steps on the chain of 50 sites."""
    command = [python, "-W", "ignore", str(Path(__file__).with_name("numpyro_steps.py"))]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    way = "NumPyro's TraceGraph_ELBO, jitted, particles:"
    return [{"program": OF_ONE_CHAIN, "way": f"{way} {row.pop('particles')}", **row} for row in found]


def main() -> None:
    """Measures, prints, and writes CSV and Markdown."""
    options = arguments(__doc__, "only", numpyro={"default": "", "help": "an interpreter that has NumPyro"})
    names, path = only(options, list(PROGRAMS)[: None if options.full else QUICK]), options.output / "compiled"
    known = read_csv(path.with_suffix(".csv")) if options.only else []
    kept = () if options.numpyro else RIVAL
    rows = [row for row in known if row["program"] not in names or row["way"].startswith(kept)]
    for name in names:
        rows += in_new_process(name, 40 if options.full else 12)
        if options.numpyro and name == OF_ONE_CHAIN:
            rows += by_numpyro(options.numpyro)
        rows.sort(key=lambda row: list(PROGRAMS).index(row["program"]))
        compare(rows)
        publish(path, "Eager and compiled steps", None, rows, rows)
        plot(rows, path.with_suffix(".png"))


def compare(rows: list[Row]) -> None:
    """Adds what a step takes as a multiple of the same step run eagerly, and the inverse."""
    times = {(row["program"], row["way"]): row["milliseconds"] for row in rows}
    for row in rows:
        eager = times.get((row["program"], f"{row['way'].rpartition(', ')[0]}, eager"))
        row["over eager"] = "" if eager is None else row["milliseconds"] / eager
        row["times faster"] = "" if eager is None else eager / row["milliseconds"]


def plot(rows: list[Row], path: Path) -> None:
    """Time of a step by length of the chain, on logarithmic axes."""
    rows = [row | {"sites": int(row["program"].split()[1])} for row in rows if row["program"].startswith("chain,")]
    ticks = sorted({row["sites"] for row in rows})
    with picture(path, 6.0, 3.6) as (axis,):
        for way in SHOWN:
            points = sorted((row["sites"], row["milliseconds"]) for row in rows if row["way"] == way)
            if points:
                width = 2.5 if way.startswith("default") else 1.2
                axis.loglog(*zip(*points, strict=True), "o-", label=way, linewidth=width)
        axis.set(xlabel="sites of the chain", ylabel="milliseconds of a step")
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.legend(fontsize=8)


if __name__ == "__main__":
    main()
