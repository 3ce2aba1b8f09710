r"""Subsets and orders: the chain of choices beside leave-one-out, on problems with a known optimum.

``items``: five of 30 items, and a cost of each that is stated for itself. ``pairs``: costs of items and of pairs.
``ranking``: an order of nine items, and a cost for each pair that stands in that order. All values are enumerated, so
that the optimum and the mean cost are exact. The model is uniform with a factor ``exp(-3 cost)``.

``race``: the cost above the optimum after equal CPU time, each method at its best learning rate. ``gradients``:
variance of one step's gradient times CPU time, methods in turn, at zero logits and at those on the way to the optimum.
*chain* is :func:`pyro_bpq.sample_chain`, *site* one site in its place, and *plain* leave-one-out with nothing around.

    python benchmarks/subsets.py [--full | --smoke] [--output DIRECTORY]
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import torch
from common import PlainLeaveOneOut, Row, flat, parser_of, table, write_csv, write_markdown
from torch import Tensor, nn

from pyro_bpq import KSubset, PlackettLuce, TraceBackpropQ_ELBO, sample_chain

SHARPNESS = 3.0
RATES = (0.1, 0.3)
PLAIN = {n: f"plain leave-one-out, {n}, site" for n in (8, 64, 512, 2048)}
# By name: whether the program is a chain, and the objective.
METHODS: dict[str, tuple[bool, Callable[[], Any]]] = {
    "default, chain": (True, TraceBackpropQ_ELBO),
    "default, site": (False, TraceBackpropQ_ELBO),
    "ours, 512, site": (False, functools.partial(TraceBackpropQ_ELBO, 512, vectorize_particles=True)),
    **{name: (False, functools.partial(PlainLeaveOneOut, number)) for number, name in PLAIN.items()},
}
FIVE = functools.partial(KSubset, k=5)
LAWS: dict[str, Callable[[Tensor], Any]] = {"items": FIVE, "pairs": FIVE, "ranking": PlackettLuce}


@functools.cache
def weights(kind: str) -> Tensor:
    """Costs of items on the diagonal, of pairs below it, or of each pair in its order; always the same."""
    number = 9 if kind == "ranking" else 30
    found = torch.randn(number, number, generator=torch.Generator().manual_seed(0))
    return found.diag().diag() if kind == "items" else found.tril() if kind == "pairs" else found


def costs_of(kind: str, value: Tensor) -> Tensor:
    """Costs of values."""
    costs = weights(kind)
    if kind == "ranking":
        return costs[value.unsqueeze(-1), value.unsqueeze(-2)].triu(1).sum((-2, -1))
    return ((value @ costs) * value).sum(-1)


def costs_of_parts(kind: str, value: Tensor) -> list[Tensor]:
    """The same, as what each item or place adds to those before it."""
    costs, parts = weights(kind), range(len(weights(kind)))
    if kind == "items":
        return [value[..., t] * costs[t, t] for t in parts]
    if kind == "pairs":
        return [value[..., t] * (value[..., : t + 1] @ costs[t, : t + 1]) for t in parts]
    return [costs[value[..., :t], value[..., t, None]].sum(-1) for t in parts]


@functools.cache
def values_and_costs(kind: str) -> tuple[Tensor, Tensor]:
    """All values and their costs."""
    values = LAWS[kind](torch.zeros(len(weights(kind)))).enumerate_support()
    return values, costs_of(kind, values)


class Choice(nn.Module):
    """A subset or an order."""

    def __init__(self, kind: str, is_chain: bool) -> None:
        super().__init__()
        self.kind, self.is_chain, self.logits = kind, is_chain, nn.Parameter(torch.zeros(len(weights(kind))))

    def draw(self, logits: Tensor) -> Tensor:
        return (sample_chain if self.is_chain else pyro.sample)("s", LAWS[self.kind](logits))

    def model(self) -> None:
        value = self.draw(torch.zeros_like(self.logits))
        costs = costs_of_parts(self.kind, value) if self.is_chain else [costs_of(self.kind, value)]
        for t, cost in enumerate(costs):
            pyro.factor(f"cost_{t}", -SHARPNESS * cost)

    def guide(self) -> None:
        self.draw(self.logits)

    @torch.no_grad()
    def above(self) -> tuple[float, float]:
        """Mean cost of the guide's values, and cost of the most probable one, above the optimum."""
        values, costs = values_and_costs(self.kind)
        log_probs = LAWS[self.kind](self.logits).log_prob(values)
        return tuple(float(cost - costs.min()) for cost in ((log_probs.exp() * costs).sum(), costs[log_probs.argmax()]))


class Run:
    """A program that a method trains, or without a rate draws gradients of; its CPU time."""

    def __init__(self, kind: str, name: str, seed: int = 0, rate: float = 0.0) -> None:
        pyro.set_rng_seed(seed)
        is_chain, make = METHODS[name]
        self.name, self.module, self.elbo, self.seconds = name, Choice(kind, is_chain), make(), 0.0
        self.optimizer = torch.optim.Adam(self.module.parameters(), rate)
        self.gradients = list[Tensor]()

    def step(self, trains: bool = True) -> None:
        self.module.zero_grad()
        start = time.process_time()
        self.elbo.loss_and_grads(self.module.model, self.module.guide)
        if trains:
            self.optimizer.step()
        self.seconds += time.process_time() - start
        self.gradients = [*self.gradients, flat(p.grad for p in self.module.parameters())] if not trains else []


def gradients(kind: str, logits: Tensor, where: str, draws: int) -> list[Row]:
    """Variance and CPU time of each method's gradient at fixed weights; methods take turns."""
    runs = [Run(kind, name) for name in METHODS]
    for run in runs:
        run.module.logits.data.copy_(logits)
        for _ in range(min(draws, 30)):
            run.step(False)
        run.seconds, run.gradients = 0.0, []
    for run in [*runs] * draws:
        run.step(False)
    rows: list[Row] = []
    for run in runs:
        ms, variance = 1e3 * run.seconds / draws, float(torch.stack(run.gradients).var(0).sum())
        row = {"program": kind, "weights": where, "method": run.name, "samples": run.elbo.num_particles, "ms": ms}
        rows.append({**row, "variance": variance, "variance x ms": variance * ms})
    return rows


def race(kind: str, seconds: float, seeds: int) -> list[Row]:
    """Costs above the optimum after equal CPU time, at each method's best rate."""
    rows: list[Row] = []
    for name in METHODS:
        tried: list[Row] = []
        for rate in RATES:
            runs, steps = [Run(kind, name, seed, rate) for seed in range(seeds)], 0
            for run in runs:
                while run.seconds < seconds:
                    run.step()
                    steps += 1
            means, modes = zip(*(run.module.above() for run in runs), strict=True)
            row = {"program": kind, "method": name, "samples": runs[0].elbo.num_particles, "rate": rate}
            tried.append({**row, "steps": steps / seeds, "mean": sum(means) / seeds, "worst mode": max(modes)})
        rows.append(min(tried, key=lambda row: row["mean"]))
    return rows


def trained(kind: str, steps: int) -> Tensor:
    """Logits on the way to the optimum."""
    run = Run(kind, PLAIN[512], rate=0.1)
    for _ in range(steps):
        run.step()
    return run.module.logits.detach()


def main() -> None:
    options = parser_of(__doc__, "smoke").parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    draws, seconds, seeds = (2, 0.01, 1) if options.smoke else (40, 6.0, 2) if options.full else (20, 2.0, 1)
    found, raced = list[Row](), list[Row]()
    for kind in LAWS:
        for where, steps in (("zero", 0), ("trained", 2 if options.smoke else 40)):
            found += gradients(kind, trained(kind, steps), where, draws)
        raced += race(kind, seconds, seeds)
        print(table(found), table(raced), sep="\n", flush=True)
    write_csv(options.output / "subsets.csv", raced)
    write_csv(options.output / "subsets_gradients.csv", found)
    text = f"Cost above the optimum after {seconds:g} s of CPU time, at the best of {RATES}, {seeds} seeds: "
    text += "*mean* of the guide's values, and *worst mode*, its most probable value in the worst seed."
    again = "Variance of one step's gradient times CPU milliseconds, methods in turn, at the same weights."
    write_markdown(options.output / "subsets.md", "Subsets and orders", [text, table(raced), again, table(found)])


if __name__ == "__main__":
    main()
