"""Weights of the graph-wise sum by distance stay unbiased; a bootstrapped cost-to-go does not."""

from __future__ import annotations

import pytest
import torch
from models import BY_NAME
from steps import scramble, trained
from torch import Tensor

from pyro_bpq import LambdaReturn, TraceBackpropQ_ELBO
from pyro_bpq.testing import assert_unbiased, exact_gradient, expected_gradient

CHAIN = BY_NAME["chain"]


def train(elbo: TraceBackpropQ_ELBO, steps: int = 20) -> TraceBackpropQ_ELBO:
    return trained(elbo, *CHAIN.programs, params=CHAIN.params, steps=steps).eval()


def scrambled(elbo: TraceBackpropQ_ELBO) -> TraceBackpropQ_ELBO:
    scramble(elbo.critics.weights().values())
    return elbo


def gradient(elbo: TraceBackpropQ_ELBO) -> Tensor:
    found = expected_gradient(elbo, CHAIN.model, CHAIN.guide)
    return torch.cat([found[name].flatten() for name in ("qa", "qb", "qc")])


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.9])
def test_bootstrapping_is_biased(lam: float) -> None:
    assert not LambdaReturn.is_unbiased
    elbo = scrambled(train(TraceBackpropQ_ELBO(estimator=LambdaReturn(lam))))
    with pytest.raises(AssertionError):
        assert_unbiased(elbo, CHAIN.model, CHAIN.guide)


def test_bootstrapping_with_lambda_one_is_not() -> None:
    elbo = scrambled(train(TraceBackpropQ_ELBO(estimator=LambdaReturn(1.0))))
    assert_unbiased(elbo, CHAIN.model, CHAIN.guide)


def test_bias_of_trained_critics_is_small() -> None:
    elbo = train(TraceBackpropQ_ELBO(estimator=LambdaReturn(0.5)), 300)
    truth = exact_gradient(CHAIN.model, CHAIN.guide)
    exact = torch.cat([truth[name].flatten() for name in ("qa", "qb", "qc")])
    assert float((gradient(elbo) - exact).norm()) < 0.2 * float(exact.norm())
