"""Change points: the rate of British coal mining disasters, in steps of two years from 1851, may change anywhere."""

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

COUNTS = (
    "454014340633402633545314415534252234213221111300101100310322011101010002100011023311211112420014000100000100101"
)
LR = 0.03


def data() -> tuple[Tensor, ...]:
    counts = torch.tensor([float(count) for count in COUNTS[:110]])
    return (counts.reshape(-1, 2).sum(-1),)


def model(counts: Tensor) -> None:
    rates = pyro.param("rates", torch.tensor([6.0, 2.0]), constraint=dist.constraints.positive)
    changes, state = torch.tensor([0.05, 0.95]), None
    for t, count in enumerate(counts):
        chance = torch.tensor(0.5) if state is None else changes[state]
        state = pyro.sample(f"state_{t}", dist.Bernoulli(chance)).long()
        pyro.sample(f"count_{t}", dist.Poisson(rates[state]), obs=count)


def guide(counts: Tensor) -> None:
    logits = pyro.param("logits", torch.zeros(len(counts)))
    follows = pyro.param("follows", torch.tensor([-1.0, 1.0]))
    came = torch.zeros(())
    for t in range(len(counts)):
        state = pyro.sample(f"state_{t}", dist.Bernoulli(logits=logits[t] + came))
        came = follows[state.long()]
