"""A first batch whose sites are all observed, as labelled rows of semi-supervised data, before batches with latents."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.testing import assert_unbiased

ROWS = 12
DATA = torch.linspace(-1.0, 1.0, ROWS, dtype=torch.float64)
LABELS = (DATA > 0).double()


def model(x: Tensor, labels: Tensor | None) -> None:
    with pyro.plate("rows", len(x)):
        y = pyro.sample("y", dist.Bernoulli(torch.tensor(0.4)), obs=labels)
        z = pyro.sample("z", dist.Bernoulli(0.2 + 0.5 * y), obs=labels)
        pyro.sample("x", dist.Normal(z - y, 1.0), obs=x)


def guide(x: Tensor, labels: Tensor | None) -> None:
    w = pyro.param("w", lambda: torch.zeros(2))
    if labels is None:
        with pyro.plate("rows", len(x)):
            y = pyro.sample("y", dist.Bernoulli(logits=w[0] * x))
            pyro.sample("z", dist.Bernoulli(logits=w[1] + y))


def trained(*kinds: Tensor | None) -> TraceBackpropQ_ELBO:
    elbo = TraceBackpropQ_ELBO()
    for labels in kinds:
        elbo.loss_and_grads(model, guide, DATA, labels)  # warnings are errors
    return elbo


def test_the_number_of_particles_is_looked_at_where_a_noisy_site_is_new() -> None:
    plain = trained(None, None, None)
    assert plain.num_particles > 1
    assert trained(LABELS, None, None, None).num_particles == plain.num_particles


def test_the_gradient_is_exact_in_expectation_after_a_labelled_batch() -> None:
    elbo = trained(LABELS, None, None)
    assert_unbiased(elbo.eval(), model, guide, DATA[:2], None)
