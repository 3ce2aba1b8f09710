"""The programs of a paper on static factorisation, written anew, with made-up data and fewer rows.

M. Böck and J. Cito, *Static factorisation of probabilistic programs with user-labelled sample statements and while
loops*, OOPSLA 2026 (arXiv:2508.20922), measure on twelve Pyro programs the variance of gradients. As there, guides are
mean-field and no site is reparameterised. Its hidden Markov model with a loop, and that without, run the same
statements: here they are one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from programs import Program
from pyro.ops.indexing import Vindex
from torch import Tensor
from torch.distributions import biject_to, constraints

Draw = Callable[[str, Any], Tensor]
See = Callable[[str, Any, Any], object]


class Moved(dist.TransformedDistribution):
    """A law that is not reparameterised, in plates either."""

    has_rsample = False


def law(name: str, prior: Any) -> Any:
    """The guide's law of a site: logits of its own, or a normal distribution that is moved to the support."""

    def own(part: str, *size: int) -> Tensor:
        return pyro.param(f"{name}_{part}", lambda: torch.zeros(size))

    if isinstance(prior, dist.Bernoulli):
        return dist.Bernoulli(logits=own("logit"))
    if prior.support.is_discrete:
        # Of a Poisson law the first values.
        return dist.Categorical(logits=own("logits", prior.probs.shape[-1] if hasattr(prior, "probs") else 11))
    into = biject_to(prior.support)
    size = into.inverse_shape(prior.event_shape)
    normal = dist.Normal(own("loc", *size), own("scale", *size).exp()).has_rsample_(False)
    return normal if prior.support is constraints.real else Moved(normal, [into])


class Published:
    """Model and guide of a program that is written with ``draw(name, prior)`` and ``see(name, law, value)``.

    Args:
        body: The program.
        guide: What the guide runs, if it is not the same.
    """

    def __init__(self, body: Callable[[Draw, See], None], guide: Callable[[Draw, See], None] | None = None) -> None:
        self.body, self.own = body, guide or body

    def model(self) -> None:
        self.body(pyro.sample, lambda name, law, value: pyro.sample(name, law, obs=torch.as_tensor(value)))

    def guide(self) -> None:
        self.own(lambda name, prior: pyro.sample(name, law(name, prior)), lambda *_: None)


def noise(*size: int) -> Tensor:
    """Always the same."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(0))


MOVE = torch.tensor([[0.1, 0.2, 0.7], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])
RULES = torch.tensor([[0.1, 0.2, 0.6, 0.1], [0.05, 0.8, 0.1, 0.05], [0.3, 0.3, 0.3, 0.1]])
STATES = 1.0 + noise(30).clamp(-1.0, 1.0).round() + noise(60)[30:]
POINTS = 10.0 * (torch.arange(20) % 4 - 1.5) + 2.0 * noise(20)
INPUTS = noise(80)
WORDS = torch.tensor([(n * n + 3 * (n // 6 % 2)) % 5 for n in range(24)])
# Of each node of the ALARM network its number of values, and those that it reads.
ALARM = (
    "3 4:0 2 4:2,1 3 2 3:5 2:4,5 2 2 4:4,9,3 4:4,9,3 4:4,11 4:4,11 3:13 4:14,11 3:8,13 3:16,7 2 3:18 2 2:14,20,17,19 "
    "3:21 2 3:23,22 3:23,22 2 3:26,22 2 2:28 2 3:30,28 3:31 3:31 3:30,28 3:22,34 3:35,19"
)


def aircraft(draw: Draw, see: See) -> None:
    """A number of aircraft, each with a position and up to two blips."""
    blips: list[Tensor] = []
    for i in range(1 + int(draw("aircraft", dist.Poisson(5.0)))):
        place = draw(f"place_{i}", dist.Normal(2.0, 5.0))
        number = int(draw(f"number_{i}", dist.Categorical(torch.tensor([0.1, 0.4, 0.5]))))
        blips += [draw(f"blip_{i}_{j}", dist.Normal(place, 1.0)) for j in range(number)]
    see("number", dist.Normal(float(len(blips)), 1.0), 3.0)
    for i, blip in enumerate((blips + [torch.zeros(())] * 3)[:3]):
        see(f"seen_{i}", dist.Normal(blip, 1.0), i + 1.0)


def network(draw: Draw, see: See) -> None:
    """A Bayesian network of 37 nodes, without data."""
    values, sizes = list[Tensor](), list[int]()
    for name, text in enumerate(ALARM.split()):
        size, _, read = text.partition(":")
        own = [int(parent) for parent in read.split(",") if parent]
        sizes.append(int(size))
        table = TABLES.setdefault(name, (2.0 * noise(*(sizes[i] for i in own), sizes[-1])).softmax(-1))
        values.append(draw(f"node_{name}", dist.Categorical(table[tuple(values[i] for i in own)] if own else table)))


TABLES: dict[int, Tensor] = {}


def geometric(draw: Draw, see: See) -> None:
    """A coin until it shows tails; the number of heads is seen, with noise."""
    heads = 0
    while draw(f"coin_{heads}", dist.Bernoulli(0.5)) == 1:
        heads += 1
    see("x", dist.Normal(float(heads), 1.0), 5.0)


def mixture(draw: Draw, see: See) -> None:
    """Four groups with means and variances of their own."""
    shares = draw("shares", dist.Dirichlet(torch.full((4,), 5.0)))
    means = torch.stack([draw(f"mean_{k}", dist.Normal(0.0, 10.0)) for k in range(4)], -1)
    variances = torch.stack([draw(f"variance_{k}", dist.InverseGamma(2.0, 10.0)) for k in range(4)], -1)
    for i, y in enumerate(POINTS):
        k = draw(f"k_{i}", dist.Categorical(shares))
        see(f"y_{i}", dist.Normal(Vindex(means)[..., k], Vindex(variances)[..., k].sqrt()), y)


def markov(draw: Draw, see: See) -> None:
    """A hidden Markov model of three states."""
    z = draw("start", dist.Categorical(torch.ones(3)))
    for t, y in enumerate(STATES):
        z = draw(f"z_{t}", dist.Categorical(MOVE[z]))
        see(f"y_{t}", dist.Normal(z.float(), 1.0), y)


def hurricane(draw: Draw, see: See) -> None:
    """Two cities prepare for a storm, the second after the damage of the first; which is the first is drawn."""
    first, before = int(draw("first", dist.Bernoulli(0.5))), 0.5
    for city in (first, 1 - first):
        prepared = draw(f"prepared_{city}", dist.Bernoulli(before))
        damage = draw(f"damage_{city}", dist.Bernoulli(0.2 if prepared == 1 else 0.8))
        before = 0.75 if damage == 1 else 0.5


def in_order(draw: Draw, see: See) -> None:
    """The sites of the storm, whichever city is the first."""
    for name in ("first", "prepared_0", "damage_0", "prepared_1", "damage_1"):
        draw(name, dist.Bernoulli(0.5))


def topics(draw: Draw, see: See) -> None:
    """Four documents of six words, of two topics."""
    shares = [draw(f"shares_{d}", dist.Dirichlet(torch.full((2,), 0.5))) for d in range(4)]
    words = torch.stack([draw(f"words_{k}", dist.Dirichlet(torch.full((5,), 0.2))) for k in range(2)], -2)
    for n, word in enumerate(WORDS):
        z = draw(f"z_{n}", dist.Categorical(shares[n // 6]))
        see(f"w_{n}", dist.Categorical(Vindex(words)[..., z, :]), word)


def regression(draw: Draw, see: See) -> None:
    """A line through points."""
    slope, level = draw("slope", dist.Normal(0.0, 3.0)), draw("level", dist.Normal(0.0, 3.0))
    for i, (x, y) in enumerate(zip(INPUTS[:40], INPUTS[40:], strict=True)):
        see(f"y_{i}", dist.Normal(slope * x + level, 1.0), 2.0 * x - 1.0 + y)


def marsaglia(draw: Draw, see: See) -> None:
    """Points of a square until one lies in the circle."""
    t, inside = 0, False
    while not inside:
        inside = sum(draw(f"{axis}_{t}", dist.Uniform(-1.0, 1.0)) ** 2 for axis in "xy") <= 1.0
        t += 1


def symbols(draw: Draw, see: See) -> None:
    """Symbols of a grammar until the last one."""
    symbol, t = draw("start", dist.Categorical(torch.ones(3))), 0
    while symbol != 3:
        symbol, t = draw(f"symbol_{t}", dist.Categorical(RULES[symbol])), t + 1


def pedestrian(draw: Draw, see: See) -> None:
    """A random walk until one is at home; the distance is seen."""
    place, distance, t = draw("place", dist.Uniform(0.0, 1.0)), 0.0, 0
    while place > 0.0 and distance < 10.0:
        step = draw(f"step_{t}", dist.Uniform(-1.0, 1.0))
        place, distance, t = place + step, distance + step.abs(), t + 1
    see("distance", dist.Normal(distance, 0.1), 1.1)


PUBLISHED = (
    Program("Bayesian network", lambda: Published(network)),
    Program("Gaussian mixture", lambda: Published(mixture)),
    Program("hidden Markov model", lambda: Published(markov)),
    Program("topics (LDA)", lambda: Published(topics)),
    Program("linear regression", lambda: Published(regression)),
    Program("aircraft", lambda: Published(aircraft), 0, True),
    Program("geometric", lambda: Published(geometric), 0, True),
    Program("hurricane", lambda: Published(hurricane, in_order), 0, True),
    Program("Marsaglia", lambda: Published(marsaglia), 0, True),
    Program("grammar (PCFG)", lambda: Published(symbols), 0, True),
    Program("pedestrian", lambda: Published(pedestrian), 0, True),
)
