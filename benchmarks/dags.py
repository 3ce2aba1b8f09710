r"""Branching graphs with two costs and bypasses: gradient error at equal processor time, against the exact gradient.

Binary sites in layers of two, ``x_i ~ Bernoulli(table_i(two parents))``, parents drawn at random from the sites before,
so that edges pass layers by. One cost reads three of the first half of the sites, the other three of all; tables are
random. With uniform priors every site also costs ``log q``. The gradient is that of minus the ELBO with respect to the
guide's tables; the exact one sums over all ``2^n`` joint states in float64.

Guide and critics train together with ``TraceBackpropQ_ELBO()``; at ten checkpoints both are frozen. A rival gets the
time of our step, as in ``chains.py``.

    python benchmarks/dags.py [--full] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import torch
from chains import (
    LEARNING_RATE,
    PARTICLES,
    VECTORIZED,
    Error,
    checkpoints,
    equal_time,
    fitting,
    gain,
    gradient_of,
    mean,
)
from common import Row, arguments, flat, quartiles, table, write_csv, write_markdown
from pyro.infer import ELBO, TraceGraph_ELBO
from race import PlainLeaveOneOut
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from pyro_bpq import LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO

SCALE = 4.0  # nats
# A step of small graphs is mostly Python code: so many particles cost little more than few.
OURS = 10_000


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        sites: Numbers of sites.
        seeds: Number of graphs for each.
        steps: Training steps.
        repeats: Gradients per checkpoint.
        pyro_repeats: Gradients per checkpoint of the slower rivals.
    """

    sites: tuple[int, ...]
    seeds: int
    steps: int
    repeats: int
    pyro_repeats: int


QUICK = Size((8, 14), seeds=3, steps=300, repeats=16, pyro_repeats=4)
FULL = Size((4, 8, 14), seeds=5, steps=1000, repeats=50, pyro_repeats=16)


class Tables(nn.Module):
    """Logits of every site by the values of its two parents, ``(n, 4)``."""

    def __init__(self, sites: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(sites, 4))


class Dag:
    """A guide on a random graph, its model and its exact gradient.

    Args:
        sites: Number of sites.
        seed: Seed of the graph and of its costs.
    """

    def __init__(self, sites: int, seed: int) -> None:
        self.sites, self.net, self.is_averaged = sites, Tables(sites), False
        noise = torch.Generator().manual_seed(seed)
        # The first layer reads constants; layers hold two sites.
        self.parents = [torch.randperm(i - i % 2, generator=noise)[:2].tolist() if i > 1 else [] for i in range(sites)]
        scopes = sites // 2, sites
        self.readers = [torch.randperm(scope, generator=noise)[:3].sort().values.tolist() for scope in scopes]
        self.costs = [SCALE * torch.randn(2, 2, 2, generator=noise) for _ in scopes]

    def logit(self, logits: Tensor, i: int, values: list[Tensor]) -> Tensor:
        """The logit of a site given the sites before."""
        first, second = (values[j] for j in self.parents[i]) if self.parents[i] else (torch.tensor(0.0),) * 2
        a, b, c, d = logits[i].unbind()
        return a + b * first + c * second + d * first * second

    def price(self, which: int, values: list[Tensor]) -> Tensor:
        """A cost, in nats: the polynomial through its table, so that it stays a function of tensors."""
        total, picked = torch.zeros(()), [values[j] for j in self.readers[which]]
        for state in itertools.product((0, 1), repeat=3):
            chosen = [value if bit else 1 - value for bit, value in zip(state, picked, strict=True)]
            total = total + self.costs[which][state] * chosen[0] * chosen[1] * chosen[2]
        return total

    def guide(self) -> None:
        """The sites."""
        pyro.module("tables", self.net)
        values: list[Tensor] = []
        for i in range(self.sites):
            options = {"baseline": {"use_decaying_avg_baseline": True, "baseline_beta": 0.9}}
            q = dist.Bernoulli(logits=self.logit(self.net.logits, i, values))
            values.append(pyro.sample(f"x_{i}", q, infer=options if self.is_averaged else {}))

    def model(self) -> None:
        """Uniform priors and both costs."""
        values = [pyro.sample(f"x_{i}", dist.Bernoulli(logits=torch.zeros(()))) for i in range(self.sites)]
        for which, name in enumerate(("early", "late")):
            pyro.factor(name, -self.price(which, values))

    def gradient(self) -> Tensor:
        """The exact gradient, in float64."""
        logits = self.net.logits.detach().double().requires_grad_()
        states = torch.tensor(list(itertools.product((0.0, 1.0), repeat=self.sites)), dtype=torch.float64)
        values = list(states.unbind(-1))
        log_q = torch.zeros(len(states), dtype=torch.float64)
        for i, value in enumerate(values):
            log_q = log_q + logsigmoid((2 * value - 1) * self.logit(logits, i, values))
        cost = sum(self.price(which, values) for which in (0, 1)) + log_q
        return flat(torch.autograd.grad((log_q.exp() * cost).sum(), logits))


def checkpoint(dag: Dag, elbo: TraceBackpropQ_ELBO, size: Size) -> Row:
    """Freezes guide and critics and measures everybody."""
    exact = dag.gradient()

    def step_of(rival: ELBO) -> Callable[[], object]:
        return lambda: rival.loss_and_grads(dag.model, dag.guide)

    learning = step_of(copy.deepcopy(elbo))
    number, own_time, rival_time = fitting(learning, lambda particles: step_of(PlainLeaveOneOut(particles, 0)))
    ours = Error.of(dag, exact, step_of(copy.deepcopy(elbo).eval()), size.repeats)
    plain = Error.of(dag, exact, step_of(PlainLeaveOneOut(number, 0)), size.repeats)
    score = TraceBackpropQ_ELBO(number, estimator=ScoreFunction(LeaveOneOut()), critic=None, **VECTORIZED)
    score_mse = equal_time(dag, exact, step_of(score), learning, size)
    dag.is_averaged = True
    average = TraceGraph_ELBO(PARTICLES, **VECTORIZED)
    for _ in range(10):
        gradient_of(dag, step_of(average))
    average_mse = equal_time(dag, exact, step_of(average), learning, size)
    dag.is_averaged = False
    return {
        "squared_gradient": float(exact @ exact),
        "ms": 1e3 * own_time,
        "variance": ours.variance,
        "z": ours.z,
        "mse": ours.mse,
        "plain_particles": number,
        "plain_mse": plain.mse * rival_time / own_time,
        "score_mse": score_mse,
        "tracegraph_mse": average_mse,
    }


def train(sites: int, seed: int, size: Size) -> list[Row]:
    """Trains guide and critics together, with ten checkpoints."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    dag = Dag(sites, seed)
    elbo = TraceBackpropQ_ELBO(OURS, **VECTORIZED)
    optimizer = torch.optim.Adam(dag.net.parameters(), lr=LEARNING_RATE)
    return [
        {"sites": sites, "seed": seed, "checkpoint": at, **checkpoint(dag, elbo, size)}
        for at in checkpoints(dag, elbo, optimizer, size.steps, f"{sites} sites, seed {seed}")
    ]


RIVALS = {
    "plain_mse": "lean leave-one-out",
    "score_mse": "ScoreFunction(LeaveOneOut())",
    "tracegraph_mse": "TraceGraph, decaying average",
}


def summary(rows: list[Row]) -> list[Row]:
    """One row per number of sites; median and quartiles over seeds."""
    found = []
    for sites in dict.fromkeys(row["sites"] for row in rows):
        mine = [row for row in rows if row["sites"] == sites]
        runs = [[row for row in mine if row["seed"] == seed] for seed in dict.fromkeys(row["seed"] for row in mine)]
        gains = {f"gain over {text}": quartiles(gain(run, name) for run in runs) for name, text in RIVALS.items()}
        more = {
            "ms": mean(mine, "ms"),
            "mean z": mean(mine, "z"),
            "particles of the lean": mean(mine, "plain_particles"),
        }
        found.append({"sites": sites, "seeds": len(runs), **gains, **more})
    return found


def main() -> None:
    """Measures, prints, writes ``dags.csv`` and ``dags.md``."""
    options = arguments(__doc__)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    size = FULL if options.full else QUICK
    rows = [row for n in size.sites for seed in range(options.seeds or size.seeds) for row in train(n, seed, size)]
    page = table(summary(rows))
    print(page)
    write_csv(options.output / "dags.csv", rows)
    about = (
        "Gain: error of a rival over ours at equal processor time, each averaged over ten checkpoints of "
        f"{size.steps} steps; median and quartiles over graphs. Ours: `TraceBackpropQ_ELBO({OURS}, "
        "vectorize_particles=True)`, the rest default, critics and their update on the clock. *z*: squared distance of "
        "our mean gradient from the exact one in units of its expectation, 1 if unbiased."
    )
    write_markdown(options.output / "dags.md", "Branching graphs with two costs and bypasses", (about, page))


if __name__ == "__main__":
    main()
