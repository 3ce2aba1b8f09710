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

from pyro_bpq import ExpectedCost, LambdaReturn, MLPCritic, cost, external

# One critic for all customers.
SHARED = {"bpq": {"share": "fast", "critic": MLPCritic()}}
EPISODES, CUSTOMERS = 64, 50


class Queue:
    """Waiting times ``(episodes,)`` by Lindley's equation."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def open(self) -> np.ndarray:
        """Nobody waits."""
        self.wait = np.zeros(EPISODES)
        return self.wait

    def serve(self, fast: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Serves a customer; the waiting times of the next one, and the costs of this one."""
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
        """Fifty customers."""
        pyro.module("policy", self)
        with pyro.plate("episodes", EPISODES):
            wait = self.open()
            for n in range(CUSTOMERS):
                seen = torch.stack([wait, torch.full((EPISODES,), n / CUSTOMERS)], 1)
                law = dist.Bernoulli(logits=self.net(seen).squeeze(-1))
                fast = pyro.sample(f"fast_{n}", law, infer=SHARED)
                wait, costs = self.serve(fast)
                cost(f"cost_{n}", costs)


def main(steps: int = 10) -> None:
    torch.manual_seed(0)
    # Biased by the critic's errors, with a fraction of the variance; ExpectedCost() is unbiased.
    loss = ExpectedCost(estimator=LambdaReturn(lam=0.8), window=1)
    svi = SVI(None, Policy(), Adam({"lr": 0.01}), loss=loss)
    losses = [svi.step() / EPISODES for _ in range(steps)]
    print(f"mean cost of the last ten steps: {sum(losses[-10:]) / 10:.1f}")


if __name__ == "__main__":
    main()
