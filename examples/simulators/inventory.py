"""A warehouse in NumPy: how many of three products to order on each of ten days, in 64 episodes at once.

An order arrives on the next day. Demand that is not met is lost. What lies in the store costs, and the store has a
limit for all products together. Prints the mean cost of an episode.
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

# One critic for all days.
SHARED = {"bpq": {"share": "order", "critic": MLPCritic()}}
EPISODES, DAYS, PRODUCTS, MOST = 64, 10, 3, 8


class Warehouse:
    """Stocks ``(episodes, products)``, and what a day costs."""

    demand, lost = np.array([2.0, 3.0, 4.0]), np.array([6.0, 4.0, 3.0])

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def open(self) -> np.ndarray:
        """The stocks of the first day."""
        self.stock = self.random.integers(0, 10, (EPISODES, PRODUCTS)).astype(float)
        return self.stock

    def day(self, order: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Sells, takes delivery, and pays; the new stocks, and the costs of each episode."""
        demand = self.random.poisson(self.demand, self.stock.shape)
        missed = np.maximum(demand - self.stock, 0.0) @ self.lost
        self.stock = np.maximum(self.stock - demand, 0.0) + order.numpy()
        over = np.maximum(self.stock.sum(1) - 20.0, 0.0)
        costs = missed + 0.5 * self.stock.sum(1) + 4.0 * over + 2.0 * (order.numpy() > 0).sum(1)
        return self.stock, costs


class Policy(nn.Module):
    """Orders from stocks and the day."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(PRODUCTS + 1, 32), nn.Tanh(), nn.Linear(32, PRODUCTS * MOST))
        warehouse = Warehouse(seed)
        self.open, self.day = external(warehouse.open), external(warehouse.day)

    def forward(self) -> None:
        """Ten days."""
        pyro.module("policy", self)
        with pyro.plate("episodes", EPISODES):
            stock = self.open()
            for day in range(DAYS):
                seen = torch.cat([stock / 10.0, torch.full((EPISODES, 1), day / DAYS)], 1)
                logits = self.net(seen).reshape(EPISODES, PRODUCTS, MOST)
                order = pyro.sample(f"order_{day}", dist.Categorical(logits=logits).to_event(1), infer=SHARED)
                stock, costs = self.day(order)
                cost(f"cost_{day}", costs)


def main(steps: int = 30) -> None:
    torch.manual_seed(0)
    # Biased by the critic's errors, with a fraction of the variance; ExpectedCost() is unbiased.
    loss = ExpectedCost(estimator=LambdaReturn(lam=0.8), window=1)
    svi = SVI(None, Policy(), Adam({"lr": 0.01}), loss=loss)
    losses = [svi.step() / EPISODES for _ in range(steps)]
    print(f"mean cost of the last ten steps: {sum(losses[-10:]) / 10:.1f}")


if __name__ == "__main__":
    main()
