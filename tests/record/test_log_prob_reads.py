"""Distributions of a user's own that look at values in Python while their log-probability is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import coin, real
from steps import WAYS, at_irregular
from torch import Tensor
from torch.distributions import constraints

from pyro_bpq.testing import assert_unbiased

Program = Callable[[], None]
DATA = real(0.7, -0.4)


# How a mean is looked up by a value.
LOOKS: dict[str, Callable[[Any], Any]] = {
    "branches": lambda z: 2.0 if z == 1 else -0.5,
    "numbers": lambda z: 2.5 * float(z) - 0.5,
    "arrays": lambda z: 2.5 * z.detach().numpy() - 0.5,
}


class Looks(dist.TorchDistribution):
    """A normal distribution whose mean is looked up when it is scored."""

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    support = constraints.real

    def __init__(self, z: Any, look: Callable[[Any], Any] = LOOKS["branches"]) -> None:
        self.z, self.look = z, look
        super().__init__(torch.as_tensor(z).shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        return dist.Normal(torch.as_tensor(self.look(self.z)).double(), 0.8).log_prob(value)


class Coin(dist.TorchDistribution):
    """A coin that looks at what it depends on when it is drawn and when it is scored."""

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    support = constraints.boolean
    has_enumerate_support = True

    def __init__(self, z: Tensor, logits: Tensor) -> None:
        self.z, self.logits = z, logits
        super().__init__(validate_args=False)

    @property
    def base(self) -> Any:
        return dist.Bernoulli(logits=self.logits if self.z == 1 else -2.0 * self.logits)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self.base.sample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.base.log_prob(value)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        return real(0.0, 1.0)


def two_costs(look: Callable[[Any], Any]) -> tuple[Program, Program]:
    """Both costs read what has left torch in the first of them, one of them by the other latent as well."""

    def guide() -> None:
        coin("z", pyro.param("q")[0])
        coin("w", pyro.param("q")[1])

    def model() -> None:
        z = coin("z", pyro.param("p")[0])
        w = coin("w", pyro.param("p")[1])
        pyro.sample("x", Looks(z, look), obs=DATA[0])
        pyro.sample("y", Looks(z, look), obs=DATA[1])
        pyro.sample("u", Looks(w, look), obs=DATA[1])

    return model, guide


def one_coin() -> None:
    coin("z", pyro.param("q")[0])


def later() -> tuple[Program, Program]:
    def model() -> None:
        z = coin("z", pyro.param("p")[0])
        keeps = Looks(0.0)
        pyro.sample("x", keeps, obs=DATA[0])
        keeps.z = int(z)  # after the statement

    return model, one_coin


def wrapped() -> tuple[Program, Program]:
    def model() -> None:
        z = coin("z", pyro.param("p")[0])
        pyro.sample("x", Looks(z, LOOKS["numbers"]).mask(True), obs=DATA[0])

    return model, one_coin


def chain() -> tuple[Program, Program]:
    """Draws of the guide, and their law, look at what was drawn before."""

    def guide() -> None:
        z = coin("z", pyro.param("q")[0])
        y = pyro.sample("y", Coin(z, pyro.param("q")[1]))
        pyro.sample("w", Coin(z + y - z * y, pyro.param("q")[2]))

    def model() -> None:
        z = coin("z", pyro.param("p")[0])
        y = pyro.sample("y", Coin(z, pyro.param("p")[1]))
        w = coin("w", pyro.param("p")[2])
        pyro.sample("x", dist.Normal(2.0 * w - y, 0.8), obs=DATA[0])

    return model, guide


def in_plate() -> tuple[Program, Program]:
    """A row of a plate is looked at by the cost of another."""

    def guide() -> None:
        with pyro.plate("rows", 2):
            coin("z", pyro.param("q")[:2])

    def model() -> None:
        with pyro.plate("rows", 2):
            z = coin("z", pyro.param("p")[:2])
            pyro.sample("x", Looks(z, lambda z: [2.0 * float(z[1]), 1.5 * float(z[0])]), obs=DATA)

    return model, guide


class Tempered(dist.Bernoulli):
    """A prior whose parameters do not tell its log-probability."""

    def log_prob(self, value: Tensor) -> Tensor:
        return 0.5 * super().log_prob(value) + 0.3 * value


def tempered(joint: bool) -> tuple[Program, Program]:
    def guide() -> None:
        logits = pyro.param("q")
        pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1) if joint else dist.Bernoulli(logits=logits[0]))

    def model() -> None:
        logits = pyro.param("p")
        z = pyro.sample("z", Tempered(logits=logits).to_event(1) if joint else Tempered(logits=logits[0]))
        pyro.sample("x", dist.Normal(2.0 * z.sum(-1) if joint else 2.0 * z, 0.8), obs=DATA[0])

    return model, guide


PROGRAMS: dict[str, tuple[Program, Program]] = {
    **{name: two_costs(look) for name, look in LOOKS.items()},
    **{make.__name__: make() for make in (later, wrapped, chain, in_plate)},
    "tempered": tempered(False),
    "tempered_event": tempered(True),
}
OPTIONS = ("default", "score_function", "no_critic", "dynamic", "two")
# What serves many components by default draws noise of its own.
CASES = [(name, own) for name in PROGRAMS for own in OPTIONS if name != "tempered_event" or "estimator" in WAYS[own]]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_what_is_read_while_scoring_is_charged(name: str, options: str) -> None:
    assert_unbiased(at_irregular("q p", 3, *PROGRAMS[name], **WAYS[options]), *PROGRAMS[name])


def test_costs_are_told_apart_as_far_as_they_read() -> None:
    """A cost reads what it looks at, and not what another one does later on."""

    def model() -> None:
        z, w = coin("z", pyro.param("p")[0]), coin("w", pyro.param("p")[1])
        pyro.sample("x", dist.Normal(z, 0.8), obs=DATA[0])
        pyro.sample("y", Looks(w), obs=DATA[1])

    graph = at_irregular("q p", 3, model, PROGRAMS["branches"][1]).graph
    assert set(graph.cost("-log p(x)").parents) == {"z"} and set(graph.cost("-log p(y)").parents) == {"w"}
