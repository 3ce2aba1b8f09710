r"""Black-box costs of Normal sites: calls of the cost until the level at which the best score function ended.

``throw``: angle and speed of a throw, given distance and wind; the landing is measured in half metres. ``orders``: how
much to order of three goods, given forecasts; whole units, random demand. Both costs are numpy functions, piecewise
constant in the action.

Everyone trains the same Pyro program on the same batches with Adam; each method has the best learning rate of one grid.
Score functions: leave-one-out with 2, 4 and 8 samples for each row, and a learned value of the context as baseline. The
goal is the best final level among these. PPO stands beside them. *Q(z)*: critics fitted to all costs paid so far; the
policy follows ``dQ/dz`` on new inputs, which is biased. *Q(z), unbiased*: ``LAXQ`` alone, a step for each rollout.
Calls are counted as in ``blackbox.py``.

    python benchmarks/blackbox_normal.py [--full] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from blackbox import (
    BATCH,
    HIDDEN,
    PPO,
    LeaveOneOut,
    Method,
    NeuralBaseline,
    Policy,
    chosen,
    reach,
    smooth,
    train,
)
from blackbox import Ours as StoredCosts
from common import Row, arguments, median, read_csv, table, write_csv, write_markdown
from torch import Tensor, nn

from pyro_bpq import CriticLearner, ExpectedCost, Replay, ValueCritic, cost
from pyro_bpq.estimators import LAXQ, QPathwise

GRID = (3e-3, 1e-2, 3e-2)
SCORE_FUNCTIONS = ("leave-one-out", "neural baseline")
Q, UNBIASED = "Q(z)", "Q(z), unbiased"


# Costs: numpy in, numpy out.


def miss(action: Tensor, given: Tensor) -> np.ndarray:
    """Distance of the measured landing from the target in quarters of a metre, and a price of whole metres a second."""
    z, (distance, wind) = action.detach().numpy(), given.movedim(-1, 0).numpy()
    angle, speed = np.radians(45.0 + 20.0 * z[..., 0]), np.maximum(10.0 + 3.0 * z[..., 1], 0.0)
    time = np.maximum(2.0 * speed * np.sin(angle) / 9.81, 0.0)
    landing = np.round(2.0 * (speed * np.cos(angle) * time + 0.5 * wind * time**2)) / 2.0
    error = np.minimum(np.abs(landing - (10.0 + 4.0 * distance)), 10.0)
    return (np.floor(4.0 * error) / 4.0 + 0.1 * np.floor(speed)).astype(np.float32)


class Shop:
    """Three goods with Poisson demand.

    Args:
        seed: Seed of the demand.
    """

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def __call__(self, action: Tensor, given: Tensor) -> np.ndarray:
        """One for each unit left over, three for each that lacks, two for each order."""
        ordered = np.maximum(np.round(5.0 + 3.0 * action.detach().numpy()), 0.0)
        demand = self.random.poisson(np.broadcast_to(5.0 + 4.0 * given.numpy(), ordered.shape))
        left, lacking = np.maximum(ordered - demand, 0.0), np.maximum(demand - ordered, 0.0)
        return (left + 3.0 * lacking + 2.0 * (ordered > 0)).sum(-1).astype(np.float32)


class Continuous(Policy):
    """A Normal action for each row, from a perceptron of the context.

    Args:
        price: The cost, a function of action and context.
        inputs: Size of the context.
        outputs: Size of the action.
    """

    entropy, decay, warm_up, rounds, replayed, critic_lr = 0.05, 0.97, 4, 4, 4, 1e-2

    def __init__(self, price: Callable[[Tensor, Tensor], Any], inputs: int, outputs: int) -> None:
        super().__init__()
        self.price, self.inputs = price, inputs
        self.net = nn.Sequential(nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs))
        self.log_scale = nn.Parameter(torch.full((outputs,), -0.7))
        self.estimator: Any = QPathwise()

    def batch(self, generator: torch.Generator, size: int) -> tuple[Tensor]:
        return (2.0 * torch.rand(size, self.inputs, generator=generator) - 1.0,)

    def forward(self, given: Tensor) -> None:
        loc = self.net(given)
        options = {"context": given, "estimator": self.estimator}
        with pyro.plate("rows", len(given), dim=-1):
            fn = dist.Normal(loc, self.log_scale.exp().expand_as(loc)).to_event(1)
            cost("price", self.price, pyro.sample("action", fn, infer={"bpq": options}), given)


class Ours(StoredCosts):
    """Critics of the action, from all costs paid so far; the policy follows their slope, and calls no cost for it."""

    def objective(self, policy: Any) -> ExpectedCost:
        """The loss with its critics."""
        replay = Replay(10_000, policy.replayed, updates_per_step=0, costs="stored")
        learner = CriticLearner(lr=policy.critic_lr, optimizer=torch.optim.Adam, replay=replay)
        return ExpectedCost(critic=ValueCritic((64, 64)), learner=learner)

    def draw(self) -> list[Tensor]:
        """New inputs."""
        return list(self.policy.batch(self.generator, self.inputs * BATCH))


class Unbiased(Method):
    """The critic as control variate of the score function, its slope through the sample."""

    def __init__(self, policy: Any, lr: float) -> None:
        super().__init__(policy, lr, 1)
        policy.estimator = LAXQ()
        learner = CriticLearner(lr=policy.critic_lr, optimizer=torch.optim.Adam)
        self.loss = ExpectedCost(critic=ValueCritic((64, 64)), learner=learner)

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        self.loss.loss_and_grads(None, self.policy, *batch)
        for parameter in self.policy.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / BATCH


def methods(rates: tuple[float, ...]) -> dict[str, list[tuple[str, Callable[[Any], Method]]]]:
    """Configurations to tune over, by method."""
    found: dict[str, list[tuple[str, Callable[[Any], Method]]]] = {}

    def add(method: str, text: str, build: Callable[[Any], Method]) -> None:
        found.setdefault(method, []).append((text, build))

    for lr in rates:
        for m in (2, 4, 8):
            add("leave-one-out", f"lr={lr}, M={m}", lambda p, lr=lr, m=m: LeaveOneOut(p, lr, m))
        add("neural baseline", f"lr={lr}", lambda p, lr=lr: NeuralBaseline(p, lr, 1))
        for h in (0.0, 0.01):
            add("PPO", f"lr={lr}, 4 epochs, entropy {h}", lambda p, lr=lr, h=h: PPO(p, lr, 1, 4, h))
        add(UNBIASED, f"lr={lr}", lambda p, lr=lr: Unbiased(p, lr))
        add(Q, f"lr={lr}", lambda p, lr=lr: Ours(p, lr))
    return found


def compare(task: str, seed: int, best: dict[str, tuple[str, list[Row]]]) -> list[Row]:
    """Calls to the best final level of the score functions, by method."""
    goal = min(smooth(best[name][1])[-1] for name in SCORE_FUNCTIONS)
    return [
        {
            "task": task,
            "seed": seed,
            "method": method,
            "best of": text,
            "final level": smooth(rows)[-1],
            "calls": rows[-1]["calls"],
            "goal": goal,
            "calls to goal": reach(rows, goal, "calls"),
            "seconds to goal": reach(rows, goal, "seconds"),
        }
        for method, (text, rows) in best.items()
    ]


def main() -> None:
    """Measures, prints, writes ``blackbox_normal.csv`` and ``blackbox_normal.md``."""
    options = arguments(__doc__, resumes=True)
    warnings.filterwarnings("ignore", module="pyro")
    pyro.enable_validation(False)
    path = options.output / "blackbox_normal.csv"
    budget, share = (64 if options.smoke else 51_200 if options.full else 12_800), (1.0 if options.smoke else 0.25)
    rates = GRID[:1] if options.smoke else GRID
    curves: list[Row] = read_csv(path) if options.resume else []
    for seed in range(options.seeds or (1 if options.smoke else 3)):
        tasks = {"throw": lambda: Continuous(miss, 2, 2), "orders": lambda s=seed: Continuous(Shop(s), 3, 3)}
        for task, make in tasks.items():
            for method, choices in methods(rates).items() if task.startswith(options.only) else ():
                for text, build in choices:
                    key: Row = {"task": task, "seed": seed, "method": method, "options": text}
                    if any(row.items() >= key.items() for row in curves):
                        continue
                    # Ours is stopped early; a curve that has not come to the goal by then counts as infinite.
                    allowed = int(share * budget) if method == Q else budget
                    curves += [key | r for r in train(make, build, seed, allowed, f"{task}: {method} {text}")]
                    write_csv(path, curves)
    report(options.output, curves, budget, share, rates)


def report(output: Any, curves: list[Row], budget: int, share: float, rates: tuple[float, ...]) -> None:
    """Prints and writes the tables."""
    results = []
    for task, seed in dict.fromkeys((row["task"], row["seed"]) for row in curves):
        results += compare(task, seed, chosen([row for row in curves if (row["task"], row["seed"]) == (task, seed)]))
    print(table(results), flush=True)
    gains = [gain(task, results) for task in dict.fromkeys(row["task"] for row in results)]
    print(table(gains))
    text = (
        "Calls of the cost, each for one row and one sample, until the level (mean cost on held-out rows, three "
        "measurements averaged) is that at which the best score function ended. Every call made in training counts. "
        f"Each method with the best of the learning rates {rates}, leave-one-out also of 2, 4 and 8 samples for each "
        f"row, PPO of the entropies 0 and 0.01. Score functions and PPO are given {budget} calls. {Q}: stored costs, "
        f"`ValueCritic`, `QPathwise` on new inputs (biased); it is stopped after {share:g} of the calls. {UNBIASED}: "
        "`LAXQ`, no replay. In the first table the median over seeds of the calls of the best score function over "
        "those of the method; 0 is never."
    )
    write_markdown(
        output / "blackbox_normal.md", "Black-box costs of Normal sites", [text, table(gains), table(results)]
    )


def gain(task: str, results: list[Row]) -> Row:
    """How many times as many calls the best score function takes, by method."""
    rows = [row for row in results if row["task"] == task]
    entry: Row = {"task": task, "seeds": len({row["seed"] for row in rows})}
    for method in ("PPO", UNBIASED, Q):
        ratios = []
        for seed in dict.fromkeys(row["seed"] for row in rows):
            calls = {row["method"]: row["calls to goal"] for row in rows if row["seed"] == seed}
            ratios.append(min(calls[name] for name in SCORE_FUNCTIONS) / calls[method])
        entry[f"calls: best score function over {method}"] = median(ratios)
    return entry


if __name__ == "__main__":
    main()
