"""Straight-through differences, made exact by one drawn difference: over every value and every draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import real
from steps import trained

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import DebiasedStraightThrough, MuProp
from pyro_bpq.testing import ChoiceNoise, exact_gradient, expected_gradient
from pyro_bpq.testing.enumerable import enumerable_noise

ROWS = 2


def bits_guide() -> None:
    with pyro.plate("rows", ROWS):
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q").expand(ROWS, 3)).to_event(1))


def bits_model() -> None:
    with pyro.plate("rows", ROWS):
        z = pyro.sample("z", dist.Bernoulli(logits=torch.zeros(ROWS, 3, dtype=torch.float64)).to_event(1))
        logits = (z @ pyro.param("w") - 0.4).square() - 1.0
        pyro.sample("x", dist.Bernoulli(logits=logits).to_event(1), obs=torch.eye(ROWS, dtype=torch.float64))


def faces_guide() -> None:
    pyro.sample("z", dist.OneHotCategorical(logits=pyro.param("q").reshape(2, 3)).to_event(1))


def faces_model() -> None:
    z = pyro.sample("z", dist.OneHotCategorical(logits=torch.zeros(2, 3, dtype=torch.float64)).to_event(1))
    mean = (z * pyro.param("w").reshape(2, 3)).sum((-1, -2)) ** 2
    pyro.sample("x", dist.Normal(mean, 0.7), obs=real(0.8).squeeze())


PROGRAMS = {
    "bits": (
        bits_model,
        bits_guide,
        {"q": real(0.4, -0.9, 0.2), "w": real(0.8, -0.3, 1.1, 0.5, -0.7, 0.2).reshape(3, 2)},
    ),
    "faces": (
        faces_model,
        faces_guide,
        {"q": real(0.4, -0.9, 0.2, 0.1, 0.7, -0.5), "w": real(0.8, -0.3, 1.1, 0.5, -0.7, 0.2)},
    ),
}
Program = Callable[[], None]


def train(name: str, estimator: Any, **options: Any) -> tuple[TraceBackpropQ_ELBO, Program, Program]:
    """An ELBO with running statistics of some steps, and fresh parameters."""
    model, guide, values = PROGRAMS[name]

    def params() -> None:
        pyro.clear_param_store()
        for key, value in values.items():
            pyro.param(key, value.clone())

    elbo = TraceBackpropQ_ELBO(estimator=estimator, **options)
    return trained(elbo, model, guide, params=params).eval(), model, guide


def largest_error(name: str) -> float:
    """Between the exact gradient and the expected one, over all values and all draws of an entry."""
    elbo, model, guide = train(name, DebiasedStraightThrough())
    truth, noise = exact_gradient(model, guide), ChoiceNoise()
    with enumerable_noise(noise):
        found = expected_gradient(elbo, model, guide, noise=noise)
    return max(float((found[key] - truth[key]).abs().max()) for key in truth)


@pytest.mark.parametrize("name", PROGRAMS)
def test_expected_gradient_over_values_and_draws_is_exact(name: str) -> None:
    assert largest_error(name) < 1e-10


def test_a_correction_that_is_too_small_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    chances = DebiasedStraightThrough._chances
    monkeypatch.setattr(DebiasedStraightThrough, "_chances", lambda *arguments: 1.001 * chances(*arguments))
    assert largest_error("bits") > 1e-7


def total_variance(elbo: TraceBackpropQ_ELBO, model: Program, guide: Program, number: int) -> float:
    found = []
    for _ in range(number):
        pyro.param("q").unconstrained().grad = None
        elbo.loss_and_grads(model, guide)
        found.append(pyro.param("q").unconstrained().grad.clone())  # type: ignore[union-attr]
    return float(torch.stack(found).var(0).sum())


def linear_guide() -> None:
    pyro.sample("z", dist.Bernoulli(logits=pyro.param("q")).to_event(1))


def linear_model() -> None:
    z = pyro.sample("z", dist.Bernoulli(logits=torch.zeros(3, dtype=torch.float64)).to_event(1))
    pyro.factor("linear", (z * real(1.0, -2.0, 0.5)).sum())


@pytest.mark.parametrize("particles", [1, 2])
@pytest.mark.parametrize("estimator", [DebiasedStraightThrough(), MuProp()], ids=repr)
def test_linear_costs_have_no_variance(estimator: Any, particles: int) -> None:
    pyro.param("q", real(0.3, -0.8, 1.0))
    elbo = TraceBackpropQ_ELBO(particles, estimator=estimator).eval()
    assert total_variance(elbo, linear_model, linear_guide, 20) < 1e-20
