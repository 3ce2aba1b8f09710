"""A reaction network by Gillespie's algorithm in NumPy: a dose before each of ten runs of 20 events, 64 cells at once.

A gene makes messengers, which make proteins; both decay. The dose sets how fast the gene is read. What counts is how
far the number of proteins is from a target after 200 events. Prints the mean cost of a cell.
"""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_bpq import ExpectedCost, LambdaReturn, MLPCritic, cost, external

# One critic for all doses.
SHARED = {"bpq": {"share": "dose", "critic": MLPCritic()}}
EPISODES, DOSES, EVENTS, TARGET = 64, 10, 20, 30.0
RATES = np.array([0.5, 2.0, 4.0, 8.0])


class Cells:
    """Numbers of messengers and proteins, ``(cells, 2)``, and the time."""

    changes = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]])

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def start(self) -> np.ndarray:
        """Empty cells."""
        self.numbers, self.time = np.zeros((EPISODES, 2)), np.zeros(EPISODES)
        return self.seen()

    def seen(self) -> np.ndarray:
        """Numbers and times, ``(cells, 3)``."""
        return np.column_stack([self.numbers, self.time])

    def events(self, dose: Tensor) -> np.ndarray:
        """The next events under a dose; what is seen after them."""
        for _ in range(EVENTS):
            rates = np.column_stack([RATES[dose.numpy()], self.numbers @ np.diag([1.0, 0.1])])
            rates = np.insert(rates, 2, 2.0 * self.numbers[:, 0], 1).cumsum(1)
            self.time += self.random.exponential(1.0 / rates[:, -1])
            chosen = (rates < rates[:, -1:] * self.random.random((EPISODES, 1))).sum(1)
            self.numbers = self.numbers + self.changes[chosen]
        return self.seen()

    def distance(self) -> np.ndarray:
        """How far the proteins are from the target."""
        return np.abs(self.numbers[:, 1] - TARGET)


class Policy(nn.Module):
    """The dose from what is seen of a cell."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, len(RATES)))
        cells = Cells(seed)
        self.start, self.events, self.distance = external(cells.start), external(cells.events), external(cells.distance)

    def forward(self) -> None:
        """Ten doses."""
        pyro.module("policy", self)
        with pyro.plate("cells", EPISODES):
            seen = self.start()
            for n in range(DOSES):
                scaled = seen / torch.tensor([5.0, 30.0, 10.0])
                logits = self.net(torch.cat([scaled, torch.full((EPISODES, 1), n / DOSES)], 1))
                seen = self.events(pyro.sample(f"dose_{n}", dist.Categorical(logits=logits), infer=SHARED))
            cost("distance", self.distance())


def main(steps: int = 20) -> None:
    torch.manual_seed(0)
    # Biased by the critic's errors, with a fraction of the variance; ExpectedCost() is unbiased.
    loss = ExpectedCost(estimator=LambdaReturn(lam=0.8), window=1)
    svi = SVI(None, Policy(), Adam({"lr": 0.01}), loss=loss)
    losses = [svi.step() / EPISODES for _ in range(steps)]
    print(f"mean cost of the last ten steps: {sum(losses[-10:]) / 10:.1f}")


if __name__ == "__main__":
    main()
