"""Small programs that together use all that Pyro offers, and the ways to train them.

A program takes an accessor of parameters, ``p(name, start, constraint)``, so that the same text runs on Pyro's param
store (:func:`store`) and as a module with parameters of its own (:class:`Host`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer.reparam import LocScaleReparam
from pyro.nn import PyroModule, PyroParam
from torch import Tensor

from pyro_bpq.testing import TwoPoint

Param = Callable[..., Tensor]
REAL = constraints.real


def store(name: str, start: Any, constraint: Any = REAL) -> Tensor:
    """A parameter of Pyro's param store."""
    value: Tensor = pyro.param(name, torch.as_tensor(start, dtype=torch.float64), constraint=constraint)
    return value


class Host(PyroModule):
    """A program as a module that owns its parameters; they appear at its first call."""

    def __init__(self, program: Callable[..., Any]) -> None:
        super().__init__()
        self.program = program

    def p(self, name: str, start: Any, constraint: Any = REAL) -> Tensor:
        if not hasattr(self, name):
            setattr(self, name, PyroParam(torch.as_tensor(start, dtype=torch.float64), constraint))
        value: Tensor = getattr(self, name)
        return value

    def forward(self, *args: Any) -> Any:
        return self.program(self.p, *args)


@dataclass(frozen=True)
class Animal:
    """A model and guide with the arguments of successive steps.

    ``is_vectorisable``: both run with a particle dimension to the left of their plates. ``warns``: a part of the
    text of the warning that Pyro's own ELBOs raise too.
    """

    name: str
    model: Callable[..., Any]
    guide: Callable[..., Any]
    calls: tuple[tuple[Any, ...], ...] = ((), (), ())
    is_vectorisable: bool = True
    warns: str | None = None

    def programs(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return functools.partial(self.model, store), functools.partial(self.guide, store)


ANIMALS: list[Animal] = []


def animal(
    guide: Callable[..., Any], calls: Sequence[tuple[Any, ...]] = ((), (), ()), **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the decorated model with this guide to the zoo."""

    def add(model: Callable[..., Any]) -> Callable[..., Any]:
        ANIMALS.append(Animal(model.__name__, model, guide, tuple(calls), **options))
        return model

    return add


def each_animal(keep: Callable[[Animal], bool] = lambda each: True) -> pytest.MarkDecorator:
    """Parametrises a test over ``each``, those for which ``keep`` holds."""
    return pytest.mark.parametrize("each", [pytest.param(a, id=a.name) for a in ANIMALS if keep(a)])


def coin(name: str, logits: Any, **kwargs: Any) -> Tensor:
    value: Tensor = pyro.sample(name, dist.Bernoulli(logits=torch.as_tensor(logits)), **kwargs)
    return value


def see(name: str, mean: Any, value: Any, noise: Any = 0.8) -> Tensor:
    mean = torch.as_tensor(mean, dtype=torch.float64)
    seen: Tensor = pyro.sample(name, dist.Normal(mean, noise), obs=torch.as_tensor(value, dtype=torch.float64))
    return seen


DATA = torch.tensor([0.3, -0.8, 1.4, 0.5, -0.1], dtype=torch.float64)
BATCHES = ((DATA,), (DATA[:2],), (DATA[:3],), (DATA[:1],))


# No latents, no parameters, nothing at all.


def nothing_guide(p: Param, *args: Any) -> None:
    pass


@animal(nothing_guide)
def nothing(p: Param) -> None:
    pass


@animal(nothing_guide)
def no_latents(p: Param) -> None:
    see("x", p("mean", 0.2), 0.7)


def no_parameters_guide(p: Param) -> None:
    coin("z", 0.3)


@animal(no_parameters_guide)
def no_parameters(p: Param) -> None:
    see("x", coin("z", 0.0), 0.7)


# Plates.


def one_plate_guide(p: Param, data: Tensor) -> None:
    with pyro.plate("rows", len(data)):
        coin("z", p("slope", 0.4) * data + p("shift", 0.1))


@animal(one_plate_guide, BATCHES)
def one_plate(p: Param, data: Tensor) -> None:
    with pyro.plate("rows", len(data)):
        see("x", p("mean", 0.2) + coin("z", p("prior", 0.0)), data)


def unsized_plate_guide(p: Param, data: Tensor) -> None:
    with pyro.plate("rows"):
        coin("z", p("slope", 0.4) * data)
        coin("w", p("shift", 0.1))


@animal(unsized_plate_guide, BATCHES)
def unsized_plate(p: Param, data: Tensor) -> None:
    with pyro.plate("rows"):
        w = coin("w", p("pw", 0.0))
        see("x", p("mean", 0.2) + coin("z", p("prior", torch.zeros(1)).expand(data.shape)) * w, data)


def nested_plates_guide(p: Param) -> None:
    with pyro.plate("outer", 3, dim=-2):
        a = coin("a", p("qa", 0.2))
        with pyro.plate("inner", 2, dim=-1):
            coin("b", p("qb", -0.3) + a)


@animal(nested_plates_guide)
def nested_plates(p: Param) -> None:
    with pyro.plate("outer", 3, dim=-2):
        a = coin("a", p("pa", 0.0))
        with pyro.plate("inner", 2, dim=-1):
            see("x", a + coin("b", p("pb", 0.5)), 0.4)


def crossed_plates_guide(p: Param) -> None:
    rows, columns = pyro.plate("rows", 3, dim=-1), pyro.plate("columns", 2, dim=-2)
    with rows:
        coin("a", p("qa", [0.2, 0.1, -0.4]))
    with columns:
        coin("b", p("qb", -0.3))


@animal(crossed_plates_guide)
def crossed_plates(p: Param) -> None:
    rows, columns = pyro.plate("rows", 3, dim=-1), pyro.plate("columns", 2, dim=-2)
    with rows:
        a = coin("a", p("pa", 0.0))
    with columns:
        b = coin("b", p("pb", 0.5))
    with rows, columns:
        see("x", a * b, torch.ones(2, 3))


def pooled_plate_guide(p: Param) -> None:
    with pyro.plate("rows", 4):
        z = coin("z", p("qz", 0.2))
    coin("top", p("qtop", 0.3) + z.sum(-1, keepdim=True) * 0.2)


@animal(pooled_plate_guide)
def pooled_plate(p: Param) -> None:
    with pyro.plate("rows", 4):
        z = coin("z", p("pz", 0.0))
    top = coin("top", p("ptop", 0.0))
    see("x", top * z.sum(-1, keepdim=True), 1.0)


def subsampled_guide(p: Param, data: Tensor) -> None:
    with pyro.plate("rows", len(data), subsample_size=2) as rows:
        coin("z", p("qz", torch.zeros(5))[rows])


@animal(subsampled_guide, [(DATA,)] * 4)
def subsampled(p: Param, data: Tensor) -> None:
    with pyro.plate("rows", len(data), subsample_size=2) as rows:
        see("x", p("mean", 0.1) + coin("z", p("pz", 0.3)), data[rows])


def subsampled_by_data_guide(p: Param, data: Tensor) -> None:
    g = coin("g", p("qg", 0.2))
    with pyro.plate("rows", 5, subsample=data):
        coin("z", p("qz", 0.1) + g.long())


@animal(subsampled_by_data_guide, [(torch.tensor(rows),) for rows in ([0, 1, 2], [3, 4], [0, 4, 2])])
def subsampled_by_data(p: Param, rows: Tensor) -> None:
    g = coin("g", p("pg", 0.2))
    with pyro.plate("rows", 5, subsample=rows):
        see("x", g + coin("z", p("pz", 0.3)), DATA[rows])


def sequential_plate_guide(p: Param) -> None:
    g = coin("g", p("qg", 0.1))
    for i in pyro.plate("steps", 4, subsample_size=3):
        coin(f"z_{i}", p("qz", torch.zeros(4))[i] + g)


@animal(sequential_plate_guide)
def sequential_plate(p: Param) -> None:
    g = coin("g", p("pg", 0.0))
    for i in pyro.plate("steps", 4, subsample_size=3):
        see(f"x_{i}", g + coin(f"z_{i}", p("pz", 0.2)), 0.1 * i)


def sequential_in_plate_guide(p: Param) -> None:
    with pyro.plate("rows", 3):
        for i in pyro.plate("steps", 2):
            coin(f"z_{i}", p("qz", torch.zeros(2, 3))[i])


@animal(sequential_in_plate_guide)
def sequential_in_plate(p: Param) -> None:
    with pyro.plate("rows", 3):
        for i in pyro.plate("steps", 2):
            see(f"x_{i}", coin(f"z_{i}", p("pz", 0.2)), DATA[:3])


def plate_in_sequential_guide(p: Param) -> None:
    for i in pyro.plate("steps", 2):
        with pyro.plate(f"rows_{i}", 2 + i):
            coin(f"z_{i}", p(f"qz_{i}", torch.zeros(2 + i)))


@animal(plate_in_sequential_guide)
def plate_in_sequential(p: Param) -> None:
    for i in pyro.plate("steps", 2):
        with pyro.plate(f"rows_{i}", 2 + i):
            see(f"x_{i}", coin(f"z_{i}", p("pz", 0.2)), DATA[: 2 + i])


def vector_site_guide(p: Param) -> None:
    with pyro.plate("rows", 2):
        z = pyro.sample("z", dist.Bernoulli(logits=p("qz", torch.zeros(2, 3))).to_event(1))
        pyro.sample("c", dist.Categorical(logits=z @ p("qc", torch.eye(3))))


@animal(vector_site_guide)
def vector_site(p: Param) -> None:
    with pyro.plate("rows", 2):
        z = pyro.sample("z", dist.Bernoulli(logits=p("pz", torch.zeros(3))).to_event(1))
        c = pyro.sample("c", dist.Categorical(logits=p("pc", torch.zeros(3))))
        see("x", z.sum(-1) * (1 + c), DATA[:2])


# Order and time.


def markov_guide(p: Param) -> None:
    z = torch.zeros(())
    for t in pyro.markov(range(4)):
        z = coin(f"z_{t}", p("qz", torch.zeros(4))[t] + p("carry", 0.3) * z)


@animal(markov_guide)
def markov(p: Param) -> None:
    z = torch.zeros(())
    for t in pyro.markov(range(4)):
        z = coin(f"z_{t}", p("pz", 0.1) + p("keep", 0.5) * z)
        see(f"x_{t}", z, 0.2 * t)


def markov_in_plate_guide(p: Param, data: Tensor) -> None:
    with pyro.plate("rows", len(data)):
        z = torch.zeros(len(data), dtype=torch.long)
        for t in pyro.markov(range(3)):
            z = pyro.sample(f"z_{t}", dist.Categorical(logits=p("qz", torch.zeros(3, 3))[z]))


@animal(markov_in_plate_guide, BATCHES)
def markov_in_plate(p: Param, data: Tensor) -> None:
    with pyro.plate("rows", len(data)):
        z = torch.zeros(len(data), dtype=torch.long)
        for t in pyro.markov(range(3)):
            z = pyro.sample(f"z_{t}", dist.Categorical(logits=p("pz", torch.zeros(3, 3))[z]))
            see(f"x_{t}", p("mean", [-1.0, 0.0, 1.0])[z], data)


def reordered_guide(p: Param) -> None:
    c = coin("c", p("qc", 0.2))
    a = coin("a", p("qa", 0.1) + c)
    coin("b", p("qb", 0.1) * a)


@animal(reordered_guide)
def reordered(p: Param) -> None:
    a = coin("a", p("pa", 0.2))
    b = coin("b", p("pb", 0.1) + a)
    c = coin("c", p("pc", 0.1) + b)
    see("x", a + b * c, 1.2)


# Weights.


def weighted_guide(p: Param) -> None:
    with pyro.plate("rows", 3), poutine.mask(mask=torch.tensor([True, False, True])):
        coin("z", p("qz", torch.zeros(3)))
    with poutine.scale(scale=0.5):
        coin("w", p("qw", 0.0))


@animal(weighted_guide)
def weighted(p: Param) -> None:
    with pyro.plate("rows", 3), poutine.mask(mask=torch.tensor([True, False, True])):
        z = coin("z", p("pz", 0.2))
        with poutine.scale(scale=2.0):
            see("x", z, DATA[:3])
    with poutine.scale(scale=0.5):
        w = coin("w", p("pw", 0.1))
    see("y", w, 0.3)


def masked_distribution_guide(p: Param) -> None:
    with pyro.plate("rows", 3):
        pyro.sample("z", dist.Bernoulli(logits=p("qz", torch.zeros(3))).mask(DATA[:3] > 0))


@animal(masked_distribution_guide)
def masked_distribution(p: Param) -> None:
    with pyro.plate("rows", 3):
        z = pyro.sample("z", dist.Bernoulli(logits=p("pz", 0.2)).mask(DATA[:3] > 0))
        see("x", z, DATA[:3])


def annealed_guide(p: Param, weight: float) -> None:
    with poutine.scale(scale=weight):
        coin("z", p("qz", 0.2))


@animal(annealed_guide, [(0.1,), (0.5,), (1.0,)])
def annealed(p: Param, weight: float) -> None:
    with poutine.scale(scale=weight):
        z = coin("z", p("pz", 0.2))
    see("x", z, 0.4)


def scaled_outside_guide(p: Param) -> None:
    coin("z", p("qz", 0.2))


@poutine.scale(scale=0.01)
def _scaled(p: Param) -> None:
    see("x", coin("z", p("pz", 0.2)), 0.4)


@animal(poutine.scale(scale=0.01)(scaled_outside_guide))
def scaled_outside(p: Param) -> None:
    _scaled(p)


OBSERVED = torch.tensor([True, False, True])


def observed_in_part_guide(p: Param) -> None:
    with pyro.plate("rows", 3), poutine.mask(mask=~OBSERVED):
        coin("z_unobserved", p("qz", torch.zeros(3)))


@animal(observed_in_part_guide)
def observed_in_part(p: Param) -> None:
    with pyro.plate("rows", 3):
        z = pyro.sample("z", dist.Bernoulli(logits=p("pz", 0.2)), obs=torch.ones(3), obs_mask=OBSERVED)
        see("x", z, DATA[:3])


def factors_guide(p: Param) -> None:
    z = coin("z", p("qz", 0.1))
    pyro.factor("bonus", p("weight", 0.2) * z, has_rsample=False)


@animal(factors_guide)
def factors(p: Param) -> None:
    z = coin("z", p("pz", 0.1))
    pyro.factor("malus", p("cost", 0.2) * z)
    with pyro.plate("rows", 3):
        pyro.factor("row", -z * DATA[:3])


def rsample_factor_guide(p: Param) -> None:
    x = pyro.sample("x", dist.Normal(p("loc", 0.1), 1.0))
    pyro.factor("volume", p("weight", 0.3) * x, has_rsample=True)


@animal(rsample_factor_guide)
def rsample_factor(p: Param) -> None:
    see("y", pyro.sample("x", dist.Normal(0.0, 1.0)), 0.7)


# Handlers.


def auxiliary_guide(p: Param) -> None:
    a = coin("a", p("qa", 0.1), infer={"is_auxiliary": True})
    coin("z", p("qz", 0.3) * a)


@animal(auxiliary_guide)
def auxiliary(p: Param) -> None:
    see("x", coin("z", p("pz", 0.1)), 0.7)


def untraced_guide(p: Param) -> None:
    a = coin("a", p("qa", 0.1), infer={"is_auxiliary": True, "_do_not_trace": True})
    coin("z", p("qz", 0.3) * a)


@animal(untraced_guide)
def untraced(p: Param) -> None:
    see("x", coin("z", p("pz", 0.1)), 0.7)


def deterministic_guide(p: Param) -> None:
    z = coin("z", p("qz", 0.1))
    coin("w", z * p("qw", 0.2))


@animal(deterministic_guide)
def deterministic(p: Param) -> None:
    z = pyro.deterministic("double", 2 * coin("z", p("pz", 0.3)))
    see("x", z + coin("w", p("pw", 0.2)), 0.7)


def hidden_guide(p: Param) -> None:
    coin("z", p("qz", 0.1))


def _hidden(p: Param) -> None:
    noise = pyro.sample("noise", dist.Normal(0.0, 1.0))
    see("x", coin("z", p("pz", 0.1)) + 0.1 * noise, 0.7)


@animal(hidden_guide)
def hidden(p: Param) -> None:
    poutine.block(_hidden, hide=["noise"])(p)


def conditioned_guide(p: Param) -> None:
    coin("z", p("qz", 0.1))


def _conditioned(p: Param) -> None:
    z = coin("z", p("pz", 0.1))
    pyro.sample("x", dist.Normal(z, p("noise", 0.5, constraints.positive)))


@animal(conditioned_guide)
def conditioned(p: Param) -> None:
    poutine.condition(_conditioned, data={"x": torch.tensor(0.4)})(p)


def reparameterised_guide(p: Param) -> None:
    coin("z", p("qz", 0.1))
    pyro.sample("x_decentered", dist.Normal(p("loc", 0.1), p("scale", 0.7, constraints.positive)))


def _reparameterised(p: Param) -> None:
    z = coin("z", p("pz", 0.1))
    see("y", pyro.sample("x", dist.Normal(z, 2.0)), 0.6)


@animal(reparameterised_guide)
def reparameterised(p: Param) -> None:
    poutine.reparam(_reparameterised, config={"x": LocScaleReparam(0.0)})(p)


# Distributions.


def mixed_kinds_guide(p: Param) -> None:
    z = coin("z", p("qz", 0.1))
    x = pyro.sample("x", dist.Normal(p("loc", 0.1) + z, p("scale", 0.7, constraints.positive)))
    coin("w", p("qw", 0.2) * x)


@animal(mixed_kinds_guide)
def mixed_kinds(p: Param) -> None:
    z = coin("z", p("pz", 0.1))
    x = pyro.sample("x", dist.Normal(z, 1.0))
    see("y", x * coin("w", p("pw", 0.1)), 0.6)


FAMILIES: dict[str, Callable[[Tensor], Any]] = {
    "Bernoulli": lambda q: dist.Bernoulli(logits=q[0]),
    "Binomial": lambda q: dist.Binomial(3, logits=q[0]),
    "BetaBinomial": lambda q: dist.BetaBinomial(q[0].exp(), q[1].exp(), 3),
    "Categorical": lambda q: dist.Categorical(logits=q),
    "Geometric": lambda q: dist.Geometric(logits=q[0]),
    "MixtureSameFamily": lambda q: dist.MixtureSameFamily(dist.Categorical(logits=q), dist.Normal(q, 1.0)),
    "Multinomial": lambda q: dist.Multinomial(2, logits=q),
    "NegativeBinomial": lambda q: dist.NegativeBinomial(2.0, logits=q[0]),
    "Normal": lambda q: dist.Normal(q[0], q[1].exp()),
    "Normal.nonreparam": lambda q: dist.Normal(q[0], 1.0).has_rsample_(False),
    "Normal.event": lambda q: dist.Normal(q, 1.0).to_event(1),
    "OneHotCategorical": lambda q: dist.OneHotCategorical(logits=q),
    "OneHotStraightThrough": lambda q: dist.OneHotCategoricalStraightThrough(logits=q),
    "OrderedLogistic": lambda q: dist.OrderedLogistic(q[0], torch.tensor([-1.0, 1.0])),
    "Poisson": lambda q: dist.Poisson(q[0].exp()),
    "RelaxedBernoulli": lambda q: dist.RelaxedBernoulliStraightThrough(torch.tensor(0.5), logits=q[0]),
    "TwoPoint": lambda q: TwoPoint(q[0], q[1].exp()),
    "Uniform.nonreparam": lambda q: dist.Uniform(0.0, 1.0).has_rsample_(False),
    "VonMises": lambda q: dist.VonMises(q[0], q[1].exp()),
    "ZeroInflatedPoisson": lambda q: dist.ZeroInflatedPoisson(q[0].exp(), gate_logits=q[1]),
}


def family(name: str) -> Animal:
    """An animal whose latent has this distribution."""

    def model(p: Param) -> None:
        z = pyro.sample("z", FAMILIES[name](p("pq", [0.1, -0.2, 0.3])))
        see("x", z.reshape(-1).to(torch.float64)[0] if name in EVENTS else z, 0.4)

    def guide(p: Param) -> None:
        pyro.sample("z", FAMILIES[name](p("gq", [0.2, 0.1, -0.3])))

    return Animal(name, model, guide, is_vectorisable=name not in EVENTS)


EVENTS = ("Multinomial", "Normal.event", "OneHotCategorical", "OneHotStraightThrough")
ANIMALS += [family(name) for name in FAMILIES]


def impossible_guide(p: Param) -> None:
    pyro.sample("z", dist.Categorical(logits=torch.cat((p("qz", [0.1, 0.2]), torch.tensor([-torch.inf])))))


@animal(impossible_guide, is_vectorisable=False)
def impossible(p: Param) -> None:
    z = pyro.sample("z", dist.Categorical(probs=torch.tensor([0.5, 0.5, 0.0])))
    see("x", z, 0.4)


# Enumeration marks: Pyro warns, then the site is sampled.


def enumerated_guide(p: Param) -> None:
    coin("z", p("qz", 0.1), infer={"enumerate": "parallel"})


@animal(enumerated_guide, warns="TraceEnum_ELBO")
def enumerated(p: Param) -> None:
    see("x", coin("z", p("pz", 0.2)), 0.4)


# Python looks at values.


def branching_guide(p: Param) -> None:
    if coin("z", p("qz", 0.1)).item():
        coin("w", p("qw", 0.3))


@animal(branching_guide, ((),) * 6, is_vectorisable=False)
def branching(p: Param) -> None:
    if coin("z", p("pz", 0.2)).item():
        see("x", coin("w", p("pw", 0.1)), 0.3)
    else:
        see("y", p("mean", 0.1), 0.3)


def of_random_length_guide(p: Param) -> None:
    length = 0
    while length < 4 and coin(f"go_{length}", p("qgo", torch.zeros(4))[length]):
        length += 1


@animal(of_random_length_guide, ((),) * 6, is_vectorisable=False)
def of_random_length(p: Param) -> None:
    length = 0
    while length < 4 and coin(f"go_{length}", p("pgo", 0.3)):
        length += 1
    see("x", p("mean", 0.4) * length, 1.3)


def of_changing_length_guide(p: Param, length: int) -> None:
    for t in range(length):
        coin(f"z_{t}", p("qz", torch.zeros(5))[t])


@animal(of_changing_length_guide, [(2,), (3,), (1,), (0,), (5,), (2,)])
def of_changing_length(p: Param, length: int) -> None:
    total = sum((coin(f"z_{t}", p("pz", 0.3)) for t in range(length)), torch.zeros(()))
    see("x", total, 0.6)


def buffered_guide(p: Param) -> None:
    for t in range(3):
        coin(f"z_{t}", p("qz", torch.zeros(3))[t])


@animal(buffered_guide, is_vectorisable=False)
def buffered(p: Param) -> None:
    buffer = torch.zeros(3)
    for t in range(3):
        buffer[t] = coin(f"z_{t}", p("pz", 0.3))
    see("x", buffer.sum(), 0.6)


def in_numpy_guide(p: Param) -> None:
    pyro.sample("k", dist.Poisson(p("rate", 1.5, constraints.positive)))


@animal(in_numpy_guide, ((),) * 5, is_vectorisable=False)
def in_numpy(p: Param) -> None:
    k = pyro.sample("k", dist.Poisson(2.0))
    see("x", p("mean", 0.2) * float(k.numpy() ** 2), 1.0)


# Modules.


class Tower(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(1, 4), torch.nn.Linear(4, 1)
        self.norm = torch.nn.BatchNorm1d(4)
        self.scale = PyroParam(torch.tensor(1.0), constraints.positive)

    def forward(self, data: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(data.unsqueeze(-1))))
        value: Tensor = self.second(hidden).squeeze(-1) * self.scale
        return value
