r"""The paper's algorithm and the default, beside each other: distance to the best ELBO over time, and the bias.

``chain``: 20 binary sites, each reads the one before it; a random cost of every pair of neighbours (so every site has a
bypass). ``branches``: a root and two branches of three binary sites; a cost of the first branch and the root, and one
of both ends and the root. Guides are tables; the best ELBO of the chain is known, that of the branches is the best of
ten descents of the exact loss. With uniform priors every site also costs ``log q``.

``paper_settings(reduction, lam)`` runs Algorithm 1 as written: every Q-function learned in tables, critics before the
guide, ``Q(x) grad log q(x)``, a step size that falls from 0.5 to 0.1. It is biased by its critics. The default is not.
``net`` has an ``MLPCritic()`` in place of tables, and a fiftieth of the step size. Where nothing else is said the
estimator is ``QScoreFunction()`` and lambda is 0. All methods have 200 rollouts a step, and the same seeds.

*Rate*: the learning rate of the guide at the start, the best of 0.05, 0.1 and 0.2 on a seed that is not reported, in
half as many steps; it falls to zero. *Gap*: exact loss minus the best one, in percent of that at the start; medians
over seeds. *Bias²* and *variance* of a step's gradient, over the squared exact gradient, with guide and critics frozen
at the first checkpoint; what a finite number of draws adds to the bias is taken off, so that it may come out negative.
ms: processor time of a step.

    python benchmarks/paper.py [--full] [--smoke] [--seeds N] [--resume] [--only GRAPH] [--output DIRECTORY]
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import Error, Row, arguments, cases, grouped, measured, median, only, progress, publish, sized
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_bpq import MLPCritic, TraceBackpropQ_ELBO, paper_settings
from pyro_bpq.estimators import QAdvantage, QAllAction

REDUCTIONS = ("per_cost", "merged", "tree", "chain", "single")
START, RATES, TUNING_SEED = 1.5, (0.05, 0.1, 0.2), 100
EARLY = {"bias²": "bias", "variance": "variance"}


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        seeds: Number of seeds.
        steps: Training steps.
        particles: Rollouts per step.
        checkpoints: Number of checkpoints.
        repeats: Gradients at the first checkpoint, to measure bias and variance.
    """

    seeds: int
    steps: int
    particles: int
    checkpoints: int
    repeats: int


SMOKE = Size(1, 20, 20, 2, 2)
QUICK = Size(3, 300, 200, 5, 60)
FULL = Size(5, 1000, 200, 10, 200)


class Problem:
    """Binary sites with a table each, and costs that are tables.

    Args:
        parents: For each site the positions of those that it reads.
        readers: For each cost the positions of the sites that it reads.
        scale: Size of the costs, in nats.
        seed: Seed of the costs and of the guide's start.
    """

    def __init__(self, parents: list[list[int]], readers: list[list[int]], scale: float, seed: int) -> None:
        noise = torch.Generator().manual_seed(seed)
        self.parents, self.readers = parents, readers
        self.costs = [scale * torch.randn((2,) * len(read), generator=noise) for read in readers]
        self.start = START * torch.randn(len(parents), 2 ** max(map(len, parents)), generator=noise)

    def logit(self, logits: Tensor, i: int, values: list[Tensor]) -> Tensor:
        """The logit of a site given those before: an entry of its table."""
        row = torch.zeros((), dtype=torch.long)
        for j in self.parents[i]:
            row = 2 * row + values[j].long()
        return logits[i, row]

    def price(self, which: int, values: list[Tensor]) -> Tensor:
        """A cost: an entry of its table."""
        return self.costs[which][tuple(values[j].long() for j in self.readers[which])]

    def guide(self) -> None:
        """The sites."""
        logits = pyro.param("logits", self.start.clone())
        values: list[Tensor] = []
        for i in range(len(self.parents)):
            values.append(pyro.sample(f"x_{i}", dist.Bernoulli(logits=self.logit(logits, i, values))))

    def model(self) -> None:
        """Uniform priors and the costs."""
        values = [pyro.sample(f"x_{i}", dist.Bernoulli(logits=torch.zeros(()))) for i in range(len(self.parents))]
        for which in range(len(self.costs)):
            pyro.factor(f"f_{which}", -self.price(which, values))

    def loss(self, logits: Tensor) -> Tensor:
        """Minus the ELBO, exactly, as a function of the tables, in float64."""
        states = torch.tensor(list(itertools.product((0.0, 1.0), repeat=len(self.parents))), dtype=torch.float64)
        values = list(states.unbind(-1))
        log_q = torch.zeros(len(states), dtype=torch.float64)
        for i, value in enumerate(values):
            log_q = log_q + logsigmoid((2 * value - 1) * self.logit(logits, i, values))
        cost = sum(self.price(which, values) for which in range(len(self.costs))) + log_q
        return (log_q.exp() * cost).sum() + len(self.parents) * math.log(2.0)

    def best(self) -> float:
        """The lowest loss: the best of ten descents."""
        noise = torch.Generator().manual_seed(1)
        others = [2.0 * torch.randn(self.start.shape, generator=noise) for _ in range(9)]
        return min(descend(self, start) for start in (self.start, *others))


class Chain(Problem):
    """A chain with a cost of each pair of neighbours; loss and best loss by dynamic programming."""

    def __init__(self, sites: int, seed: int) -> None:
        pairs = [[t - 1, t] for t in range(1, sites)]
        super().__init__([[], *([t - 1] for t in range(1, sites))], pairs, 1.0, seed)

    def loss(self, logits: Tensor) -> Tensor:
        """Forward over the distribution of the state."""
        log_p = logsigmoid(torch.stack((-logits, logits), -1))
        now = log_p[0, 0].exp()
        total = (now * log_p[0, 0]).sum()
        for own, cost in zip(log_p[1:], self.costs, strict=True):
            joint = now.unsqueeze(-1) * own.exp()
            total = total + (joint * (own + cost.double())).sum()
            now = joint.sum(0)
        return total + len(self.parents) * math.log(2.0)

    def best(self) -> float:
        """Minus the log of the normaliser: the posterior is a chain, too."""
        ahead = torch.zeros(2, dtype=torch.float64)
        for cost in reversed(self.costs):
            ahead = (ahead - cost.double()).logsumexp(-1)
        return len(self.parents) * math.log(2.0) - float(ahead.logsumexp(-1))


class Branches(Problem):
    """Root 0, branches 1 to 3 and 4 to 6; site 3 also reads the root."""

    def __init__(self, seed: int) -> None:
        super().__init__([[], [0], [1], [2, 0], [0], [4], [5, 4]], [[0, 1, 3], [0, 3, 6]], 4.0, seed)


def descend(problem: Problem, start: Tensor) -> float:
    """The loss after a descent of the exact loss."""
    logits = start.double().clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(500):
        optimizer.zero_grad()
        loss = problem.loss(logits)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


PROBLEMS = {"chain": lambda seed: Chain(20, seed), "branches": Branches}


@cache
def problem_of(name: str, seed: int) -> tuple[Problem, float]:
    """A problem and its lowest loss."""
    problem = PROBLEMS[name](seed)
    return problem, problem.best()


def methods(size: Size) -> dict[str, dict[str, Any]]:
    """The options of each method."""

    def rate(step: int) -> float:
        return 0.5 * max(0.2, 1 - step / size.steps)

    return {
        **{f"paper, {reduction}": paper_settings(reduction, rate=rate) for reduction in REDUCTIONS},
        "paper, single, net": paper_settings("single", critic=MLPCritic(), rate=lambda step: 0.02 * rate(step)),
        "paper, merged, lam 0.9": paper_settings("merged", 0.9, rate=rate),
        "paper, merged, QAdvantage": paper_settings("merged", estimator=QAdvantage(), rate=rate),
        "paper, merged, QAllAction": paper_settings("merged", estimator=QAllAction(), rate=rate),
        "default": {},
    }


def moments(problem: Problem, elbo: TraceBackpropQ_ELBO, leaf: Tensor, repeats: int) -> dict[str, float]:
    """Squared bias and variance of a step's gradient, as shares of the squared exact gradient."""
    logits, frozen = leaf.detach().double().requires_grad_(), copy.deepcopy(elbo).eval()
    (exact,) = torch.autograd.grad(problem.loss(logits), logits)
    error = Error.of(exact.flatten(), [leaf], lambda: frozen.loss_and_grads(problem.model, problem.guide), repeats)
    leaf.grad, square = None, float(exact.square().sum())
    return {"bias": error.bias / square, "variance": error.variance / square}


@cache
def best_rate(size: Size, graph: str, method: str) -> float:
    """The learning rate with the smallest gap after half as many steps, on a seed of its own."""
    short = replace(size, steps=max(size.steps // 2, 1), checkpoints=1, repeats=0)
    return min(RATES, key=lambda rate: train(short, graph, method, TUNING_SEED, rate)[-1]["gap"])


def train(size: Size, graph: str, method: str, seed: int, rate: float = 0.0) -> list[Row]:
    """Trains guide and critics, at the best rate if none is given; a row for each checkpoint."""
    rate, options = rate or best_rate(size, graph, method), methods(size)[method]
    problem, best = problem_of(graph, seed)
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    elbo = TraceBackpropQ_ELBO(size.particles, vectorize_particles=True, max_plate_nesting=0, **options)
    pyro.param("logits", problem.start.clone())
    leaf = pyro.get_param_store()._params["logits"]
    optimizer = torch.optim.Adam([leaf], lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: max(1 - k / size.steps, 0.02))
    first = float(problem.loss(problem.start.double()))
    marks = {round(size.steps * (k + 1) / size.checkpoints) for k in range(size.checkpoints)}
    rows, seconds = [], 0.0
    for step in progress(range(1, size.steps + 1), f"{graph}, {method}, seed {seed}"):
        begin = time.process_time()
        optimizer.zero_grad()
        elbo.loss_and_grads(problem.model, problem.guide)
        optimizer.step()
        schedule.step()
        seconds += time.process_time() - begin
        if step in marks:
            now = float(problem.loss(leaf.detach().double()))
            row = {"rate": rate, "step": step, "seconds": seconds}
            is_measured = not rows and size.repeats > 0
            known = moments(problem, elbo, leaf, size.repeats) if is_measured else {"bias": "", "variance": ""}
            rows.append(row | {"gap": (now - best) / (first - best)} | known)
    return rows


def summary(rows: list[Row]) -> list[Row]:
    """One row per graph and method: medians over seeds."""
    found = []
    for (graph, method), mine in grouped(rows, "graph", "method").items():
        at = {step: own for (step,), own in grouped(mine, "step").items()}
        steps = sorted(at)
        early, last, shown = at[steps[0]], at[steps[-1]], steps[:-1][:: max(len(steps) // 5, 1)]
        entry: Row = {"graph": graph, "method": method, "seeds": len(last), "rate": last[0]["rate"]}
        entry |= {f"gap at step {s}, %": 100 * median(row["gap"] for row in at[s]) for s in shown}
        entry["gap at the end, %"] = 100 * median(row["gap"] for row in last)
        entry["worst seed, %"] = 100 * max(row["gap"] for row in last)
        entry |= {f"{name} at step {steps[0]}": median(row[key] for row in early) for name, key in EARLY.items()}
        found.append(entry | {"ms per step": 1e3 * median(row["seconds"] / row["step"] for row in last)})
    return found


def main() -> None:
    """Measures, prints, writes ``paper.csv`` and ``paper.md``."""
    options = arguments(__doc__, "smoke seeds resume only")
    size, path = sized(options, QUICK, FULL, smoke=SMOKE), options.output / "paper"
    wanted = cases(graph=only(options, PROBLEMS), method=methods(size), seed=range(size.seeds))
    rows = measured(path.with_suffix(".csv"), wanted, partial(train, size), options.resume)
    publish(path, "The paper's algorithm and the default", __doc__, rows, summary(rows))


if __name__ == "__main__":
    main()
