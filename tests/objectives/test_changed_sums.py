"""Sums over all values follow a structure that changes at the same sites."""

from __future__ import annotations

import warnings

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.testing import assert_unbiased


def test_a_latent_that_is_used_later_is_found_at_the_next_check() -> None:
    x = torch.tensor([0.3, -1.0])

    def model(full: bool) -> None:
        w = pyro.param("w", torch.tensor([0.5, 1.5]))
        with pyro.plate("d", len(x)):
            a, b = (pyro.sample(name, dist.Bernoulli(0.4)) for name in "ab")
            loc = w[0] * a + w[1] * b * (1 - 2 * a) if full else w[0] * a
            pyro.sample("x", dist.Normal(loc, 0.5), obs=x)

    def guide(full: bool) -> None:
        with pyro.plate("d", len(x)):
            for name in "ab":
                pyro.sample(name, dist.Bernoulli(logits=pyro.param(f"q{name}", torch.zeros(2))))

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    elbo = TraceBackpropQ_ELBO()
    svi = SVI(model, guide, Adam({"lr": 0.01}), elbo)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(262):
            svi.step(step > 150)
    # The structure itself is looked at after 10, 100 and 1000 steps; rows are compared after every 128.
    assert_unbiased(elbo.eval(), model, guide, True)
