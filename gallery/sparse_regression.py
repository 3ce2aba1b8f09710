"""Sparse regression: which of ten measurements foretell diabetes? Each has a switch, on or off (a spike)."""

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor

LR, positive = 0.02, dist.constraints.positive


def data() -> tuple[Tensor, ...]:
    found = load_diabetes()
    x, y = torch.tensor(found.data, dtype=torch.float32), torch.tensor(found.target, dtype=torch.float32)
    return x / x.std(0), (y - y.mean()) / y.std()


def model(x: Tensor, y: Tensor) -> None:
    noise = pyro.param("noise", torch.tensor(1.0), constraint=positive)
    with pyro.plate("measurements", 10):
        switch = pyro.sample("switch", dist.Bernoulli(0.2))
        slope = pyro.sample("slope", dist.Normal(0.0, 0.5))
    mean = x @ (switch * slope).unsqueeze(-1)
    with pyro.plate("people", len(y)):
        pyro.sample("y", dist.Normal(mean.squeeze(-1), noise), obs=y)


def guide(x: Tensor, y: Tensor) -> None:
    logits = pyro.param("logits", torch.zeros(10))
    means, scales = (
        pyro.param("means", torch.zeros(2, 10)),
        pyro.param("scales", torch.ones(2, 10), constraint=positive),
    )
    with pyro.plate("measurements", 10):
        on = pyro.sample("switch", dist.Bernoulli(logits=logits)).bool()
        pyro.sample("slope", dist.Normal(torch.where(on, means[1], means[0]), torch.where(on, scales[1], scales[0])))
