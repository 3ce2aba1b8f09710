"""A site outside of a plate reads all of its rows: what reads it is charged to no row alone."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
from models import real
from steps import stepped

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.testing import assert_unbiased


def program(kind: str) -> None:
    q = pyro.param(f"{kind}z", real(0.4, -0.6, 0.9, 0.2).reshape(2, 2))
    rows = pyro.plate("rows", 2)
    with rows:
        z = pyro.sample("z", dist.Bernoulli(logits=q).to_event(1))
    y = pyro.sample("y", dist.Bernoulli(logits=1.5 * z[..., 0].sum(-1) - 1.0))
    if kind == "p":
        with rows:
            pyro.sample("x", dist.Normal(2.0 * y, 0.7), obs=real(1.4, -0.5))


@pytest.mark.parametrize("options", [{"estimator": ScoreFunction()}], ids=["score function"])
def test_costs_of_all_rows_reach_a_site_through_one_outside(options: dict) -> None:
    elbo = stepped(3, TraceBackpropQ_ELBO(1, **options), lambda: program("p"), lambda: program("q"))
    assert_unbiased(elbo.eval(), lambda: program("p"), lambda: program("q"))
