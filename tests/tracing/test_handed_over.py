"""Guides that hand the model something made from their values, which the model alone does not show."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import fresh, repeat, stepped
from torch import Tensor

from pyro_bpq import AllAction, TraceBackpropQ_ELBO
from pyro_bpq.estimators import DebiasedStraightThrough, MuProp
from pyro_bpq.testing import ChoiceNoise, exact_gradient, expected_gradient
from pyro_bpq.testing.enumerable import enumerable_noise

F64 = torch.float64


def logits(*values: float) -> Tensor:
    return pyro.param("q", torch.tensor(values, dtype=F64))


class Whole:
    """The model reads what the guide made of its only site."""

    hidden: Tensor

    def guide(self) -> None:
        self.hidden = 2.0 * pyro.sample("z", dist.Bernoulli(logits=logits(0.3)[0]))

    def model(self) -> None:
        pyro.sample("z", dist.Bernoulli(torch.tensor(0.4, dtype=F64)))
        pyro.sample("x", dist.Normal(self.hidden, 1.0), obs=torch.tensor(1.3, dtype=F64))


class Both(Whole):
    """The model reads its own value, too."""

    def model(self) -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4, dtype=F64)))
        pyro.sample("x", dist.Normal(self.hidden + 0.5 * z, 1.0), obs=torch.tensor(1.3, dtype=F64))
        pyro.sample("y", dist.Normal(z, 1.0), obs=torch.tensor(0.2, dtype=F64))


class Two(Whole):
    """Another site is drawn in between."""

    def guide(self) -> None:
        super().guide()
        pyro.sample("b", dist.Bernoulli(logits=pyro.param("r", torch.tensor(0.4, dtype=F64)) * self.hidden - 0.2))

    def model(self) -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4, dtype=F64)))
        b = pyro.sample("b", dist.Bernoulli(0.2 + 0.5 * z))
        pyro.sample("x", dist.Normal(self.hidden + b, 1.0), obs=torch.tensor(1.3, dtype=F64))


class Rows(Whole):
    """In a plate, by a table."""

    def guide(self) -> None:
        with pyro.plate("rows", 2):
            z = pyro.sample("z", dist.Categorical(logits=logits(0.3, 0.1, -0.5)))
        self.hidden = torch.tensor([0.5, 2.0, -1.0], dtype=F64)[z]

    def model(self) -> None:
        with pyro.plate("rows", 2):
            pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.3, 0.3], dtype=F64)))
            pyro.sample("x", dist.Normal(self.hidden, 1.0), obs=torch.tensor([1.3, -0.3], dtype=F64))


class Bits(Whole):
    """A site of many components."""

    def guide(self) -> None:
        self.hidden = 2.0 * pyro.sample("z", dist.Bernoulli(logits=logits(0.3, 0.1, -0.4)).to_event(1)).sum(-1)

    def model(self) -> None:
        pyro.sample("z", dist.Bernoulli(torch.full((3,), 0.4, dtype=F64)).to_event(1))
        pyro.sample("x", dist.Normal(self.hidden, 1.0), obs=torch.tensor(1.3, dtype=F64))


class Prior(Whole):
    """The model's own distribution of a site reads it."""

    def model(self) -> None:
        pyro.sample("z", dist.Bernoulli(0.2 + 0.3 * self.hidden))
        pyro.sample("x", dist.Normal(self.hidden, 1.0), obs=torch.tensor(1.3, dtype=F64))


PROGRAMS = (Whole, Both, Two, Rows, Bits, Prior)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "exact": {"estimator": AllAction(exact=True)},
    "dense": {"structure": "dense"},
    "MuProp": {"estimator": MuProp()},
}


@pytest.fixture(autouse=True)
def start() -> None:
    fresh()


CASES = [
    (kind, options)
    for kind in PROGRAMS
    for options in OPTIONS
    # MuProp is not for Categorical; what else serves many components draws noise of its own, see below.
    if not ((options == "MuProp" and kind is Rows) or (options == "dense" and kind is Bits))
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_gradients_are_exact_with_trained_critics(kind: type[Whole], options: str) -> None:
    programs = kind()
    exact = exact_gradient(programs.model, programs.guide)
    elbo = stepped(20, TraceBackpropQ_ELBO(1, **OPTIONS[options]), programs.model, programs.guide)
    found = expected_gradient(elbo.eval(), programs.model, programs.guide)
    assert exact["q"].abs().max() > 1e-3
    for name, gradient in exact.items():
        assert (found[name] - gradient).abs().max() < 1e-10


def test_many_components_over_values_and_draws() -> None:
    noise, programs = ChoiceNoise(), Bits()
    exact = exact_gradient(programs.model, programs.guide)
    elbo = TraceBackpropQ_ELBO(1, estimator=DebiasedStraightThrough())
    with enumerable_noise(noise):
        repeat(20, elbo.loss_and_grads, programs.model, programs.guide)
        found = expected_gradient(elbo.eval(), programs.model, programs.guide, noise=noise)
    assert (found["q"] - exact["q"]).abs().max() < 1e-10
