"""A queue in NumPy: for each of 50 customers a slow or a fast server, in 64 episodes at once.

Waiting costs, and so does the fast server. Prints the mean cost of an episode.
"""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_bpq import ExpectedCost, cost, external

EPISODES, CUSTOMERS = 64, 50


class Queue:
    """Waiting times ``(episodes,)`` by Lindley's equation."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def open(self) -> np.ndarray:
        self.wait = np.zeros(EPISODES)
        return self.wait

    def serve(self, fast: Tensor) -> tuple[np.ndarray, np.ndarray]:
        costs = self.wait + 0.8 * fast.numpy()
        service = self.random.exponential(np.where(fast.numpy() > 0, 0.5, 1.1))
        self.wait = np.maximum(self.wait + service - self.random.exponential(1.0, EPISODES), 0.0)
        return self.wait, costs


class Policy(nn.Module):
    """The speed from the waiting time and the customers that are still to come."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        queue = Queue(seed)
        self.open, self.serve = external(queue.open), external(queue.serve)

    def forward(self) -> None:
        pyro.module("policy", self)
        with pyro.plate("episodes", EPISODES):
            wait = self.open()
            for n in range(CUSTOMERS):
                seen = torch.stack([wait, torch.full((EPISODES,), n / CUSTOMERS)], 1)
                fast = pyro.sample(f"fast_{n}", dist.Bernoulli(logits=self.net(seen).squeeze(-1)))
                wait, costs = self.serve(fast)
                cost(f"cost_{n}", costs)


def main(steps: int = 50) -> None:
    torch.manual_seed(0)
    svi = SVI(None, Policy(), Adam({"lr": 0.01}), loss=ExpectedCost())
    losses = [svi.step() / EPISODES for _ in range(steps)]
    print(f"mean cost of the last ten steps: {sum(losses[-10:]) / 10:.1f}")


if __name__ == "__main__":
    main()
