"""A variational autoencoder whose code is 20 bits: no relaxation, no temperature. Data: 8x8 digits."""

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits
from torch import Tensor

BITS, LR = 20, 0.01


def data() -> tuple[Tensor, ...]:
    images = torch.tensor(load_digits().data[:200], dtype=torch.float32)
    return ((images > 7.5).float(),)


def layer(name: str, size: int, out: int, x: Tensor) -> Tensor:
    weight = pyro.param(f"{name} weight", lambda: torch.randn(size, out) / size**0.5)
    return x @ weight + pyro.param(f"{name} bias", torch.zeros(out))


def model(images: Tensor) -> None:
    prior = pyro.param("prior", torch.zeros(BITS))
    with pyro.plate("images", len(images)):
        z = pyro.sample("z", dist.Bernoulli(logits=prior).expand([len(images), BITS]).to_event(1))
        pyro.sample("x", dist.Bernoulli(logits=layer("decoder", BITS, 64, 2 * z - 1)).to_event(1), obs=images)


def guide(images: Tensor) -> None:
    with pyro.plate("images", len(images)):
        pyro.sample("z", dist.Bernoulli(logits=layer("encoder", 64, BITS, 2 * images - 1)).to_event(1))
