"""Hard attention: look at two 4x4 windows of a digit, one after the other, and say which digit it is."""

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits
from torch import Tensor

PLACES, LR = 9, 0.02


def data() -> tuple[Tensor, ...]:
    digits = load_digits()
    images = torch.tensor(digits.images[:300] / 16.0, dtype=torch.float32)
    windows = images.unfold(1, 4, 2).unfold(2, 4, 2).reshape(len(images), PLACES, 16)
    return windows, images.reshape(-1, 64), torch.tensor(digits.target[:300])


def look(windows: Tensor, place: Tensor) -> Tensor:
    return windows[torch.arange(len(windows)), place]


def model(windows: Tensor, images: Tensor, labels: Tensor) -> None:
    says = pyro.param("says", lambda: 0.1 * torch.randn(2, 16, 10))
    where = pyro.param("where", torch.zeros(2, PLACES, 10))
    with pyro.plate("digits", len(labels)):
        first = pyro.sample("first", dist.Categorical(torch.ones(PLACES)))
        second = pyro.sample("second", dist.Categorical(torch.ones(PLACES)))
        seen = look(windows, first) @ says[0] + look(windows, second) @ says[1]
        logits = seen + where[0][first] + where[1][second]
        pyro.sample("label", dist.Categorical(logits=logits), obs=labels)


def guide(windows: Tensor, images: Tensor, labels: Tensor) -> None:
    looks = pyro.param("looks", lambda: 0.1 * torch.randn(10, PLACES))
    goes = pyro.param("goes", lambda: 0.1 * torch.randn(16, PLACES))
    with pyro.plate("digits", len(labels)):
        first = pyro.sample("first", dist.Categorical(logits=looks[labels]))
        pyro.sample("second", dist.Categorical(logits=looks[labels] + look(windows, first) @ goes))
