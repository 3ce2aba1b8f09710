"""A hidden Markov model: a digit is read row by row, and each row comes from one of six hidden states."""

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits
from torch import Tensor

STATES, ROWS, LR = 6, 8, 0.03


def data() -> tuple[Tensor, ...]:
    images = torch.tensor(load_digits().images[:200], dtype=torch.float32)
    return ((images > 7.5).float(),)


def model(images: Tensor) -> None:
    start = pyro.param("start", torch.zeros(STATES))
    moves = pyro.param("moves", lambda: torch.randn(STATES, STATES))
    pixels = pyro.param("pixels", lambda: torch.randn(STATES, 8))
    with pyro.plate("digits", len(images)):
        logits = start
        for t in range(ROWS):
            z = pyro.sample(f"z_{t}", dist.Categorical(logits=logits))
            pyro.sample(f"x_{t}", dist.Bernoulli(logits=pixels[z]).to_event(1), obs=images[:, t])
            logits = moves[z]


def guide(images: Tensor) -> None:
    reads = pyro.param("reads", lambda: 0.1 * torch.randn(ROWS, 16, STATES))
    follows = pyro.param("follows", torch.zeros(STATES, STATES))
    with pyro.plate("digits", len(images)):
        came = torch.zeros(STATES)
        for t in range(ROWS):
            seen = torch.cat([images[:, t], images[:, min(t + 1, ROWS - 1)]], -1)
            z = pyro.sample(f"z_{t}", dist.Categorical(logits=seen @ reads[t] + came))
            came = follows[z]
