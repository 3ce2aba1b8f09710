"""Weights of the graph-wise sum by distance stay unbiased; a bootstrapped cost-to-go does not."""

from __future__ import annotations

import pytest
from problems import scrambled
from steps import CHAIN

from pyro_bpq import LambdaReturn
from pyro_bpq.testing import assert_unbiased


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.9])
def test_bootstrapping_is_biased(lam: float) -> None:
    assert not LambdaReturn.is_unbiased
    with pytest.raises(AssertionError, match="biased"):
        assert_unbiased(scrambled(CHAIN, 20, estimator=LambdaReturn(lam)), *CHAIN.programs)


def test_bootstrapping_with_lambda_one_is_not() -> None:
    assert_unbiased(scrambled(CHAIN, 20, estimator=LambdaReturn(1.0)), *CHAIN.programs)
