"""Structured prediction: the lower half of a digit from its upper half, through two layers of ten bits."""

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits
from torch import Tensor

BITS, LR = 10, 0.02


def data() -> tuple[Tensor, ...]:
    images = (torch.tensor(load_digits().data[:200], dtype=torch.float32) > 7.5).float()
    return images[:, :32], images[:, 32:]


def layer(name: str, size: int, out: int, x: Tensor) -> Tensor:
    weight = pyro.param(f"{name} weight", lambda: torch.randn(size, out) / size**0.5)
    return x @ weight + pyro.param(f"{name} bias", torch.zeros(out))


def model(upper: Tensor, lower: Tensor) -> None:
    with pyro.plate("images", len(upper)):
        a = pyro.sample("a", dist.Bernoulli(logits=layer("a", 32, BITS, 2 * upper - 1)).to_event(1))
        b = pyro.sample("b", dist.Bernoulli(logits=layer("b", BITS, BITS, 2 * a - 1)).to_event(1))
        pyro.sample("lower", dist.Bernoulli(logits=layer("x", BITS, 32, 2 * b - 1)).to_event(1), obs=lower)


def guide(upper: Tensor, lower: Tensor) -> None:
    both = 2 * torch.cat([upper, lower], -1) - 1
    with pyro.plate("images", len(upper)):
        a = pyro.sample("a", dist.Bernoulli(logits=layer("qa", 64, BITS, both)).to_event(1))
        b = torch.cat([both.expand(*a.shape[:-1], 64), 2 * a - 1], -1)
        pyro.sample("b", dist.Bernoulli(logits=layer("qb", 64 + BITS, BITS, b)).to_event(1))
