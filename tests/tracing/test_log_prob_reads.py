"""Distributions of a user's own that look at values in Python while their log-probability is computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import coin, fill, real
from pyro_bpq.record.tracer import _is_own
from steps import trained
from torch import Tensor
from torch.distributions import constraints

from pyro_bpq import AllAction, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.record.tape import Tape
from pyro_bpq.testing import assert_unbiased, exact_gradient

Program = Callable[[], None]
DATA = real(0.7, -0.4)


class Branches(dist.TorchDistribution):
    """A normal distribution whose mean is looked up by a value, when it is scored."""

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    support = constraints.real

    def __init__(self, z: Any) -> None:
        self.z = z
        super().__init__(validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        return dist.Normal(torch.tensor(2.0 if self.z == 1 else -0.5).double(), 0.8).log_prob(value)


class Numbers(Branches):
    def log_prob(self, value: Tensor) -> Tensor:
        return dist.Normal(torch.as_tensor(2.5 * float(self.z) - 0.5).double(), 0.8).log_prob(value)


class Arrays(Branches):
    def log_prob(self, value: Tensor) -> Tensor:
        return dist.Normal(torch.as_tensor(2.5 * self.z.detach().numpy() - 0.5), 0.8).log_prob(value)


class Keeps(Branches):
    """It is told a number after the statement."""

    def __init__(self) -> None:
        super().__init__(0.0)


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


def two_costs(kind: type[Branches]) -> tuple[Program, Program]:
    """Both costs read what has left torch in the first of them, one of them by the other latent as well."""

    def guide() -> None:
        coin("z", pyro.param("q")[0])
        coin("w", pyro.param("q")[1])

    def model() -> None:
        z = coin("z", pyro.param("p")[0])
        w = coin("w", pyro.param("p")[1])
        pyro.sample("x", kind(z), obs=DATA[0])
        pyro.sample("y", kind(z), obs=DATA[1])
        pyro.sample("u", kind(w), obs=DATA[1])

    return model, guide


def one_coin() -> None:
    coin("z", pyro.param("q")[0])


def later() -> tuple[Program, Program]:
    def model() -> None:
        z = coin("z", pyro.param("p")[0])
        keeps = Keeps()
        pyro.sample("x", keeps, obs=DATA[0])
        keeps.z = int(z)

    return model, one_coin


def wrapped() -> tuple[Program, Program]:
    def model() -> None:
        z = coin("z", pyro.param("p")[0])
        pyro.sample("x", Numbers(z).mask(True), obs=DATA[0])

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

    class Rows(Branches):
        def __init__(self, z: Tensor) -> None:
            self.z = z
            super(Branches, self).__init__(z.shape, validate_args=False)

        def log_prob(self, value: Tensor) -> Tensor:
            mean = torch.tensor([2.0 * float(self.z[1]), 1.5 * float(self.z[0])]).double()
            return dist.Normal(mean, 0.8).log_prob(value)

    def guide() -> None:
        with pyro.plate("rows", 2):
            coin("z", pyro.param("q")[:2])

    def model() -> None:
        with pyro.plate("rows", 2):
            z = coin("z", pyro.param("p")[:2])
            pyro.sample("x", Rows(z), obs=DATA)

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
    "branches": two_costs(Branches),
    "numbers": two_costs(Numbers),
    "arrays": two_costs(Arrays),
    "later": later(),
    "wrapped": wrapped(),
    "chain": chain(),
    "in_plate": in_plate(),
    "tempered": tempered(False),
    "tempered_event": tempered(True),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "score_function": {"estimator": ScoreFunction()},
    "all_action": {"estimator": AllAction(exact=False), "critic": None},
    "dynamic": {"structure": "dynamic"},
}


def train(model: Program, guide: Program, **options: Any) -> TraceBackpropQ_ELBO:
    """An ELBO that has seen a few steps, at parameters that have not moved."""
    elbo = TraceBackpropQ_ELBO(**{"num_particles": 1, **options})
    return trained(elbo, model, guide, params=partial(fill, ("q", "p"), 3), steps=5).eval()


# What serves many components by default draws noise of its own.
CASES = [(name, o) for name in PROGRAMS for o in OPTIONS if name != "tempered_event" or "estimator" in OPTIONS[o]]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_what_is_read_while_scoring_is_charged(name: str, options: str) -> None:
    model, guide = PROGRAMS[name]
    elbo = train(model, guide, **OPTIONS[options])
    assert exact_gradient(model, guide)["q"].abs().max() > 1e-2
    assert_unbiased(elbo, model, guide)


@pytest.mark.parametrize("name", ["branches", "chain"])
def test_two_particles(name: str) -> None:
    model, guide = PROGRAMS[name]
    assert_unbiased(train(model, guide, num_particles=2), model, guide)


@pytest.mark.parametrize("name", ["branches", "numbers", "arrays", "later", "wrapped", "in_plate"])
def test_reads_that_go_unseen_are_a_bias_that_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tape, "steer", lambda *_: None)
    model, guide = PROGRAMS[name]
    with pytest.raises(AssertionError, match="is biased"):
        assert_unbiased(train(model, guide, structure="dynamic"), model, guide)


def test_a_prior_of_ones_own_is_not_tabled_by_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_bpq.rollout.features._has_own_log_prob", lambda fn: False)
    model, guide = PROGRAMS["tempered"]
    with pytest.raises(AssertionError, match="is biased"):
        assert_unbiased(train(model, guide), model, guide)


def test_costs_are_told_apart_as_far_as_they_read() -> None:
    """A cost reads what it looks at, and not what another one does later on."""

    def guide() -> None:
        coin("z", pyro.param("q")[0])
        coin("w", pyro.param("q")[1])

    def model() -> None:
        z, w = coin("z", pyro.param("p")[0]), coin("w", pyro.param("p")[1])
        pyro.sample("x", dist.Normal(z, 0.8), obs=DATA[0])
        pyro.sample("y", Branches(w), obs=DATA[1])

    elbo = train(model, guide)
    assert elbo.graph is not None
    assert set(elbo.graph.cost("-log p(x)").parents) == {"z"}
    assert set(elbo.graph.cost("-log p(y)").parents) == {"w"}


def test_distributions_of_libraries_are_told_from_others() -> None:
    one = torch.ones(2)
    assert not _is_own(dist.Normal(one, one).to_event(1).mask(False))
    assert not _is_own(dist.TransformedDistribution(dist.Normal(one, one), [dist.transforms.ExpTransform()]))
    assert _is_own(Branches(one)) and _is_own(Branches(one).mask(True))
    assert _is_own(dist.MixtureSameFamily(dist.Categorical(one), Tempered(one / 2)))
