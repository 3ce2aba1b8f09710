"""How critics are trained on a chain with one black-box cost at its end: gradient error by learner options.

One particle, 8 sites of 4 states, no extra runs of the model. Prints for each set of options the mean squared error of
the gradient (exact by dynamic programming) after 60 and 120 steps, the exact loss, and seconds.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import RESULTS, machine, progress, table, write_csv, write_markdown
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_bpq import AllAction, CriticLearner, MLPCritic, Replay, SlowTracking, TraceBackpropQ_ELBO

SITES, STATES, STEPS, DRAWS = 8, 4, (60, 120), 60

_CRITIC = MLPCritic()
REPLAY, SLOW = Replay(capacity=64, batch_size=4), SlowTracking(0.05)
OPTIONS: dict[str, dict[str, Any]] = {
    "no critic": {"critic": None},
    "default": {},
    "lr 0.1": {"lr": 0.1},
    "lr 0.03": {"lr": 0.03},
    "lr 0.01": {"lr": 0.01},
    "lr 0.1, slow 0.05": {"lr": 0.1, "slow": SLOW},
    "lr 0.1, slow 0.01": {"lr": 0.1, "slow": SlowTracking(0.01)},
    "lr 0.03, slow 0.05": {"lr": 0.03, "slow": SLOW},
    "lr 0.03, 3 steps": {"lr": 0.03, "steps": 3},
    "lr 0.03, lam 1 to 0.7": {"lr": 0.03, "lam": lambda step: max(0.7, 1.0 - step / 100)},
    "lr 0.03, warm-up 60": {"lr": 0.03, "warm_up": 60},
    "lr 0.03, replay of 1": {"lr": 0.03, "replay": Replay(capacity=64, batch_size=1)},
    "lr 0.03, replay of 4": {"lr": 0.03, "replay": REPLAY},
    "lr 0.03, replay of 4, slow 0.05": {"lr": 0.03, "replay": REPLAY, "slow": SLOW},
}


class Chain:
    """A guide with random transitions, uniform priors, and a cost of the last state."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.start = 1.5 * torch.randn(SITES, STATES, STATES, generator=generator)
        self.cost = 3.0 * torch.randn(STATES, generator=generator)

    def model(self) -> None:
        z = torch.tensor(0)
        for t in range(SITES):
            z = pyro.sample(f"z{t}", dist.Categorical(logits=torch.zeros(STATES)))
        pyro.factor("cost", -self.cost[z])

    def guide(self) -> None:
        shift, z = pyro.param("shift", torch.zeros(SITES, STATES, STATES)), torch.tensor(0)
        for t in range(SITES):
            z = pyro.sample(f"z{t}", dist.Categorical(logits=self.start[t, z] + shift[t, z]))

    def loss(self) -> torch.Tensor:
        """The exact loss, by dynamic programming."""
        value = self.cost
        for t in reversed(range(SITES)):
            log_q = (self.start[t] + pyro.param("shift")[t]).log_softmax(-1)
            value = (log_q.exp() * (log_q + math.log(STATES) + value)).sum(-1)
        return value[0]


def gradient_error(chain: Chain, elbo: TraceBackpropQ_ELBO) -> float:
    elbo.eval()
    shift = pyro.param("shift")
    (exact,) = torch.autograd.grad(chain.loss(), shift)
    errors = []
    for _ in range(DRAWS):
        shift.grad = None
        elbo.loss_and_grads(chain.model, chain.guide)
        errors.append(float((shift.grad - exact).square().sum()))
    shift.grad = None
    elbo.train()
    return sum(errors) / len(errors)


def trial(
    seed: int, lam: Any = 0.9, warm_up: int = 0, critic: Any = _CRITIC, **learner: Any
) -> tuple[list[float], float, float]:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    chain = Chain()
    elbo = TraceBackpropQ_ELBO(
        seed=seed, lam=lam, critic=critic, learner=CriticLearner(**learner), estimator=AllAction(exact=False)
    )
    start = time.perf_counter()
    if warm_up:
        elbo.warm_up(chain.model, chain.guide, steps=warm_up)
    svi = SVI(chain.model, chain.guide, Adam({"lr": 0.03}), elbo)
    errors, seconds = [], 0.0
    for step in range(1, STEPS[-1] + 1):
        svi.step()
        if step in STEPS:
            seconds += time.perf_counter() - start
            errors.append(gradient_error(chain, elbo))
            start = time.perf_counter()
    return errors, float(chain.loss().detach()), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="five seeds instead of two")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    seeds = 5 if chosen.full else 2
    torch.set_default_dtype(torch.float64)
    rows = []
    for name in progress(list(OPTIONS), "learners"):
        trials = [trial(seed, **OPTIONS[name]) for seed in range(seeds)]
        errors = [sum(t[0][i] for t in trials) / seeds for i in range(len(STEPS))]
        loss, seconds = (sum(t[i] for t in trials) / seeds for i in (1, 2))
        named = {f"error, {step} steps": f"{error:.3g}" for step, error in zip(STEPS, errors, strict=True)}
        rows.append({"learner": name, **named, "exact loss": f"{loss:.3f}", "seconds": f"{seconds:.1f}"})
    write_csv(chosen.output / "schedules.csv", rows)
    text = f"Mean of {seeds} seeds; squared error of the gradient, exact loss in nats. {machine()}"
    write_markdown(chosen.output / "schedules.md", "Options of the critics' learner", [text, table(rows)])
    print(table(rows))


if __name__ == "__main__":
    main()
