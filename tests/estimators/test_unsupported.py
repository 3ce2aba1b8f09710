"""An estimator that cannot serve a site says so at the first step, and what it names instead serves."""

from __future__ import annotations

import re
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import public
from steps import trained
from test_contract import ESTIMATORS

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.errors import UnsupportedSiteError

HUGE = torch.linspace(0.0, 8.0, 50_000, dtype=torch.float64)
SITES: dict[str, Any] = {
    "normal": lambda p: dist.Normal(p, 1.0),
    "student": lambda p: dist.StudentT(3.0, p, 1.0),
    "dirichlet": lambda p: dist.Dirichlet(torch.stack([p.exp(), 1.0 + 0.0 * p, 2.0 + 0.0 * p])),
    "poisson": lambda p: dist.Poisson(p.exp()),
    "poisson vector": lambda p: dist.Poisson(p.exp().expand(3)).to_event(1),
    "geometric": lambda p: dist.Geometric(logits=p),
    "bernoulli": lambda p: dist.Bernoulli(logits=p),
    "bernoulli vector": lambda p: dist.Bernoulli(logits=p.expand(3)).to_event(1),
    "categorical": lambda p: dist.Categorical(logits=p * torch.arange(5.0)),
    "categorical vector": lambda p: dist.Categorical(logits=(p * torch.arange(5.0)).expand(2, 5)).to_event(1),
    "one-hot": lambda p: dist.OneHotCategorical(logits=p * torch.arange(5.0)),
    "huge categorical": lambda p: dist.Categorical(logits=p * HUGE),
    "huge categorical vector": lambda p: dist.Categorical(logits=(p * HUGE).expand(2, len(HUGE))).to_event(1),
}
# What a message may say for an estimator that lacks only particles.
NEEDS_PARTICLES = "num_particles=2"


def step(site: str, estimator: Any, particles: int = 1) -> None:
    def model() -> None:
        z = pyro.sample("z", SITES[site](torch.tensor(0.1)))
        pyro.sample("x", dist.Normal(z.to(torch.get_default_dtype()).sum(), 1.0), obs=torch.tensor(0.4))

    def guide() -> None:
        infer = {"bpq": {"estimator": estimator}}
        pyro.sample("z", SITES[site](pyro.param("p", torch.tensor(0.3))), infer=infer)

    trained(TraceBackpropQ_ELBO(particles), model, guide, steps=1)
    gradient = pyro.get_param_store()._params["p"].grad
    assert bool(gradient.isfinite())


def named(message: str, own: str) -> list[Any]:
    """The estimators that a message names as one writes them."""
    found = dict.fromkeys(re.findall(r"\b([A-Z]\w+)\(\)", message))
    return [public()[name]() for name in found if name in public() and name != own]


@pytest.mark.filterwarnings("ignore:.* has no critic, and is ScoreFunction:pyro_bpq.errors.BPQWarning")
@pytest.mark.parametrize("site", SITES)
def test_first_step_names_what_serves(site: str) -> None:
    refused, alternatives = 0, set()
    for estimator in ESTIMATORS:
        try:
            # Sums over 50,000 values take too long.
            if "huge" in site and estimator.unsupported(info_of(site)) is None:
                continue
            step(site, estimator)
        except UnsupportedSiteError as error:
            message, name = str(error), type(estimator).__name__
            refused += 1
            assert "'z'" in message, message
            if NEEDS_PARTICLES in message and not named(message, name):
                step(site, estimator, particles=2)
                continue
            assert named(message, name), f"{estimator} names no estimator for {site}: {message}"
            alternatives |= set(named(message, name))
    assert refused > 0
    for alternative in alternatives:
        step(site, alternative)


def info_of(site: str) -> Any:
    """What the planner knows of the site."""
    from pyro_bpq.record.watch import site_info

    with pyro.poutine.trace() as traced:
        pyro.sample("z", SITES[site](torch.tensor(0.3)))
    return site_info(traced.trace.nodes["z"], (), 1)


@pytest.mark.parametrize("site", ["huge categorical", "huge categorical vector"])
def test_no_sum_over_a_huge_support_is_advised(site: str) -> None:
    info = info_of(site)
    for estimator in ESTIMATORS:
        message = estimator.unsupported(info)
        assert message is None or "AllAction()" not in message, message
