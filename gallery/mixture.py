"""A mixture of Gaussians: which of three kinds is each iris flower? The guide reads the flower."""

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_iris
from torch import Tensor

KINDS, LR = 3, 0.02


def data() -> tuple[Tensor, ...]:
    x = torch.tensor(load_iris().data, dtype=torch.float32)
    return ((x - x.mean(0)) / x.std(0),)


def model(x: Tensor) -> None:
    weights = pyro.param("weights", torch.zeros(KINDS))
    means = pyro.param("means", lambda: 0.5 * torch.randn(KINDS, 4))
    scales = pyro.param("scales", torch.ones(KINDS, 4), constraint=dist.constraints.positive)
    with pyro.plate("flowers", len(x)):
        kind = pyro.sample("kind", dist.Categorical(logits=weights))
        pyro.sample("x", dist.Normal(means[kind], scales[kind]).to_event(1), obs=x)


def guide(x: Tensor) -> None:
    slopes = pyro.param("slopes", lambda: 0.1 * torch.randn(4, KINDS))
    offset = pyro.param("offset", torch.zeros(KINDS))
    with pyro.plate("flowers", len(x)):
        pyro.sample("kind", dist.Categorical(logits=x @ slopes + offset))
