"""Recordings of numbers that the key of a call does not see: outdated ones cost variance, not bias."""

from __future__ import annotations

import math
import os
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import bias, trained

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import (
    AllAction,
    CrossedLeaveOneOut,
    DebiasedStraightThrough,
    DisARM,
    Hindsight,
    MuProp,
    SecondRun,
)
from pyro_bpq.testing import ChoiceNoise
from pyro_bpq.testing.enumerable import enumerable_noise


@pytest.fixture
def weight(monkeypatch):
    def put(number: float) -> None:
        monkeypatch.setenv("PYRO_BPQ_TEST_WEIGHT", str(number))

    return put


def number() -> float:
    return float(os.environ["PYRO_BPQ_TEST_WEIGHT"])


def model() -> None:
    w = number()
    a = pyro.sample("a", dist.Bernoulli(torch.tensor([0.3, 0.6])).to_event(1))
    b = pyro.sample("b", dist.Bernoulli(0.2 + 0.5 * a[..., :1]).to_event(1))
    pyro.factor("now", w * (2.0 * a[..., 0] - a[..., 1] ** 2 + w * a[..., 0] * a[..., 1]))
    pyro.factor("later", w * (a[..., 0] - 0.6) * (b[..., 0] + 0.3) - b[..., 0] * w * w)


def guide() -> None:
    p = pyro.param("p", lambda: torch.tensor([0.3, -0.4]))
    m = pyro.param("m", lambda: torch.tensor(0.8))
    a = pyro.sample("a", dist.Bernoulli(logits=p).to_event(1))
    pyro.sample("b", dist.Bernoulli(logits=m * (a - 0.4).sum(-1, keepdim=True)).to_event(1))


ESTIMATORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "values": (Hindsight(), {}),
    "values, two particles": (Hindsight(), {"num_particles": 2}),
    "values, plate": (Hindsight(), {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": 0}),
    "drawn": (Hindsight(draws=1), {}),
    "drawn, two particles": (Hindsight(draws=1), {"num_particles": 2}),
    "drawn, plate": (Hindsight(draws=1), {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": 0}),
    "tables": (AllAction(), {}),
    "second run": (SecondRun(), {}),
    "crossed": (CrossedLeaveOneOut(), {"num_particles": 2}),
    "mean": (MuProp(), {}),
    "antithetic": (DisARM(), {}),
    "antithetic, plate": (DisARM(), {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": 0}),
    "slopes": (DebiasedStraightThrough(), {}),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_gradients_stay_exact(name, weight):
    estimator, options = ESTIMATORS[name]
    weight(1.0)
    elbo = trained(TraceBackpropQ_ELBO(estimator=estimator, **options), model, guide, steps=3)
    elbo.eval().runner.recordings.now.next = math.inf
    weight(-2.5)
    noise = ChoiceNoise()
    with enumerable_noise(noise):
        assert bias(elbo, model, guide, noise=noise) < 1e-10
