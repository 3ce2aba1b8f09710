"""Programs of a few sites and rows, as in textbooks: what a step takes is mostly Python."""

from __future__ import annotations

import random
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot


class Parts(nn.Module):
    """A program whose parameters are those of the module."""

    def start(self) -> None:
        """Registers the parameters."""
        pyro.module("programs", self)


class Bits(Parts):
    """Factors that are in or out, in rows of three numbers."""

    def __init__(self, rows: int, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        on = (torch.rand(rows, number, generator=generator) < 0.4).float()
        noise = 0.7 * torch.randn(rows, 3, generator=generator)
        self.y = 1.5 * on @ torch.randn(number, 3, generator=generator) + noise
        self.weight, self.encoder = nn.Parameter(torch.randn(number, 3)), nn.Linear(3, number)
        self.number = number

    def model(self) -> None:
        self.start()
        with pyro.plate("rows", len(self.y)):
            z = pyro.sample("z", dist.Bernoulli(0.4 * torch.ones(self.number)).to_event(1))
            pyro.sample("y", dist.Normal(z @ self.weight, 0.7).to_event(1), obs=self.y)

    def guide(self) -> None:
        self.start()
        with pyro.plate("rows", len(self.y)):
            pyro.sample("z", dist.Bernoulli(logits=self.encoder(self.y)).to_event(1))


class Network(Parts):
    """A Bayesian network of a few sites, whose laws are tables; an observation reads all of them."""

    def __init__(self, sites: int, values: int, seed: int) -> None:
        super().__init__()
        draws, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.values = values
        self.parents = [sorted(draws.sample(range(i), min(i, draws.randint(0, 2)))) for i in range(sites)]
        sizes = [[values] * (len(own) + 1) for own in self.parents]
        self.prior = [torch.randn(*size, generator=generator) for size in sizes]
        self.q = nn.ParameterList([nn.Parameter(0.3 * torch.randn(*size)) for size in sizes])
        self.weight = nn.Parameter(torch.randn(sites * values, 3))
        self.y = 2.0 * torch.randn(3, generator=generator)

    def _draw(self, tables: Any) -> list[Tensor]:
        drawn: list[Tensor] = []
        for i, own in enumerate(self.parents):
            logits = tables[i][tuple(drawn[j] for j in own)] if own else tables[i]
            drawn.append(pyro.sample(f"z_{i}", dist.Categorical(logits=logits)))
        return drawn

    def model(self) -> None:
        self.start()
        features = torch.cat([one_hot(z, self.values).float() for z in self._draw(self.prior)], -1)
        mean = 2.0 * (features @ self.weight).tanh()
        pyro.sample("y", dist.Normal(mean, 0.7).to_event(1), obs=self.y)

    def guide(self) -> None:
        self.start()
        self._draw(self.q)


class Alarm(Parts):
    """Burglary and earthquake, an alarm that may ring for either, and three neighbours, on five nights."""

    CALLS = ((1.0, 1.0, 0.0), (0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.0, 1.0, 0.0))

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.tensor(self.CALLS)
        self.ring, self.call = nn.Parameter(torch.tensor([-2.0, 2.0, 1.0])), nn.Parameter(torch.tensor([-1.0, 2.0]))
        self.encoder = nn.Linear(3, 5)

    def model(self) -> None:
        self.start()
        with pyro.plate("nights", 5):
            burglary = pyro.sample("burglary", dist.Bernoulli(0.1))
            earthquake = pyro.sample("earthquake", dist.Bernoulli(0.2))
            logits = self.ring[0] + self.ring[1] * burglary + self.ring[2] * earthquake
            alarm = pyro.sample("alarm", dist.Bernoulli(logits=logits))
            called = (self.call[0] + self.call[1] * alarm).unsqueeze(-1) + torch.zeros(3)
            pyro.sample("calls", dist.Bernoulli(logits=called).to_event(1), obs=self.calls)

    def guide(self) -> None:
        self.start()
        logits = self.encoder(self.calls)
        with pyro.plate("nights", 5):
            alarm = pyro.sample("alarm", dist.Bernoulli(logits=logits[:, 0]))
            pyro.sample("burglary", dist.Bernoulli(logits=logits[:, 1] + logits[:, 2] * alarm))
            pyro.sample("earthquake", dist.Bernoulli(logits=logits[:, 3] + logits[:, 4] * alarm))


class TwoCounts(Parts):
    """Visitors of two kinds on three days, of whom the sum is seen, with noise."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.tensor([4.0, 9.0, 2.0])
        self.rate, self.q = nn.Parameter(torch.tensor([0.5, 1.0])), nn.Parameter(torch.zeros(3, 2))

    def model(self) -> None:
        self.start()
        with pyro.plate("days", 3):
            a = pyro.sample("a", dist.Poisson(self.rate[0].exp()))
            b = pyro.sample("b", dist.Poisson(self.rate[1].exp()))
            pyro.sample("seen", dist.Normal(a + b, 0.5), obs=self.seen)

    def guide(self) -> None:
        self.start()
        with pyro.plate("days", 3):
            pyro.sample("a", dist.Poisson(self.q[:, 0].exp()))
            pyro.sample("b", dist.Poisson(self.q[:, 1].exp()))


class KindsAndLevels(Parts):
    """Six measurements, each of one of three kinds and with a level of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.y = torch.tensor([-3.0, -2.5, 0.1, 0.4, 2.8, 3.5])
        self.means, self.logits = nn.Parameter(torch.randn(3)), nn.Parameter(torch.zeros(6, 3))
        self.loc, self.scale = nn.Parameter(torch.zeros(6, 3)), nn.Parameter(torch.zeros(6))

    def model(self) -> None:
        self.start()
        with pyro.plate("rows", 6):
            kind = pyro.sample("kind", dist.Categorical(torch.ones(3)))
            level = pyro.sample("level", dist.Normal(self.means[kind], 1.0))
            pyro.sample("y", dist.StudentT(3.0, level, 0.5), obs=self.y)

    def guide(self) -> None:
        self.start()
        with pyro.plate("rows", 6):
            kind = pyro.sample("kind", dist.Categorical(logits=self.logits))
            loc = (one_hot(kind, 3) * self.loc).sum(-1)
            pyro.sample("level", dist.Normal(loc, self.scale.exp()))


class Diagnosis(Parts):
    """Eight causes and six findings, each of which some causes explain: a noisy-or network."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.findings = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
        self.strength = 3.0 * torch.rand(8, 6, generator=generator) * (torch.rand(8, 6, generator=generator) < 0.5)
        self.q, self.leak = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.tensor(-2.0))

    def model(self) -> None:
        self.start()
        causes = [pyro.sample(f"cause_{i}", dist.Bernoulli(0.15)) for i in range(8)]
        hazard = self.leak.exp() + sum(c.unsqueeze(-1) * self.strength[i] for i, c in enumerate(causes))
        present = 1.0 - (-hazard).exp()
        pyro.sample("findings", dist.Bernoulli(present.clamp(1e-4, 1.0 - 1e-4)).to_event(1), obs=self.findings)

    def guide(self) -> None:
        self.start()
        for i in range(8):
            pyro.sample(f"cause_{i}", dist.Bernoulli(logits=self.q[i]))
