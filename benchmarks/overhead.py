r"""What a step costs beside ``Trace_ELBO``: CPU time of whole SVI steps, and peak memory.

Programs: chains of binary sites, each site conditioned on the one before, with one observation at the end
(``chain, T sites``) or one per site (``observed chain``), and sigmoid belief networks with two stochastic layers on
binary data, 100 rows a step. The ELBOs take turns within one process, on the same parameters:

- ``Trace_ELBO`` and ``TraceGraph_ELBO`` without baselines;
- ours with ``ScoreFunction()`` and no critics, once with the cached structure (``structure="auto"`` after its first
  looks) and once tracked at every step (``structure="dynamic"``): the price of the bookkeeping alone;
- our default, with critics, their training and the extra run of the model;
- on chains ``by hand``, the score function in a plain torch loop without Pyro, and ``Storchastic`` (where it is
  installed) with its score function: both are rivals of ``score, cached``, the same estimator.

A ratio is the median over rounds of a step's CPU time over that of another's step in the same round. Python's garbage
collector is off while times are taken, as in ``timeit``: what it costs depends on all that a process holds. On chains
some take turns twice more with the collector on, as it comes and after ``gc.freeze()``. Memory is
the largest resident set (``VmHWM``) of a process of its own that takes some steps, less what it held after one step of
``Trace_ELBO``, which loads torch's code. It includes what the allocator keeps, and is no count of live tensors.

    python benchmarks/overhead.py [--full] [--output DIRECTORY]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import json
import multiprocessing
import random
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import RESULTS, Row, median, progress, table, uncollected, write_csv, write_markdown
from pyro.infer import ELBO, SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO

Program = tuple[Callable[[], None], Callable[[], None]]

BASE, CACHED = "Trace_ELBO", "score, cached"
ELBOS: dict[str, Callable[[], ELBO]] = {
    BASE: Trace_ELBO,
    "TraceGraph_ELBO": TraceGraph_ELBO,
    CACHED: lambda: TraceBackpropQ_ELBO(estimator=ScoreFunction(), critic=None),
    "score, tracked": lambda: TraceBackpropQ_ELBO(estimator=ScoreFunction(), critic=None, structure="dynamic"),
    "default": TraceBackpropQ_ELBO,
}
BY_HAND, STORCHASTIC = "by hand", "Storchastic"
RIVALS = (*ELBOS, BY_HAND, STORCHASTIC)
# Those that take turns again with the garbage collector on.
COLLECTED = (BASE, CACHED, "default", BY_HAND)
# Steps ahead of the timed ones: structure="auto" tracks the first three and looks again ten later.
WARM_UP = 15
# TraceGraph_ELBO adds up n^2 / 2 costs: minutes a step from here on.
LONGEST_FOR_TRACEGRAPH = 200
LONGEST_FOR_STORCHASTIC = 50


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
                pyro.sample(f"x_{t}", dist.Normal(means[0] + means[1] * z, 1.0), obs=_OBSERVED)
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=step[0] + step[1] * z))
        pyro.sample("x", dist.Normal(means[0] + means[1] * z, 1.0), obs=_OBSERVED)

    def guide() -> None:
        logits = pyro.param(f"posterior_{steps}", torch.zeros(steps))
        slope = pyro.param(f"slope_{steps}", torch.tensor(0.5))
        z = torch.tensor(0.0)
        for t, logit in enumerate(logits.unbind()):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=logit + slope * z))

    return model, guide


_OBSERVED = torch.tensor(0.7)


def belief_network(visible: int, hidden: int, rows: int = 100) -> Program:
    """A sigmoid belief network with two stochastic layers, and a guide of the same shape.

    Args:
        visible: Number of visible units.
        hidden: Number of units of each stochastic layer.
        rows: Rows of data a step.

    Returns:
        Model and guide.
    """
    torch.manual_seed(0)
    nets = nn.ModuleDict(
        {
            "up": nn.Linear(visible, hidden),
            "top": nn.Linear(hidden, hidden),
            "down": nn.Linear(hidden, hidden),
            "out": nn.Linear(hidden, visible),
        }
    )
    prior = nn.Parameter(torch.zeros(hidden))
    nets.register_parameter("prior", prior)
    data = torch.bernoulli(torch.full((rows, visible), 0.3))
    name = f"nets_{visible}"

    def units(site: str, logits: Tensor, obs: Tensor | None = None) -> Tensor:
        return pyro.sample(site, dist.Bernoulli(logits=logits).to_event(1), obs=obs)

    def model() -> None:
        pyro.module(name, nets)
        with pyro.plate("rows", rows):
            top = units("top", prior.expand(rows, hidden))
            low = units("low", nets["down"](top))
            units("x", nets["out"](low), data)

    def guide() -> None:
        pyro.module(name, nets)
        with pyro.plate("rows", rows):
            low = units("low", nets["up"](data))
            units("top", nets["top"](low))

    return model, guide


def autoencoder(visible: int, hidden: int, rows: int = 100) -> Program:
    """A variational autoencoder with one layer of Bernoulli latents between affine nets.

    Args:
        visible: Number of visible units.
        hidden: Number of latents.
        rows: Rows of data a step.

    Returns:
        Model and guide.
    """
    torch.manual_seed(0)
    nets = nn.ModuleDict({"encoder": nn.Linear(visible, hidden), "decoder": nn.Linear(hidden, visible)})
    data = torch.bernoulli(torch.full((rows, visible), 0.3))
    name = f"autoencoder_{visible}"

    def model() -> None:
        pyro.module(name, nets)
        with pyro.plate("rows", rows):
            z = pyro.sample("z", dist.Bernoulli(logits=torch.zeros(hidden)).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=nets["decoder"](z)).to_event(1), obs=data)

    def guide() -> None:
        pyro.module(name, nets)
        with pyro.plate("rows", rows):
            pyro.sample("z", dist.Bernoulli(logits=nets["encoder"](data)).to_event(1))

    return model, guide


PROGRAMS: dict[str, Callable[[], Program]] = {
    **{f"chain, {steps} sites": functools.partial(chain, steps, False) for steps in (10, 50, 100, 200, 500, 1000)},
    **{f"observed chain, {steps} sites": functools.partial(chain, steps, True) for steps in (50, 200)},
    "belief network 64-20-20": lambda: belief_network(64, 20),
    "belief network 784-200-200": lambda: belief_network(784, 200),
    "autoencoder 784-200": lambda: autoencoder(784, 200),
    **{
        f"belief network 64-20-20, {rows} rows": functools.partial(belief_network, 64, 20, rows)
        for rows in (32, 512, 4096)
    },
}
QUICK = (
    "chain, 50 sites",
    "chain, 200 sites",
    "observed chain, 50 sites",
    "belief network 64-20-20",
    "belief network 784-200-200",
    "autoencoder 784-200",
    "chain, 1000 sites",
    "belief network 64-20-20, 4096 rows",
)


def chain_by_hand(steps: int, is_observed: bool) -> Callable[[], object]:
    """One step of the score function on :func:`chain`: torch's distributions, a loop, Adam; no Pyro."""
    bernoulli, normal = torch.distributions.Bernoulli, torch.distributions.Normal
    start, step, means, posterior = (torch.zeros(n, requires_grad=True) for n in (2, 2, 2, steps))
    slope = torch.tensor(0.5, requires_grad=True)
    optimiser = torch.optim.Adam([start, step, means, posterior, slope], lr=1e-4)

    def take() -> float:
        optimiser.zero_grad()
        z, log_q, log_p = torch.tensor(0.0), torch.tensor(0.0), torch.tensor(0.0)
        for t, logit in enumerate(posterior.unbind()):
            q = bernoulli(logits=logit + slope * z)
            p = bernoulli(logits=step[0] + step[1] * z if t else start[0])
            z = q.sample()
            log_q, log_p = log_q + q.log_prob(z), log_p + p.log_prob(z)
            if is_observed or t == steps - 1:
                log_p = log_p + normal(means[0] + means[1] * z, 1.0).log_prob(_OBSERVED)
        loss = log_q - log_p
        (loss.detach() * log_q - log_p).backward()
        optimiser.step()
        return loss.item()

    return take


def chain_by_storchastic(steps: int, is_observed: bool) -> Callable[[], object]:
    """The same in Storchastic, without a baseline."""
    import storch

    # It walks its graph recursively: from 50 sites on Python's limit is too low.
    sys.setrecursionlimit(20_000)
    # torch's checks of values refuse its tensors.
    kinds = torch.distributions.Bernoulli, torch.distributions.Normal
    bernoulli, normal = (functools.partial(kind, validate_args=False) for kind in kinds)
    start, step, means, posterior = (torch.zeros(n, requires_grad=True) for n in (2, 2, 2, steps))
    slope = torch.tensor(0.5, requires_grad=True)
    optimiser = torch.optim.Adam([start, step, means, posterior, slope], lr=1e-4)
    methods = [storch.method.ScoreFunction(f"z_{t}", n_samples=1, baseline_factory=None) for t in range(steps)]

    def take() -> float:
        optimiser.zero_grad()
        z = torch.tensor(0.0)
        for t, logit in enumerate(posterior.unbind()):
            q = bernoulli(logits=logit + slope * z)
            p = bernoulli(logits=step[0] + step[1] * z if t else start[0])
            z = methods[t](q)
            storch.add_cost(q.log_prob(z) - p.log_prob(z), f"kl_{t}")
            if is_observed or t == steps - 1:
                storch.add_cost(-normal(means[0] + means[1] * z, 1.0).log_prob(_OBSERVED), f"x_{t}")
        loss = storch.backward()
        optimiser.step()
        return float(loss)

    return take


class Apart:
    """Steps of Storchastic in a process of its own: it replaces functions of torch for all that share one with it.

    Args:
        steps: Length of the chain.
        is_observed: Whether every site is observed.

    Attributes:
        seconds: CPU seconds of the last step.
    """

    def __init__(self, steps: int, is_observed: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.seconds = 0.0
        self._here, there = context.Pipe()
        context.Process(target=_serve, args=(there, steps, is_observed), daemon=True).start()

    def __call__(self) -> None:
        self._here.send(True)
        self.seconds = self._here.recv()

    def close(self) -> None:
        """Ends the process."""
        self._here.send(False)


def _serve(pipe: Any, steps: int, is_observed: bool) -> None:
    torch.set_num_threads(1)
    take = chain_by_storchastic(steps, is_observed)
    while pipe.recv():
        start = time.process_time()
        take()
        pipe.send(time.process_time() - start)


def chain_length(name: str) -> int:
    """Number of sites of a chain by its name; 0 for other programs."""
    return next((int(word) for word in name.split() if word.isdigit()), 0) if "chain" in name else 0


def elbos_for(name: str) -> list[str]:
    """The ELBOs, and other rivals, that can serve a program in reasonable time."""
    steps = chain_length(name)
    found = [elbo for elbo in ELBOS if elbo != "TraceGraph_ELBO" or steps <= LONGEST_FOR_TRACEGRAPH]
    if "chain" in name:
        found.append(BY_HAND)
        if importlib.util.find_spec("storch") is not None and steps <= LONGEST_FOR_STORCHASTIC:
            found.append(STORCHASTIC)
    return found


def stepper(program: Program, elbo: str, name: str, storchastic: Callable[..., Any] = Apart) -> Callable[[], object]:
    """One whole SVI step."""
    if elbo in (BY_HAND, STORCHASTIC):
        make = chain_by_hand if elbo == BY_HAND else storchastic
        return make(chain_length(name), name.startswith("observed"))
    return SVI(*program, Adam({"lr": 1e-4}), ELBOS[elbo]()).step


def cpu_seconds(
    steps: Mapping[str, Callable[[], object]], rounds: int, seconds: float, collects: bool = False
) -> dict[str, list[float]]:
    """CPU time of steps that take turns.

    Args:
        steps: What to time, by name.
        rounds: Largest number of rounds.
        seconds: Time after which no further round starts; three are taken in any case.
        collects: Whether Python's garbage collector is at work; else it runs between rounds, untimed.

    Returns:
        CPU seconds by name, one per round.
    """
    taken: dict[str, list[float]] = {name: [] for name in steps}
    end, shuffle = time.monotonic() + seconds, random.Random(0)
    for i in range(rounds):
        if i >= 3 and time.monotonic() > end:
            break
        with contextlib.nullcontext() if collects else uncollected():
            # In changing order: what one leaves to the garbage collector is cleared up during another's step.
            for name in shuffle.sample(list(steps), len(steps)):
                start = time.process_time()
                steps[name]()
                taken[name].append(getattr(steps[name], "seconds", time.process_time() - start))
    return taken


def measure_time(name: str, rounds: int, seconds: float) -> list[Row]:
    """Times of all ELBOs on one program."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    program = PROGRAMS[name]()
    steps = {elbo: stepper(program, elbo, name) for elbo in elbos_for(name)}
    for elbo, step in steps.items():
        for _ in range(2 if elbo in ("TraceGraph_ELBO", STORCHASTIC) else WARM_UP):
            step()
    taken = cpu_seconds(steps, rounds, seconds)
    collected, frozen = dict[str, list[float]](), dict[str, list[float]]()
    if BY_HAND in steps:
        again = {elbo: steps[elbo] for elbo in COLLECTED}
        collected = cpu_seconds(again, rounds, seconds / 2, collects=True)
        gc.collect()
        gc.freeze()
        frozen = cpu_seconds(again, rounds, seconds / 2, collects=True)
        gc.unfreeze()
    for step in steps.values():
        if isinstance(step, Apart):
            step.close()
    return [
        {
            "program": name,
            "elbo": elbo,
            "milliseconds": 1000 * median(values),
            "ratio": ratio(taken, elbo, BASE),
            "by hand": ratio(taken, elbo, BY_HAND),
            "collected": 1000 * median(collected[elbo]) if elbo in collected else "",
            "collected by hand": ratio(collected, elbo, BY_HAND),
            "frozen": 1000 * median(frozen[elbo]) if elbo in frozen else "",
            "frozen by hand": ratio(frozen, elbo, BY_HAND),
            "rounds": len(values),
        }
        for elbo, values in taken.items()
    ]


def ratio(taken: Mapping[str, list[float]], one: str, other: str) -> float | str:
    """Median over rounds of the time of one over that of another; empty where one of them was not timed."""
    if one not in taken or other not in taken:
        return ""
    return median(a / b for a, b in zip(taken[one], taken[other], strict=True))


def resident(field: str) -> float:
    """Megabytes of this process: ``VmRSS`` now, ``VmHWM`` at its peak; off Linux the peak for both."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def measure_memory(name: str, elbo: str, steps: int) -> float:
    """Megabytes that steps need at their peak beyond one of ``Trace_ELBO``; for a process of its own."""
    program = PROGRAMS[name]()
    stepper(program, BASE, name)()
    step = stepper(program, elbo, name, chain_by_storchastic)
    before = resident("VmRSS")
    for _ in range(steps):
        step()
    return resident("VmHWM") - before


def memory_of(name: str, elbo: str, steps: int) -> float:
    """The same, measured in a new process."""
    command = [sys.executable, __file__, "--memory", json.dumps([name, elbo, steps])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all lengths, more rounds")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--memory", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def by_program(rows: list[Row], column: str) -> list[Row]:
    """One row per program, one column per ELBO."""
    found: dict[str, Row] = {}
    for row in rows:
        line = found.setdefault(row["program"], {"program": row["program"], **dict.fromkeys(RIVALS, "")})
        line[row["elbo"]] = row[column]
    return list(found.values())


def by_hand(rows: list[Row]) -> list[Row]:
    """One row per chain: our steps over the loop by hand, by what the garbage collector does."""
    found: dict[str, Row] = {}
    for row in rows:
        if row["elbo"] in (CACHED, "default") and row["by hand"] != "":
            line = found.setdefault(row["program"], {"program": row["program"]})
            for column, when in (("by hand", "off"), ("collected by hand", "on"), ("frozen by hand", "frozen")):
                line[f"{row['elbo']}, {when}"] = row[column]
    return list(found.values())


def main() -> None:
    """Measures, prints, and writes CSV and Markdown."""
    chosen = options()
    warnings.filterwarnings("ignore", category=UserWarning)
    if chosen.memory:
        print(measure_memory(*chosen.memory))
        return
    names = list(PROGRAMS) if chosen.full else QUICK
    rows = []
    for name in progress(names, "programs"):
        found = measure_time(name, 200 if chosen.full else 40, 120.0 if chosen.full else 20.0)
        for row in found:
            row["megabytes"] = memory_of(
                name, row["elbo"], 5 if row["elbo"] in ("TraceGraph_ELBO", STORCHASTIC) else WARM_UP
            )
        rows += found
    write(chosen.output, rows, chosen.full)


def write(output: Path, rows: list[Row], is_full: bool) -> None:
    """Writes CSV and Markdown, prints the ratios."""
    write_csv(output / "overhead.csv", rows)
    time_table, ratio_table, memory_table = (
        table(by_program(rows, column)) for column in ("milliseconds", "ratio", "megabytes")
    )
    hand_table = table(by_hand(rows))
    parts = (
        f"{'Full' if is_full else 'Quick'} run; float32, argument validation on (Pyro's default); one particle, but in "
        "`default`, which settles its own number. Python's garbage collector is off while times are taken.",
        "## CPU time of a step, divided by that of `Trace_ELBO`\n\n" + ratio_table,
        "## CPU time of a step in milliseconds\n\n" + time_table,
        "## Chains beside a loop by hand, and Python's garbage collector\n\n"
        "CPU time of a step over that of the loop by hand, whose estimator is that of *score, cached*; with the "
        "collector off, on, and on after `gc.freeze()`, which takes what is alive then, torch and Pyro themselves for "
        "the most part, out of its sight.\n\n" + hand_table,
        "## Peak memory in megabytes beyond that after a step of `Trace_ELBO`\n\n"
        "Resident set of a process of its own; it includes what the allocator keeps.\n\n" + memory_table,
    )
    write_markdown(output / "overhead.md", "Overhead of a step", parts)
    print(ratio_table, hand_table, sep="\n\n")


if __name__ == "__main__":
    main()
