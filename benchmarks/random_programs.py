"""Random programs, on which nobody tuned the rules: their kind, sizes, dependencies and data follow from a seed."""

from __future__ import annotations

import random
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from programs import Program
from small_programs import Parts
from torch import Tensor, nn
from torch.nn.functional import one_hot


def joined(values: list[Tensor]) -> Tensor:
    """Features side by side, broadcast."""
    shape = torch.broadcast_shapes(*(value.shape[:-1] for value in values))
    return torch.cat([value.expand(*shape, value.shape[-1]) for value in values], -1)


class Sites(Parts):
    """Sites of random kinds, whose laws are linear in the features of some earlier sites and of the data.

    Kinds: Bernoulli and one-hot vectors, single categories and coins, counts, and reparameterised normals.
    """

    def __init__(self, seed: int, kinds: str, number: int, rows: int, width: int) -> None:
        super().__init__()
        draws = random.Random(seed)
        self.kinds = [draws.choice(kinds) for _ in range(number)]
        self.sizes = [self._size(kind, draws) for kind in self.kinds]
        widths = [size * values for size, values in self.sizes]
        self.before = [draws.sample(range(i), min(i, draws.randint(0, 2))) for i in range(number)]
        self.of_guide = [draws.sample(range(i), min(i, draws.randint(0, 2))) for i in range(number)]
        self.seen = sorted({number - 1, *draws.sample(range(number), draws.randint(1, number))})
        self.data = torch.randn(rows, width) * draws.choice([0.7, 1.5, 3.0])
        self.data += torch.randn(4, width)[torch.randint(4, (rows,))]
        self.laws = nn.ModuleList(nn.Linear(1 + sum(widths[j] for j in own), widths[i]) for i, own in self._pairs())
        guides = enumerate(self.of_guide)
        self.guides = nn.ModuleList(nn.Linear(width + sum(widths[j] for j in own), widths[i]) for i, own in guides)
        total, hidden = sum(widths[j] for j in self.seen), draws.choice([0, 20, 100])
        net = [nn.Linear(total, hidden), nn.Tanh(), nn.Linear(hidden, width)] if hidden else [nn.Linear(total, width)]
        self.decoder, self.noise = nn.Sequential(*net), draws.choice([0.3, 1.0])

    @staticmethod
    def _size(kind: str, draws: random.Random) -> tuple[int, int]:
        size = draws.choice([2, 4, 12, 30]) if kind in "bo" else 1
        return size, draws.choice([2, 3, 6]) if kind in "oc" else 1

    def _pairs(self) -> Any:
        return enumerate(self.before)

    def _draw(self, i: int, raw: Tensor) -> Tensor:
        kind, (size, values), name = self.kinds[i], self.sizes[i], f"z_{i}"
        if kind == "b":
            return pyro.sample(name, dist.Bernoulli(logits=raw).to_event(1))
        if kind == "o":
            law = dist.OneHotCategorical(logits=raw.unflatten(-1, (size, values)))
            return pyro.sample(name, law.to_event(1)).flatten(-2)
        if kind == "c":
            return one_hot(pyro.sample(name, dist.Categorical(logits=raw)), values).to(raw.dtype)
        raw = raw.squeeze(-1)
        if kind == "f":
            return pyro.sample(name, dist.Bernoulli(logits=raw)).unsqueeze(-1)
        if kind == "p":
            return pyro.sample(name, dist.Poisson(1.5 * raw.tanh().exp())).unsqueeze(-1)
        return pyro.sample(name, dist.Normal(raw, 1.0)).unsqueeze(-1)

    def model(self) -> None:
        self.start()
        found: dict[int, Tensor] = {}
        with pyro.plate("rows", len(self.data)):
            for i, own in self._pairs():
                one = torch.ones(len(self.data), 1)
                found[i] = self._draw(i, self.laws[i](joined([one, *(found[j] for j in own)])))
            mean = self.decoder(joined([found[j] for j in self.seen]))
            pyro.sample("y", dist.Normal(mean, self.noise).to_event(1), obs=self.data)

    def guide(self) -> None:
        self.start()
        found: dict[int, Tensor] = {}
        with pyro.plate("rows", len(self.data)):
            for i, own in enumerate(self.of_guide):
                found[i] = self._draw(i, self.guides[i](joined([self.data, *(found[j] for j in own)])))


class Walk(Parts):
    """A chain of states; each observation reads two neighbours, so that no sum over all values is exact."""

    def __init__(self, seed: int, length: int, values: int, rows: int) -> None:
        super().__init__()
        self.length, self.values, self.rows = length, values, rows
        self.move = nn.Parameter(torch.randn(values, values))
        self.emit = nn.Parameter(2.0 * torch.randn(values, values))
        self.first, self.q = nn.Parameter(torch.zeros(rows, values)), nn.Parameter(torch.zeros(length, rows, values))
        self.turn = nn.Parameter(torch.zeros(values, values))
        self.data = torch.randn(rows, length).cumsum(-1)

    def model(self) -> None:
        self.start()
        with pyro.plate("rows", self.rows):
            state = None
            for t in range(self.length):
                logits = torch.zeros(self.values) if state is None else self.move[state]
                drawn = pyro.sample(f"z_{t}", dist.Categorical(logits=logits))
                if state is not None:
                    pyro.sample(f"y_{t}", dist.Normal(self.emit[state, drawn], 0.5), obs=self.data[:, t])
                state = drawn

    def guide(self) -> None:
        self.start()
        with pyro.plate("rows", self.rows):
            state = None
            for t in range(self.length):
                logits = self.q[t] if state is None else self.q[t] + self.turn[state]
                state = pyro.sample(f"z_{t}", dist.Categorical(logits=logits))


class Plans(Parts):
    """A random decision tree: the value of a site says which site comes next, and what it costs."""

    def __init__(self, seed: int, depth: int, values: int) -> None:
        super().__init__()
        self.depth, self.values = depth, values
        self.prior = torch.randn(depth, values)
        self.logits = nn.Parameter(torch.zeros(depth, values))
        self.gain, self.seen = torch.randn(depth, values), torch.randn(3)
        self.weight = nn.Parameter(torch.randn(3))

    def _follow(self, logits: Tensor) -> Tensor:
        total, at = torch.zeros(()), 0
        while at < self.depth:
            found = pyro.sample(f"at_{at}", dist.Categorical(logits=logits[at]))
            total = total + self.gain[at, int(found)]
            at += 1 + int(found)
        return total

    def model(self) -> None:
        self.start()
        pyro.sample("y", dist.Normal(self._follow(self.prior) * self.weight, 0.5).to_event(1), obs=self.seen)

    def guide(self) -> None:
        self.start()
        self._follow(self.logits)


def drawn(seed: int) -> Program:
    """The random program of a seed."""
    draws = random.Random(1_000 + seed)
    kind = draws.choice(["vectors", "few sites", "mixed", "counts", "walk", "plan"])
    rows, width = draws.choice([1, 1, 4, 20, 100]), draws.choice([2, 8, 40])
    if kind == "walk":
        sizes = (draws.choice([4, 8, 16, 30]), draws.choice([2, 4, 8]), rows)
        return Program(f"{seed}: walk of {sizes}", lambda: Walk(seed, *sizes))
    if kind == "plan":
        tree = (draws.choice([3, 6, 12]), draws.choice([2, 3, 5]))
        return Program(f"{seed}: plan of {tree}", lambda: Plans(seed, *tree), 0, True)
    kinds, most = {"vectors": ("bo", 3), "few sites": ("cf", 9), "mixed": ("bocfn", 5), "counts": ("pcn", 4)}[kind]
    number = draws.randint(1, most)
    name = f"{seed}: {kind}, {number} sites, {rows} rows of {width}"
    return Program(name, lambda: Sites(seed, kinds, number, rows, width))
