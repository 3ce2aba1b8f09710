"""Weights of the graph-wise sum by distance stay unbiased; a bootstrapped cost-to-go does not."""

from __future__ import annotations

import pytest
import torch
from problems import scrambled
from steps import CHAIN, settled

from pyro_bpq import LambdaReturn
from pyro_bpq.testing import assert_unbiased, expected_gradient


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.9])
def test_bootstrapping_is_biased(lam: float) -> None:
    assert not LambdaReturn.is_unbiased
    with pytest.raises(AssertionError, match="biased"):
        assert_unbiased(scrambled(CHAIN, 20, estimator=LambdaReturn(lam)), *CHAIN.programs)


def test_bootstrapping_with_lambda_one_is_not() -> None:
    assert_unbiased(scrambled(CHAIN, 20, estimator=LambdaReturn(1.0)), *CHAIN.programs)


def test_bias_of_trained_critics_is_small() -> None:
    elbo = settled(CHAIN, 300, estimator=LambdaReturn(0.5)).eval()
    truth, found = (
        torch.cat([own[name].flatten() for name in ("qa", "qb", "qc")])
        for own in (CHAIN.exact(), expected_gradient(elbo, *CHAIN.programs))
    )
    assert float((found - truth).norm()) < 0.2 * float(truth.norm())
