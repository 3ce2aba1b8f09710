"""Draws that were rounded to the edge of their support: what is said names the site and the edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import SGD
from steps import repeat, told
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO

EDGE = "without a finite log-probability on the edge of the support"
# Parameters are finite and within their range.
ROUNDED: dict[str, Callable[[], Any]] = {
    "relaxed one-hot": lambda: dist.RelaxedOneHotCategorical(torch.tensor(1e-3), logits=torch.tensor([0.0, 1.0, 2.0])),
    "in rows": lambda: dist.RelaxedOneHotCategorical(torch.tensor(1e-3), logits=torch.zeros(4, 3)).to_event(1),
    "log-normal that overflows": lambda: dist.LogNormal(torch.tensor(800.0), 1.0),
    "log-normal that underflows": lambda: dist.LogNormal(torch.tensor(-800.0), 1.0),
    "Weibull": lambda: dist.Weibull(torch.tensor(1.0), torch.tensor(1e-4)),
    "Kumaraswamy": lambda: dist.Kumaraswamy(torch.tensor(1e-4), torch.tensor(1e-4)),
    "half-Cauchy": lambda: dist.HalfCauchy(torch.tensor(1e308)),
}


def said(law: Callable[[], Any], value: Tensor | None = None) -> str:
    """The first warning or error of a few steps."""

    def model() -> None:
        pyro.sample("w", dist.Bernoulli(0.5))
        pyro.sample("z", law(), obs=value)

    def guide() -> None:
        if value is None:
            pyro.sample("z", law())
        pyro.sample("w", dist.Bernoulli(0.4))

    pyro.set_rng_seed(0)
    svi = SVI(model, guide, SGD({"lr": 0.1}), TraceBackpropQ_ELBO(num_particles=1))
    errors = []
    with told() as texts:
        try:
            repeat(8, svi.step)
        except ValueError as error:
            errors = [str(error)]
    # Pyro warns of each site whose log-probability is not finite, too.
    return next(text for text in [*texts, *errors] if "Encountered" not in text)


@pytest.mark.parametrize("is_validated", [True, False])
@pytest.mark.parametrize("name", ROUNDED)
def test_a_rounded_draw_is_told_as_such(name: str, is_validated: bool) -> None:
    with pyro.validation_enabled(is_validated):
        text = said(ROUNDED[name])
    assert text.startswith("The drawn value of site 'z' has") and EDGE in text and "enable_validation" not in text, text


def test_observed_values_on_the_edge() -> None:
    text = said(lambda: dist.Beta(torch.tensor([2.0, 0.5]), 1.0).to_event(1), torch.tensor([0.5, 0.0]))
    assert text.startswith(f"The data of site 'z' has 1 of 2 values {EDGE}"), text


def test_an_edge_where_the_density_is_finite_is_none() -> None:
    """The other row is the one without a finite log-probability."""
    with pyro.validation_enabled(False), pyro.plate("rows", 2):
        text = said(lambda: dist.Uniform(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])), torch.tensor([0.0, 3.0]))
    assert "edge" not in text and "site 'z' has 1 of 2 values outside of the support" in text, text


def test_a_broken_parameter_is_not_an_edge() -> None:
    with pyro.validation_enabled(False):
        text = said(lambda: dist.Normal(torch.tensor(float("nan")), 1.0))
    assert "edge" not in text and "enable_validation(True)" in text, text


def test_a_draw_that_overflows_is_outside_of_its_support() -> None:
    """The guide draws from what the model scores under: the supports are the same."""
    text = said(lambda: dist.Poisson(torch.full((2,), 1e30)).to_event(1))
    assert text.startswith("The drawn value of site 'z' has 1 of 1 values outside of the support"), text
