r"""What a step takes beside ``Trace_ELBO``'s: at the start of a run, and settled.

*settled*: the mean CPU time of the steps after the eighth, with all that they do now and then, over that of a step of
``Trace_ELBO``. *first eight*: the time of the first eight steps, in such steps of ``Trace_ELBO``. Both take turns in
one process, with one thread, on the same parameters; torch and Pyro are warm, and Python's garbage collector runs
between steps. *megabytes*: the peak of memory of a process of its own, beyond that after a step of ``Trace_ELBO``.
Each repeat is a process of its own, with another seed; the table has medians, and the range over repeats.

    python benchmarks/first_steps.py [--smoke] [--repeats N] [--only PROGRAM] [--name STEM] [--output DIRECTORY]
"""

from __future__ import annotations

import gc
import resource
import time
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import Row, apart, called, grouped, median, parser_of, progress, read_csv, table, write_csv, write_markdown
from compiled import belief_network
from programs import Chain, Grid, Layers, Parts
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_bpq import TraceBackpropQ_ELBO

FIRST, SETTLED, EVERY = 8, 640, 32
# Model, guide, arguments of both.
Case = tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]


class HiddenMarkov(Parts):
    """Chains of four states, and a guide whose recurrent cell reads data and states."""

    def __init__(self, sites: int = 40) -> None:
        super().__init__()
        self.sites, self.move, self.loc = sites, nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.randn(4))
        self.cell, self.out = nn.GRUCell(5, 16), nn.Linear(16, 4)

    def model(self, x: Tensor) -> None:
        with pyro.plate("rows", len(x), dim=-1):
            logits = torch.zeros(4)
            for t in range(self.sites):
                z = pyro.sample(f"z_{t}", dist.Categorical(logits=logits))
                pyro.sample(f"x_{t}", dist.Normal(self.loc[z], 1.0), obs=x[:, t])
                logits = self.move[z]

    def guide(self, x: Tensor) -> None:
        with pyro.plate("rows", len(x), dim=-1):
            hidden, hot = torch.zeros(len(x), 16), torch.zeros(len(x), 4)
            for t in range(self.sites):
                came = torch.cat([x[:, t, None].expand(*hot.shape[:-1], 1), hot], -1)
                hidden = self.cell(came.flatten(0, -2), hidden.expand(*hot.shape[:-1], 16).flatten(0, -2))
                hidden = hidden.unflatten(0, hot.shape[:-1])
                z = pyro.sample(f"z_{t}", dist.Categorical(logits=self.out(hidden)))
                hot = nn.functional.one_hot(z, 4).float()


class DeepMarkov(Parts):
    """Sequences of binary vectors of several lengths, with binary states; the guide reads the future."""

    def __init__(self, states: int = 8, width: int = 16) -> None:
        super().__init__()
        self.states = states
        self.move = nn.Sequential(nn.Linear(states, 32), nn.ReLU(), nn.Linear(32, states))
        self.emit = nn.Sequential(nn.Linear(states, 32), nn.ReLU(), nn.Linear(32, width))
        self.reader, self.law = nn.GRU(width, 32, batch_first=True), nn.Linear(32 + states, states)

    def model(self, x: Tensor, lengths: Tensor) -> None:
        with pyro.plate("rows", len(x), dim=-1):
            z = torch.zeros(self.states)
            for t in range(x.shape[1]):
                with poutine.mask(mask=t < lengths):
                    z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=self.move(z)).to_event(1))
                    pyro.sample(f"x_{t}", dist.Bernoulli(logits=self.emit(z)).to_event(1), obs=x[:, t])

    def guide(self, x: Tensor, lengths: Tensor) -> None:
        read = self.reader(x.flip(1))[0].flip(1)
        with pyro.plate("rows", len(x), dim=-1):
            z = torch.zeros(len(x), self.states)
            for t in range(x.shape[1]):
                with poutine.mask(mask=t < lengths):
                    seen = torch.cat([read[:, t].expand(*z.shape[:-1], 32), z], -1)
                    z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=self.law(seen)).to_event(1))


def regression(x: Tensor, y: Tensor) -> None:
    """Nothing to score: an autoguide reparameterises all sites."""
    weights = pyro.sample("weights", dist.Normal(0.0, 1.0).expand([x.shape[-1]]).to_event(1))
    bias = pyro.sample("bias", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("rows", len(x), dim=-1):
        pyro.sample("y", dist.Normal(bias + (weights * x).sum(-1), scale), obs=y)


def of(parts: Parts, *args: Tensor) -> Case:
    """A program and its data."""
    return parts.model, parts.guide, args


PROGRAMS: dict[str, tuple[Callable[[], Case], dict[str, Any]]] = {
    "HMM of 40 sites, recurrent guide, 8 rows": (lambda: of(HiddenMarkov(), torch.randn(8, 40)), {}),
    "deep Markov model, binary states, lengths, 12 rows": (
        lambda: of(DeepMarkov(), torch.rand(12, 20, 16).round(), torch.randint(5, 21, (12,))),
        {},
    ),
    "grid 6 x 6, independent guide": (lambda: of(Grid(6)), {}),
    "chain of 50": (lambda: of(Chain(50)), {}),
    "belief network of 3 layers, 64 rows": (lambda: of(Layers(3, 20), torch.rand(64, 64).round()), {}),
    "belief network 784-200-200, 100 rows": (lambda: (*belief_network(784, 200, 200), ()), {}),
    "VAE 784-200, 100 rows": (lambda: (*belief_network(784, 200), ()), {}),
    "AutoNormal, 100 vectorised particles": (
        lambda: (regression, AutoNormal(regression), (torch.randn(50, 10), torch.randn(50))),
        {"num_particles": 100, "vectorize_particles": True},
    ),
}


def made(name: str, seed: int) -> tuple[Case, dict[str, Callable[[], Any]]]:
    """A program, and what makes both ELBOs."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    torch.set_num_threads(1)
    make, options = PROGRAMS[name]
    return make(), {"Trace_ELBO": lambda: Trace_ELBO(**options), "ours": lambda: TraceBackpropQ_ELBO(**options)}


def measure(name: str, seed: int, settled: int) -> Row:
    """One repeat, for a process of its own."""
    # What torch and Pyro do once.
    (model, guide, args), elbos = made("chain of 50", seed)
    for make in elbos.values():
        for _ in range(3):
            SVI(model, guide, Adam({"lr": 1e-3}), make()).step(*args)
    (model, guide, args), elbos = made(name, seed)
    own = elbos["ours"]()
    losses = {"Trace_ELBO": elbos["Trace_ELBO"](), "ours": own}
    steps = {way: SVI(model, guide, Adam({"lr": 1e-3}), loss).step for way, loss in losses.items()}
    taken: dict[str, list[float]] = {way: [] for way in steps}
    gc.disable()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(FIRST + settled):
            for way in sorted(steps, reverse=i % 2 == 0):
                start = time.process_time()
                steps[way](*args)
                taken[way].append(time.process_time() - start)
            if i % EVERY == 0:
                gc.collect()
    base, ours = (sum(taken[way][FIRST:]) / settled for way in ("Trace_ELBO", "ours"))
    return {
        "program": name,
        "seed": seed,
        "particles": own.num_particles,
        "ms of Trace_ELBO": 1e3 * base,
        "settled": ours / base,
        "first eight": sum(taken["ours"][:FIRST]) / base,
        "first eight of Trace_ELBO": sum(taken["Trace_ELBO"][:FIRST]) / base,
        "warnings": sum("pyro_bpq" in getattr(warning.category, "__module__", "") for warning in told),
    }


def megabytes(name: str, way: str) -> float:
    """Peak of memory of some steps, for a process of its own."""
    (model, guide, args), elbos = made(name, 0)
    warnings.simplefilter("ignore")
    SVI(model, guide, Adam({"lr": 1e-3}), elbos["Trace_ELBO"]()).step(*args)
    svi, before = SVI(model, guide, Adam({"lr": 1e-3}), elbos[way]()), peak()
    for _ in range(FIRST):
        svi.step(*args)
    return peak() - before


def peak() -> float:
    """Megabytes of this process at its peak."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def summary(rows: list[Row]) -> list[Row]:
    """Medians and ranges over repeats."""
    found = []
    for (name,), own in grouped(rows, "program").items():

        def over(column: str, own: list[Row] = own) -> str:
            values = [float(row[column]) for row in own]
            return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"

        columns = ("settled", "first eight", "first eight of Trace_ELBO", "ms of Trace_ELBO")
        found.append(
            {"program": name, "particles": own[0]["particles"]}
            | {column: over(column) for column in columns}
            | {f"megabytes of {way}": own[0][f"megabytes of {way}"] for way in ("Trace_ELBO", "ours")}
            | {"repeats": len(own), "with a warning": sum(row["warnings"] > 0 for row in own)}
        )
    return found


def main() -> None:
    """Measures, prints, writes CSV and Markdown."""
    parser = parser_of(__doc__, "only smoke")
    parser.add_argument("--repeats", type=int, default=0, help="number of repeats")
    parser.add_argument("--name", default="first_steps", help="stem of the result files")
    options = parser.parse_args()
    repeats = options.repeats or (1 if options.smoke else 5 if options.full else 3)
    names = [name for name in PROGRAMS if name.startswith(options.only)]
    path = options.output / f"{options.name}.csv"
    rows = [row for row in read_csv(path) if row["program"] not in names] if options.only else []
    for name in progress(names, "programs"):
        memory = {f"megabytes of {way}": apart(__file__, "megabytes", name, way) for way in ("Trace_ELBO", "ours")}
        rows += [
            apart(__file__, "measure", name, seed, 4 if options.smoke else SETTLED) | memory for seed in range(repeats)
        ]
        rows.sort(key=lambda row: [*PROGRAMS].index(row["program"]))
        write_csv(path, rows)
    about = (__doc__ or "").split("\n\n")[1].replace("\n", " ")
    page = table(summary(rows))
    write_markdown(path.with_suffix(".md"), "The first steps, and settled ones", [about, page])
    print(page)


if __name__ == "__main__" and not called(globals()):
    main()
