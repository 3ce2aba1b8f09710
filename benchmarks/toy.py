r"""Toy costs of Bernoulli variables with exact gradients: gradient error at fixed logits, and where training ends.

``(b - t)^2`` for t = 0.45, 0.49, 0.499, one variable; and a quadratic of 200 variables, ``(b - t)' A (b - t)`` with a
dense positive definite ``A`` and t = 0.499. The cost is expected over the guide and nothing else: the model's prior is
the guide's distribution, held constant, so that ``log q - log p`` is zero and so is its expected gradient.

*Error*: squared distance from the exact gradient over its squared norm, at logits along a path of exact gradient steps,
after a warm-up at these logits in which baselines and critics learn; rows of a plate are repeats.
*End*: expected cost above that of exact gradient steps (negative: below), one row, Adam with the best of a grid of
rates, medians over seeds.

    python benchmarks/toy.py [--full | --smoke] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field, replace

import pyro
import pyro.distributions as dist
import torch
from common import Row, arguments, median, progress, table, write_csv, write_markdown
from pyro.infer import TraceGraph_ELBO
from race import Method
from torch import Tensor

from pyro_bpq import LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.estimators import RELAX, DisARM


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        rows: Repeats of a gradient in a call.
        calls: Calls at each point.
        warm_up: Calls before, in which baselines and critics learn.
        steps: Training steps.
        rates: Learning rates that are tried, on the first seed.
        seeds: Number of seeds.
    """

    rows: int
    calls: int
    warm_up: int
    steps: int
    rates: tuple[float, ...]
    seeds: int


QUICK = Size(rows=50, calls=20, warm_up=50, steps=300, rates=(0.1, 0.3), seeds=1)
FULL = Size(rows=1000, calls=20, warm_up=500, steps=3000, rates=(0.01, 0.03, 0.1, 0.3), seeds=5)
SMOKE = Size(rows=4, calls=2, warm_up=2, steps=3, rates=(0.1, 0.3), seeds=2)


@dataclass(frozen=True)
class Quadratic:
    """``(b - t)' A (b - t)`` of independent Bernoulli variables.

    Args:
        name: Name in tables.
        matrix: ``A``, symmetric.
        target: ``t``.
        baseline: Pyro's baseline options at the site.
    """

    name: str
    matrix: Tensor
    target: float
    baseline: dict[str, object] = field(default_factory=dict)

    @property
    def start(self) -> Tensor:
        """Even odds; for many variables, where these are a saddle, something near."""
        size = len(self.matrix)
        return 0.5 * torch.randn(size, generator=torch.Generator().manual_seed(1)) * float(size > 1)

    def cost(self, b: Tensor) -> Tensor:
        """The cost of values ``(..., D)``."""
        centred = b - self.target
        return ((centred @ self.matrix) * centred).sum(-1)

    def expected(self, logits: Tensor) -> Tensor:
        """Its expectation: that of the means, and the variances."""
        p = logits.sigmoid()
        return self.cost(p) + (self.matrix.diagonal() * p * (1.0 - p)).sum(-1)

    def gradient(self, logits: Tensor) -> Tensor:
        """The exact gradient."""
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(self.expected(leaf).sum(), leaf)[0]

    def path(self, steps: int, rate: float) -> list[Tensor]:
        """Logits at the start, halfway and at the end of Adam with exact gradients."""
        leaf = self.start.requires_grad_()
        optimizer, found = torch.optim.Adam([leaf], lr=rate), [leaf.detach().clone()]
        for step in range(1, steps + 1):
            leaf.grad = self.gradient(leaf)
            optimizer.step()
            if step in (steps // 2, steps):
                found.append(leaf.detach().clone())
        return found

    def guide(self, logits: Tensor) -> None:
        """The variables."""
        with pyro.plate("rows", len(logits), dim=-1):
            pyro.sample("b", dist.Bernoulli(logits=logits).to_event(1), infer={"baseline": self.baseline})

    def model(self, logits: Tensor) -> None:
        """The same distribution, held constant, and the cost."""
        with pyro.plate("rows", len(logits), dim=-1):
            b = pyro.sample("b", dist.Bernoulli(logits=logits.detach()).to_event(1))
            pyro.factor("cost", -self.cost(b))


def quadratics() -> list[Quadratic]:
    """The four costs."""
    root = torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    found = [Quadratic(f"(b - {t})^2", torch.ones(1, 1), t) for t in (0.45, 0.49, 0.499)]
    return [*found, Quadratic("200 variables", root @ root.T / 200.0, 0.499)]


def leave_one_out(particles: int) -> Method:
    """Leave-one-out with so many samples."""
    options = {"vectorize_particles": True, "max_plate_nesting": 1, "critic": None}
    score = ScoreFunction(LeaveOneOut())
    return Method(f"leave-one-out, {particles}", lambda: TraceBackpropQ_ELBO(particles, estimator=score, **options))


def plain(estimator: object) -> TraceBackpropQ_ELBO:
    """An estimator without critics."""
    return TraceBackpropQ_ELBO(estimator=estimator, critic=None)


METHODS = (
    Method("default", TraceBackpropQ_ELBO),
    *(leave_one_out(particles) for particles in (2, 4, 8, 16)),
    Method("DisARM", lambda: plain(DisARM())),
    Method("RELAX", lambda: plain(RELAX(uses_cost=True))),
    Method("TraceGraph", TraceGraph_ELBO, "average"),
)
AVERAGE = {"use_decaying_avg_baseline": True, "baseline_beta": 0.9}


def draw(problem: Quadratic, elbo: object, logits: Tensor) -> Tensor:
    """The gradient of every row, ``(rows, D)``."""
    leaf = logits.clone().requires_grad_()
    elbo.loss_and_grads(problem.model, problem.guide, leaf)
    return leaf.grad


def error(problem: Quadratic, method: Method, logits: Tensor, size: Size) -> tuple[float, float]:
    """Squared error over the squared gradient, and the squared distance of the mean in units of its expectation."""
    pyro.clear_param_store()
    elbo, exact = method.elbo(), problem.gradient(logits)
    many = logits.expand(size.rows, -1)
    for _ in range(size.warm_up):
        draw(problem, elbo, many)
    if isinstance(elbo, TraceBackpropQ_ELBO):
        elbo.eval()
    found = torch.cat([draw(problem, elbo, many) for _ in range(size.calls)]).double()
    variance = found.var(0).sum()
    distance = (found.mean(0) - exact).square().sum()
    square = exact.square().sum()
    # An exact estimator leaves rounding only.
    z = float(distance * len(found) / variance) if variance > 1e-10 * square else float("nan")
    return float((found - exact).square().sum(-1).mean() / square), z


def end(problem: Quadratic, method: Method, rate: float, seed: int, steps: int) -> tuple[float, float]:
    """Expected cost after training, and CPU milliseconds of a step."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    elbo, leaf = method.elbo(), problem.start.unsqueeze(0).requires_grad_()
    optimizer, start = torch.optim.Adam([leaf], lr=rate), time.process_time()
    for _ in range(steps):
        optimizer.zero_grad()
        elbo.loss_and_grads(problem.model, problem.guide, leaf)
        optimizer.step()
    return float(problem.expected(leaf.detach())), 1e3 * (time.process_time() - start) / steps


def measure(problem: Quadratic, method: Method, size: Size) -> Row:
    """Both figures of a method."""
    # Only for TraceGraph: ours would take Pyro's options for a choice of the site.
    problem = replace(problem, baseline=AVERAGE) if method.program == "average" else problem
    points = [error(problem, method, logits, size) for logits in problem.path(100, 0.03)]
    tried = {rate: end(problem, method, rate, 0, size.steps) for rate in size.rates}
    rate = min(tried, key=lambda rate: tried[rate][0])
    ends = [tried[rate], *(end(problem, method, rate, seed, size.steps) for seed in range(1, size.seeds))]
    best = min(float(problem.expected(problem.path(size.steps, rate)[-1])) for rate in size.rates)
    names = ("start", "half", "end")
    return {
        "cost": problem.name,
        "method": method.name,
        **{f"error, {name}": value for name, (value, _) in zip(names, points, strict=True)},
        **{f"z, {name}": value for name, (_, value) in zip(names, points, strict=True)},
        "end": median(value for value, _ in ends) - best,
        "rate": rate,
        "ms a step": median(ms for _, ms in ends),
    }


def main() -> None:
    """Measures, prints, writes ``toy.csv`` and ``toy.md``."""
    options = arguments(__doc__)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="pyro")
    size = FULL if options.full else SMOKE if options.smoke else QUICK
    size = replace(size, seeds=options.seeds or size.seeds)
    pairs = [(problem, method) for problem in quadratics() for method in METHODS]
    rows = [measure(problem, method, size) for problem, method in progress(pairs, "costs and methods")]
    write_csv(options.output / "toy.csv", rows)
    text = (
        "`error`: squared distance from the exact gradient over its squared norm, at three points of a path of exact "
        f"gradient steps ({size.rows * size.calls} gradients each); `z`: squared distance of their mean in units of "
        "its expectation, 1 if unbiased, no number where there is no noise. `end`: expected cost after "
        f"{size.steps} steps of Adam, above that of exact gradients; rate the best of {size.rates}, median "
        f"of {size.seeds} seed(s). TraceGraph has its decaying-average baseline."
    )
    write_markdown(options.output / "toy.md", "Toy costs", [text, table(rows)])
    print(table(rows))


if __name__ == "__main__":
    main()
