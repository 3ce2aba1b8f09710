"""Programs of many kinds, for the race of the default against its own options and Pyro's ELBOs.

Each program is a module with ``model`` and ``guide``. A third of them is held out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from blackbox import Simulator, edit_distance
from common import net
from torch import Tensor, nn
from torch.nn.functional import one_hot

from pyro_bpq import KSubset, PlackettLuce, external, sample_chain


@dataclass(frozen=True)
class Program:
    """A program of the race.

    Args:
        name: Name in tables.
        make: Makes the module, from the present seed of the global generator.
        rows: Rows of digits in a step; 0 for programs without arguments.
        steered: Whether sampled values steer it.
        held_out: Whether it is one of those on which rules are not made: they are looked at for the final figures only.
    """

    name: str
    make: Callable[[], Any]
    rows: int = 0
    steered: bool = False
    held_out: bool = False


class Parts(nn.Module):
    """A program whose parameters are registered, in a plate if it has rows: of its argument, or of ``data``."""

    data: Tensor | None = None

    def __init_subclass__(cls) -> None:
        for part in ("model", "guide"):
            setattr(cls, part, in_rows(getattr(cls, part)))


def in_rows(part: Callable[..., None]) -> Callable[..., None]:
    """A model or a guide that registers the parameters of its module, in a plate of its rows."""

    @functools.wraps(part)
    def run(module: Parts, *args: Tensor) -> None:
        pyro.module("programs", module)
        rows = args[0] if args else module.data
        with contextlib.nullcontext() if rows is None else pyro.plate("rows", len(rows)):
            part(module, *args)

    return run


# Rows of data.


class DigitVAE(Parts):
    """One layer of latents and a decoder, on 8 by 8 digits."""

    def __init__(self, parts: int, values: int, decoder: nn.Module, hidden: int = 64) -> None:
        super().__init__()
        self.parts, self.values, self.decoder = parts, values, decoder
        self.width = parts * (values if values > 2 else 1)
        self.encoder = net(64, hidden, self.width)

    def law(self, logits: Tensor) -> Any:
        """The distribution of the latents."""
        if self.values == 2:
            return dist.Bernoulli(logits=logits).to_event(1)
        return dist.OneHotCategorical(logits=logits.unflatten(-1, (self.parts, self.values))).to_event(1)

    def model(self, images: Tensor) -> None:
        z = pyro.sample("z", self.law(images.new_zeros(self.width)))
        logits = self.decoder(z if self.values == 2 else z.flatten(-2))
        pyro.sample("x", dist.Bernoulli(logits=logits, validate_args=False).to_event(1), obs=images)

    def guide(self, images: Tensor) -> None:
        pyro.sample("z", self.law(self.encoder(images)))


class Convolutions(nn.Module):
    """A decoder of transposed convolutions, for any batch dimensions."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.channels, self.first = channels, nn.Linear(width, 4 * channels)
        larger = [nn.ConvTranspose2d(channels, number, 4, 2, 1) for number in (channels, 1)]
        self.rest = nn.Sequential(larger[0], nn.ReLU(), larger[1])

    def forward(self, z: Tensor) -> Tensor:
        hidden = torch.relu(self.first(z))
        return self.rest(hidden.reshape(-1, self.channels, 2, 2)).reshape(*hidden.shape[:-1], 64)


class Attention(nn.Module):
    """A decoder that attends over the latents."""

    def __init__(self, parts: int, values: int, width: int = 32) -> None:
        super().__init__()
        self.parts, self.width = parts, width
        self.embed, self.out = nn.Linear(values, 3 * width), nn.Linear(parts * width, 64)

    def forward(self, z: Tensor) -> Tensor:
        q, k, v = self.embed(z.unflatten(-1, (self.parts, -1))).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / self.width**0.5, -1)
        return self.out((weights @ v).flatten(-2))


class Layers(Parts):
    """A sigmoid belief network on digits."""

    def __init__(self, depth: int, units: int) -> None:
        super().__init__()
        self.depth, self.units = depth, units
        self.up = nn.ModuleList(nn.Linear(64 if i == 0 else units, units) for i in range(depth))
        self.down = nn.ModuleList(nn.Linear(units, 64 if i == 0 else units) for i in range(depth))

    def model(self, images: Tensor) -> None:
        logits = images.new_zeros(self.units)
        for i in reversed(range(self.depth)):
            logits = self.down[i](pyro.sample(f"z_{i}", dist.Bernoulli(logits=logits).to_event(1)))
        pyro.sample("x", dist.Bernoulli(logits=logits, validate_args=False).to_event(1), obs=images)

    def guide(self, images: Tensor) -> None:
        z = images
        for i in range(self.depth):
            z = pyro.sample(f"z_{i}", dist.Bernoulli(logits=self.up[i](z)).to_event(1))


class PoissonFactors(Parts):
    """Counts behind each digit: infinite support, no ``rsample``."""

    def __init__(self, units: int = 10) -> None:
        super().__init__()
        self.encoder, self.decoder, self.units = nn.Linear(64, units), nn.Linear(units, 64), units

    def model(self, images: Tensor) -> None:
        z = pyro.sample("z", dist.Poisson(torch.ones(self.units)).to_event(1))
        pyro.sample("x", dist.Bernoulli(logits=self.decoder(z), validate_args=False).to_event(1), obs=images)

    def guide(self, images: Tensor) -> None:
        rate = nn.functional.softplus(self.encoder(images)) + 1e-2
        pyro.sample("z", dist.Poisson(rate).to_event(1))


class LabelsAndStyles(Parts):
    """A label of ten values and a style of real numbers behind each digit."""

    def __init__(self) -> None:
        super().__init__()
        self.label, self.style, self.decoder = net(64, 64, 64, 64), net(74, 64, 64, 64), net(18, 128, 128, 64)
        self.to_label, self.to_style = nn.Linear(64, 10), nn.Linear(64, 16)

    def model(self, images: Tensor) -> None:
        y = pyro.sample("y", dist.OneHotCategorical(logits=images.new_zeros(10)))
        s = pyro.sample("s", dist.Normal(images.new_zeros(8), 1.0).to_event(1))
        y = y.expand(*s.shape[:-1], 10) if y.dim() < s.dim() else y
        logits = self.decoder(torch.cat((y, s.expand(*y.shape[:-1], 8)), -1))
        pyro.sample("x", dist.Bernoulli(logits=logits, validate_args=False).to_event(1), obs=images)

    def guide(self, images: Tensor) -> None:
        y = pyro.sample("y", dist.OneHotCategorical(logits=self.to_label(self.label(images).relu())))
        both = torch.cat((images.expand(*y.shape[:-1], 64), y), -1)
        loc, scale = self.to_style(self.style(both).relu()).chunk(2, -1)
        pyro.sample("s", dist.Normal(loc, nn.functional.softplus(scale) + 1e-3).to_event(1))


class RowChains(Parts):
    """Hidden Markov chains of eight steps and four states, 32 of them, with a guide that reads the present step."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        states = torch.randint(4, (32, 8), generator=generator).sort(1).values
        self.data = 1.5 * states + torch.randn(32, 8, generator=generator)
        self.move, self.loc = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.randn(4))
        self.embed, self.read = nn.Parameter(torch.zeros(5, 4)), nn.Linear(1, 4)

    def model(self) -> None:
        logits = torch.zeros(4)
        for t in range(8):
            z = pyro.sample(f"z_{t}", dist.Categorical(logits=logits))
            pyro.sample(f"x_{t}", dist.Normal(self.loc[z], 1.0), obs=self.data[:, t])
            logits = self.move[z]

    def guide(self) -> None:
        z = torch.full((32,), 4)
        for t in range(8):
            logits = self.read(self.data[:, t, None]) + self.embed[z]
            z = pyro.sample(f"z_{t}", dist.Categorical(logits=logits))


class Mixture(Parts):
    """Rows that belong to one of ten groups; ``heavy`` adds random scales without reparameterisation."""

    def __init__(self, rows: int, heavy: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        means = 4.0 * torch.randn(10, 2, generator=generator)
        self.data = means[torch.randint(10, (rows,), generator=generator)] + torch.randn(rows, 2, generator=generator)
        self.heavy, self.means, self.scale = heavy, nn.Parameter(torch.randn(10, 2)), nn.Parameter(torch.zeros(2))
        self.net = net(2, 32, 10)

    def model(self) -> None:
        scale = pyro.sample("s", no_rsample(dist.Gamma(2.0, 2.0))) if self.heavy else torch.ones(())
        k = pyro.sample("k", dist.Categorical(logits=torch.zeros(10)))
        noise = scale.reciprocal().sqrt().unsqueeze(-1)
        pyro.sample("x", dist.Normal(self.means[k], noise).to_event(1), obs=self.data)

    def guide(self) -> None:
        if self.heavy:
            shape = 2.0 * self.scale.exp()
            pyro.sample("s", no_rsample(dist.Gamma(shape[0], shape[1])))
        pyro.sample("k", dist.Categorical(logits=self.net(self.data)))


def no_rsample(fn: Any) -> Any:
    """A distribution without its reparameterisation."""
    found = fn.expand(fn.batch_shape)
    found.has_rsample = False
    return found


# Few rows, or one.


class Chain(Parts):
    """Binary sites, each conditioned on the one before; ``count`` sees only their number."""

    def __init__(self, length: int, count: bool = False) -> None:
        super().__init__()
        self.length, self.count = length, count
        self.q, self.p = nn.Parameter(torch.zeros(length, 2)), nn.Parameter(torch.tensor([0.3, -0.2]))

    def model(self) -> None:
        z, total = torch.zeros(()), torch.zeros(())
        for t in range(self.length):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=self.p[0] + 1.5 * z - 0.7))
            total = total + z
            if not self.count:
                pyro.sample(f"x_{t}", dist.Normal(z + self.p[1], 0.6), obs=torch.tensor(float(t % 3 == 0)))
        if self.count:
            pyro.sample("x", dist.Normal(total, 1.0), obs=torch.tensor(0.6 * self.length))

    def guide(self) -> None:
        z = torch.zeros(())
        for t in range(self.length):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=self.q[t, 0] + self.q[t, 1] * z))


class Grid(Parts):
    """A square Ising model with a field, mean-field guide."""

    def __init__(self, side: int = 5) -> None:
        super().__init__()
        self.places, self.q = [*itertools.product(range(side), repeat=2)], nn.Parameter(torch.zeros(side, side))

    def model(self) -> None:
        z = {}
        for i, j in self.places:
            near = sum((2.0 * z[at] - 1.0 for at in ((i - 1, j), (i, j - 1)) if at in z), torch.zeros(()))
            z[i, j] = pyro.sample(f"z_{i}_{j}", dist.Bernoulli(logits=0.8 * near))
            pyro.sample(f"x_{i}_{j}", dist.Normal(z[i, j], 0.9), obs=torch.tensor(float((i + j) % 2 == 0 or i > 2)))

    def guide(self) -> None:
        for i, j in self.places:
            pyro.sample(f"z_{i}_{j}", dist.Bernoulli(logits=self.q[i, j]))


class SpikeAndSlab(Parts):
    """Regression on 12 features, each in or out, with real weights."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(40, 12, generator=generator)
        self.y = self.x[:, :3].sum(-1) + 0.5 * torch.randn(40, generator=generator)
        self.q, self.loc, self.scale = (nn.Parameter(torch.zeros(12)) for _ in range(3))

    def model(self) -> None:
        z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(12)).to_event(1))
        w = pyro.sample("w", dist.Normal(torch.zeros(12), 1.0).to_event(1))
        with pyro.plate("rows", 40):
            pyro.sample("y", dist.Normal(self.x @ (z * w), 0.5), obs=self.y)

    def guide(self) -> None:
        pyro.sample("z", dist.Bernoulli(logits=self.q).to_event(1))
        pyro.sample("w", dist.Normal(self.loc, self.scale.exp()).to_event(1))


# A few sites and rows, as in textbooks: what a step takes is mostly Python.


class Bits(Parts):
    """Factors that are in or out, in rows of three numbers."""

    def __init__(self, rows: int, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        on = (torch.rand(rows, number, generator=generator) < 0.4).float()
        noise = 0.7 * torch.randn(rows, 3, generator=generator)
        self.data = 1.5 * on @ torch.randn(number, 3, generator=generator) + noise
        self.weight, self.encoder = nn.Parameter(torch.randn(number, 3)), nn.Linear(3, number)
        self.number = number

    def model(self) -> None:
        z = pyro.sample("z", dist.Bernoulli(0.4 * torch.ones(self.number)).to_event(1))
        pyro.sample("y", dist.Normal(z @ self.weight, 0.7).to_event(1), obs=self.data)

    def guide(self) -> None:
        pyro.sample("z", dist.Bernoulli(logits=self.encoder(self.data)).to_event(1))


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
        features = torch.cat([one_hot(z, self.values).float() for z in self._draw(self.prior)], -1)
        mean = 2.0 * (features @ self.weight).tanh()
        pyro.sample("y", dist.Normal(mean, 0.7).to_event(1), obs=self.y)

    def guide(self) -> None:
        self._draw(self.q)


class Alarm(Parts):
    """Burglary and earthquake, an alarm that may ring for either, and three neighbours, on five nights."""

    CALLS = ((1.0, 1.0, 0.0), (0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.0, 1.0, 0.0))

    def __init__(self) -> None:
        super().__init__()
        self.data = torch.tensor(self.CALLS)
        self.ring, self.call = nn.Parameter(torch.tensor([-2.0, 2.0, 1.0])), nn.Parameter(torch.tensor([-1.0, 2.0]))
        self.encoder = nn.Linear(3, 5)

    def model(self) -> None:
        burglary = pyro.sample("burglary", dist.Bernoulli(0.1))
        earthquake = pyro.sample("earthquake", dist.Bernoulli(0.2))
        logits = self.ring[0] + self.ring[1] * burglary + self.ring[2] * earthquake
        alarm = pyro.sample("alarm", dist.Bernoulli(logits=logits))
        called = (self.call[0] + self.call[1] * alarm).unsqueeze(-1) + torch.zeros(3)
        pyro.sample("calls", dist.Bernoulli(logits=called).to_event(1), obs=self.data)

    def guide(self) -> None:
        logits = self.encoder(self.data)
        alarm = pyro.sample("alarm", dist.Bernoulli(logits=logits[:, 0]))
        pyro.sample("burglary", dist.Bernoulli(logits=logits[:, 1] + logits[:, 2] * alarm))
        pyro.sample("earthquake", dist.Bernoulli(logits=logits[:, 3] + logits[:, 4] * alarm))


class TwoCounts(Parts):
    """Visitors of two kinds on three days, of whom the sum is seen, with noise."""

    def __init__(self) -> None:
        super().__init__()
        self.data = torch.tensor([4.0, 9.0, 2.0])
        self.rate, self.q = nn.Parameter(torch.tensor([0.5, 1.0])), nn.Parameter(torch.zeros(3, 2))

    def model(self) -> None:
        a = pyro.sample("a", dist.Poisson(self.rate[0].exp()))
        b = pyro.sample("b", dist.Poisson(self.rate[1].exp()))
        pyro.sample("seen", dist.Normal(a + b, 0.5), obs=self.data)

    def guide(self) -> None:
        pyro.sample("a", dist.Poisson(self.q[:, 0].exp()))
        pyro.sample("b", dist.Poisson(self.q[:, 1].exp()))


class PoissonChain(Parts):
    """Counts, each with a rate that is linear in the last one, and a noisy reading of each."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.seen = torch.poisson(torch.full((length,), 1.5))
        self.own, self.last = nn.Parameter(0.2 * torch.randn(length) + 0.5), nn.Parameter(torch.full((length,), 0.3))

    def model(self) -> None:
        z = torch.ones(())
        for t, seen in enumerate(self.seen):
            z = pyro.sample(f"z_{t}", dist.Poisson(0.5 + 0.5 * z))
            pyro.sample(f"x_{t}", dist.Normal(z, 1.0), obs=seen)

    def guide(self) -> None:
        z = torch.ones(())
        for t in range(len(self.seen)):
            z = pyro.sample(f"z_{t}", dist.Poisson(nn.functional.softplus(self.own[t] + self.last[t] * z)))


class Births(Parts):
    """A population that has children and dies, and to which others come; every fifth step it is seen, with errors."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.own = length, nn.Parameter(torch.zeros(length, 2))

    def walk(self, is_guide: bool) -> None:
        """Draws the sizes."""
        size = torch.full((), 5.0)
        for t in range(self.length):
            share, rate = (self.own[t, 0].sigmoid(), nn.functional.softplus(self.own[t, 1])) if is_guide else (0.8, 1.0)
            size = pyro.sample(f"size_{t}", dist.Poisson(share * size + rate))
            if t % 5 == 4 and not is_guide:
                pyro.sample(f"x_{t}", dist.Normal(size, 1.0), obs=torch.full((), 5.0 + math.sin(t)))

    def model(self) -> None:
        self.walk(False)

    def guide(self) -> None:
        self.walk(True)


class BlackBox(Parts):
    """Choices, each conditioned on the one before, and a cost that NumPy computes."""

    def __init__(self, cost: Callable[[Tensor], np.ndarray], length: int, values: int) -> None:
        super().__init__()
        self.cost, self.q = external(cost), nn.Parameter(torch.zeros(length, values, values))

    def draw(self, tables: Tensor) -> Tensor:
        """All choices, in the last dimension."""
        drawn = [torch.zeros((), dtype=torch.long)]
        for t, table in enumerate(tables):
            drawn.append(pyro.sample(f"z_{t}", dist.Categorical(logits=table[drawn[-1]])))
        return torch.stack(drawn[1:], -1)

    def model(self) -> None:
        pyro.factor("cost", -self.cost(self.draw(torch.zeros_like(self.q))))

    def guide(self) -> None:
        self.draw(self.q)


def spelling(letters: Tensor) -> np.ndarray:
    """Distance of a word from another one."""
    return edit_distance(letters.movedim(-1, 0), torch.tensor([1, 3, 2, 2, 0, 1, 3, 1]))


def schedule(machines: Tensor) -> np.ndarray:
    """What it takes to do jobs on machines that break down."""
    return Simulator(0)(machines.movedim(-1, 0), torch.linspace(0.2, 2.0, 8))


def warehouse(orders: Tensor) -> np.ndarray:
    """What stocks and lost sales cost in ten days."""
    stock, total = 3.0, np.zeros(orders.shape[:-1])
    for order, demand in zip(np.moveaxis(orders.numpy(), -1, 0), (1, 2, 0, 3, 1, 2, 2, 0, 3, 1), strict=True):
        stock, lost = np.maximum(stock - demand, 0.0) + order, np.maximum(demand - stock, 0.0)
        total = total + 0.5 * stock + 2.0 * lost
    return total.astype(np.float32)


class Choice(Parts):
    """Five of 20 items, or an order of nine, as a chain of choices or as one site.

    Args:
        kind: ``"items"`` with costs of each, ``"pairs"`` with costs of pairs as well, or ``"ranking"``, with one for
            each pair that stands in that order.
        is_chain: Whether it is a chain; costs are then stated one by one.
    """

    def __init__(self, kind: str, is_chain: bool) -> None:
        super().__init__()
        self.kind = kind
        costs = 3.0 * torch.randn(*[9 if kind == "ranking" else 20] * 2)
        self.costs = {"items": costs.diag().diag(), "pairs": costs.tril(), "ranking": costs}[kind]
        self.law: Any = PlackettLuce if kind == "ranking" else functools.partial(KSubset, k=5)
        self.draw, self.logits = sample_chain if is_chain else pyro.sample, nn.Parameter(torch.zeros(len(costs)))

    def model(self) -> None:
        value = self.draw("s", self.law(torch.zeros_like(self.logits)))
        for name, cost in self.stated(value):
            pyro.factor(name, -cost)

    def stated(self, value: Tensor) -> list[tuple[str, Tensor]]:
        """Costs by name."""
        if self.kind == "ranking":
            return [("cost", self.costs[value.unsqueeze(-1), value.unsqueeze(-2)].triu(1).sum((-2, -1)))]
        if self.draw is pyro.sample:
            return [("cost", ((value @ self.costs) * value).sum(-1))]
        starts = [t if self.kind == "items" else 0 for t in range(len(self.costs))]
        rows = enumerate(zip(starts, self.costs, strict=True))
        return [(f"cost_{t}", value[..., t] * (value[..., s : t + 1] @ row[s : t + 1])) for t, (s, row) in rows]

    def guide(self) -> None:
        self.draw("s", self.law(self.logits))


class KindsAndLevels(Parts):
    """Six measurements, each of one of three kinds and with a level of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.data = torch.tensor([-3.0, -2.5, 0.1, 0.4, 2.8, 3.5])
        self.means, self.logits = nn.Parameter(torch.randn(3)), nn.Parameter(torch.zeros(6, 3))
        self.loc, self.scale = nn.Parameter(torch.zeros(6, 3)), nn.Parameter(torch.zeros(6))

    def model(self) -> None:
        kind = pyro.sample("kind", dist.Categorical(torch.ones(3)))
        level = pyro.sample("level", dist.Normal(self.means[kind], 1.0))
        pyro.sample("y", dist.StudentT(3.0, level, 0.5), obs=self.data)

    def guide(self) -> None:
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
        causes = [pyro.sample(f"cause_{i}", dist.Bernoulli(0.15)) for i in range(8)]
        hazard = self.leak.exp() + sum(c.unsqueeze(-1) * self.strength[i] for i, c in enumerate(causes))
        present = 1.0 - (-hazard).exp()
        pyro.sample("findings", dist.Bernoulli(present.clamp(1e-4, 1.0 - 1e-4)).to_event(1), obs=self.findings)

    def guide(self) -> None:
        for i in range(8):
            pyro.sample(f"cause_{i}", dist.Bernoulli(logits=self.q[i]))


# Programs that sampled values steer.


class Grammar(Parts):
    """Expressions that are drawn recursively, scored at four points."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.op, self.leaf = (nn.Parameter(torch.zeros(6, size)) for size in (1, 3, 4))

    def expression(self, path: str, depth: int, laws: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Draws an expression and evaluates it."""
        points = torch.tensor([1.0, 2.0, -1.0, 0.5])
        if depth < 5 and pyro.sample(f"split_{path}", dist.Bernoulli(logits=laws[0][depth, 0])).item() > 0.5:
            op = int(pyro.sample(f"op_{path}", dist.Categorical(logits=laws[1][depth])))
            a, b = (self.expression(path + side, depth + 1, laws) for side in "lr")
            return (a + b, a * b, a - b)[op]
        leaf = int(pyro.sample(f"leaf_{path}", dist.Categorical(logits=laws[2][depth])))
        return (points, torch.ones(4), points * points, points.sin())[leaf]

    def model(self) -> None:
        split = (0.2 - 0.5 * torch.arange(6.0)).unsqueeze(-1)
        found = self.expression("", 0, (split, torch.zeros(6, 3), torch.zeros(6, 4)))
        points = torch.tensor([1.0, 2.0, -1.0, 0.5])
        pyro.sample("y", dist.Normal(found, 0.5).to_event(1), obs=points * points + points - 1.0)

    def guide(self) -> None:
        self.expression("", 0, (self.split, self.op, self.leaf))


class Sentence(Parts):
    """A recursive grammar of words, scored by the letters of a sentence, word by word."""

    LETTERS = (0, 2, 1, 3, 0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.rule, self.word = nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(5, 4))
        self.emit = nn.Parameter(torch.eye(4))

    def phrase(self, path: str, depth: int, laws: tuple[Tensor, Tensor]) -> list[int]:
        """Draws a phrase: a word, two phrases, or a word between two phrases."""
        rule = int(pyro.sample(f"rule{path}", dist.Categorical(logits=laws[0][depth]))) if depth < 4 else 0
        word = [] if rule == 1 else [int(pyro.sample(f"word{path}", dist.Categorical(logits=laws[1][depth])))]
        if rule == 0:
            return word
        left, right = (self.phrase(path + side, depth + 1, laws) for side in "lr")
        return left + word + right

    def model(self) -> None:
        found = self.phrase("", 0, (torch.tensor([0.8, 0.0, -0.5]).expand(5, 3), torch.zeros(5, 4)))
        letters = self.LETTERS[: len(found)]
        for i, (word, letter) in enumerate(zip(found, letters, strict=False)):
            pyro.sample(f"x_{i}", dist.Categorical(logits=self.emit[word]), obs=torch.tensor(letter))
        # Letters without a word, and words without a letter.
        pyro.factor("rest", torch.tensor(-1.5 * abs(len(found) - len(self.LETTERS))))

    def guide(self) -> None:
        self.phrase("", 0, (self.rule, self.word))


class Table(Parts):
    """A chain of three states that are looked up by ``int(z)``, each with an observation."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.q = length, nn.Parameter(torch.zeros(length, 3, 3))
        self.p, self.loc = nn.Parameter(torch.eye(3)), nn.Parameter(torch.tensor([-1.0, 0.0, 1.0]))

    def model(self) -> None:
        z = 0
        for t in range(self.length):
            z = int(pyro.sample(f"z_{t}", dist.Categorical(logits=self.p[z])))
            pyro.sample(f"x_{t}", dist.Normal(self.loc[z], 0.7), obs=torch.tensor(float(t % 3) - 1.0))

    def guide(self) -> None:
        z = 0
        for t in range(self.length):
            z = int(pyro.sample(f"z_{t}", dist.Categorical(logits=self.q[t, z])))


class Failures(Parts):
    """Repairs until something works: a geometric loop with a cost for every turn."""

    def __init__(self) -> None:
        super().__init__()
        self.stop, self.tool = nn.Parameter(torch.zeros(15)), nn.Parameter(torch.zeros(15, 3))
        self.wear = nn.Parameter(torch.tensor([0.2, 0.5, 1.0]))

    def turns(self, stop: Tensor, tool: Tensor, is_model: bool) -> None:
        """Draws tools until one helps."""
        for t in range(15):
            used = pyro.sample(f"tool_{t}", dist.Categorical(logits=tool[t]))
            if is_model:
                pyro.sample(f"wear_{t}", dist.Normal(self.wear[used], 0.5), obs=torch.tensor(0.3 + 0.1 * t))
            works = pyro.sample(f"works_{t}", dist.Bernoulli(logits=stop[t] + 0.4 * used))
            if works > 0.5:
                return

    def model(self) -> None:
        self.turns(torch.full((15,), -1.5), torch.zeros(15, 3), True)

    def guide(self) -> None:
        self.turns(self.stop, self.tool, False)


class Models(Parts):
    """Chooses among three models of some data, which have sites of their own, discrete and continuous."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.degree, self.knot = (nn.Parameter(torch.zeros(size)) for size in (3, 4, 6))
        self.loc, self.scale = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.full((3, 4), -1.0))
        self.t = torch.linspace(-1.0, 1.0, 12)
        self.y = 0.8 * self.t - 0.4 + 0.9 * (self.t > 0.2)

    def curve(self, laws: tuple[Tensor, Tensor, Tensor], loc: Tensor, scale: Tensor) -> Tensor:
        """Draws a model and its parameters, and evaluates it."""
        kind = int(pyro.sample("kind", dist.Categorical(logits=laws[0])))

        def weight(i: int) -> Tensor:
            return pyro.sample(f"w{kind}_{i}", dist.Normal(loc[kind, i], scale[kind, i].exp()))

        if kind == 0:
            degree = int(pyro.sample("degree", dist.Categorical(logits=laws[1])))
            return sum((weight(i) * self.t**i for i in range(degree + 1)), torch.zeros(12))
        if kind == 1:
            knot = pyro.sample("knot", dist.Categorical(logits=laws[2]))
            step = (self.t > 0.3 * knot - 0.8).float()
            return weight(0) + weight(1) * self.t + weight(2) * step
        return weight(0) * torch.sin(2.0 * self.t + weight(1))

    def model(self) -> None:
        mean = self.curve((torch.zeros(3), torch.zeros(4), torch.zeros(6)), torch.zeros(3, 4), torch.zeros(3, 4))
        with pyro.plate("rows", 12):
            pyro.sample("y", dist.Normal(mean, 0.4), obs=self.y)

    def guide(self) -> None:
        self.curve((self.kind, self.degree, self.knot), self.loc, self.scale)


class Steered(Parts):
    """A program whose draws, by a function of laws, decide what is drawn next."""

    def __init__(self, body: Callable[[Callable[[str, int], Tensor]], Tensor], seen: float, noise: float) -> None:
        super().__init__()
        self.body, self.seen, self.noise = body, seen, noise
        self.weight = nn.Parameter(torch.tensor(1.0))
        self.laws = nn.ParameterDict({name: nn.Parameter(torch.zeros(13, 4)) for name in "abc"})

    def model(self) -> None:
        total = self.body(lambda name, i: torch.zeros(4))
        pyro.sample("x", dist.Normal(self.weight * total, self.noise), obs=torch.tensor(self.seen))

    def guide(self) -> None:
        self.body(lambda name, i: self.laws[name][i])


Law = Callable[[str, int], Tensor]


def coin(name: str, logits: Tensor) -> Tensor:
    """A binary draw."""
    return pyro.sample(name, dist.Bernoulli(logits=logits[0]))


def die(name: str, logits: Tensor) -> Tensor:
    """A draw of four values."""
    return pyro.sample(name, dist.Categorical(logits=logits))


def branch(law: Law) -> Tensor:
    """Two branches with sites of their own."""
    if coin("a", law("a", 0)) > 0.5:
        return 1.5 * coin("b", law("b", 0))
    return -die("c", law("c", 0)).float()


def loop(law: Law) -> Tensor:
    """Draws until a coin says stop."""
    total, n = torch.zeros(()), 0
    while n < 12 and coin(f"go_{n}", law("a", n) + 1.0) > 0.5:
        total, n = total + coin(f"v_{n}", law("b", n)), n + 1
    return total


def number(law: Law) -> Tensor:
    """A number of draws that is drawn."""
    n = int(die("n", law("a", 0)))
    return sum((coin(f"z_{i}", law("b", i)) for i in range(n + 1)), torch.zeros(()))


def search(law: Law) -> Tensor:
    """Depth-first search of a tree that is drawn on the way, with a fee for every node."""

    def visit(path: str, depth: int) -> Tensor:
        found = 1.0 + die(f"n{path}", law("a", depth)).float()
        pyro.factor(f"fee{path}", torch.tensor(-0.3), has_rsample=False)
        for side in "lr":
            if depth < 3 and coin(f"go{path}{side}", law("b", 2 * depth + (side == "r"))) > 0.5:
                found = found + 0.5 * visit(path + side, depth + 1)
        return found

    return visit("", 0)


def counter(law: Law) -> Tensor:
    """Instructions for a counter, drawn until one of them halts."""
    value = torch.ones(())
    for t in range(8):
        op = int(die(f"op_{t}", law("a", t)))
        if op == 0:
            break
        if op == 1:
            value = value + 1.0 + coin(f"add_{t}", law("b", t))
        elif op == 2:
            value = 1.5 * value
        else:
            value = value - die(f"sub_{t}", law("c", t)).float()
    return value


def gates(law: Law) -> Tensor:
    """Six gates, each with a draw of its own."""
    total = torch.zeros(())
    for i in range(6):
        if coin(f"on_{i}", law("a", i)) > 0.5:
            total = total + die(f"v_{i}", law("b", i)).float()
    return total


# Not in the race.
MORE = (
    Program("Poisson chain", lambda: PoissonChain(30)),
    Program("births and deaths", lambda: Births(30)),
    Program("schedule", lambda: BlackBox(schedule, 8, 4)),
    Program("spelling", lambda: BlackBox(spelling, 8, 4)),
    Program("warehouse", lambda: BlackBox(warehouse, 10, 4)),
    Program("items, a chain", lambda: Choice("items", True)),
    Program("pairs, a chain", lambda: Choice("pairs", True)),
    Program("pairs, one site", lambda: Choice("pairs", False)),
    Program("ranking, one site", lambda: Choice("ranking", False)),
)
PROGRAMS = (
    Program("convolutional VAE", lambda: DigitVAE(8, 6, Convolutions(48, 32)), 64),
    Program("small convolutional VAE", lambda: DigitVAE(8, 6, Convolutions(48, 8)), 64),
    Program("attention VAE", lambda: DigitVAE(8, 6, Attention(8, 6)), 64, held_out=True),
    Program("linear VAE", lambda: DigitVAE(20, 2, nn.Linear(20, 64)), 64),
    Program("VAE, 400 hidden", lambda: DigitVAE(20, 2, net(20, 400, 400, 64), 400), 64),
    Program("one-hot VAE, 200 hidden", lambda: DigitVAE(8, 6, net(48, 200, 200, 64), 200), 64),
    Program("two layers", lambda: Layers(2, 20), 64),
    Program("three layers", lambda: Layers(3, 50), 64, held_out=True),
    Program("four layers", lambda: Layers(4, 50), 64),
    Program("Poisson factors", PoissonFactors, 64, held_out=True),
    Program("linear VAE, 1 row", lambda: DigitVAE(20, 2, nn.Linear(20, 64)), 1, held_out=True),
    Program("labels and styles", LabelsAndStyles, 64, held_out=True),
    Program("chains of 32 rows", RowChains, held_out=True),
    Program("mixture, 1000 rows", lambda: Mixture(1000)),
    Program("mixture, 10000 rows", lambda: Mixture(10000), held_out=True),
    Program("mixture, heavy tails", lambda: Mixture(200, True)),
    Program("chain of 20", lambda: Chain(20)),
    Program("chain of 50", lambda: Chain(50)),
    Program("count of 20", lambda: Chain(20, True)),
    Program("grid", Grid, held_out=True),
    Program("spike and slab", SpikeAndSlab, held_out=True),
    Program("six bits, 20 rows", lambda: Bits(20, 6)),
    Program("network of 4", lambda: Network(4, 5, 9)),
    Program("network of 8", lambda: Network(8, 2, 1)),
    Program("alarm", Alarm, held_out=True),
    Program("two counts", TwoCounts, held_out=True),
    Program("kinds and levels", KindsAndLevels, held_out=True),
    Program("diagnosis", Diagnosis, held_out=True),
    Program("grammar", Grammar, 0, True),
    Program("branch", lambda: Steered(branch, 1.4, 0.7), 0, True),
    Program("loop", lambda: Steered(loop, 4.0, 0.7), 0, True),
    Program("number", lambda: Steered(number, 3.0, 0.5), 0, True),
    Program("search", lambda: Steered(search, 6.0, 1.0), 0, True, held_out=True),
    Program("machine", lambda: Steered(counter, 7.0, 1.0), 0, True, held_out=True),
    Program("gates", lambda: Steered(gates, 7.0, 1.0), 0, True),
    Program("sentence", Sentence, 0, True),
    Program("failures", Failures, 0, True),
    Program("table of 20", lambda: Table(20), 0, True),
    Program("models", Models, 0, True),
)
