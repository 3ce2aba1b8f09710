"""Q-Prop: exactly unbiased over all values; its critics; its variance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from lattice import Lattice
from models import irregular, observe
from problems import faulty
from steps import trained
from torch import Tensor

from pyro_bpq import MomentCritic, QProp, RunningBaseline, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.errors import OptionError, UnsupportedSiteError
from pyro_bpq.estimators.base import SiteContext, SiteTerm
from pyro_bpq.testing import TwoPoint, assert_unbiased, expected_moments


def chain_model(*_: Any) -> None:
    a = pyro.sample("a", Lattice(irregular(3, start=7)))
    b = pyro.sample("b", Lattice(irregular(2, 3, start=8) * (a - 0.4)).to_event(1))
    c = pyro.sample("c", dist.Bernoulli(logits=0.4 * a * b.sum()))
    observe("x", b.sum() * a + 0.7 * b.prod() + c, 0.9)


def chain_guide(first: Any = None, critics: tuple[Any, Any] = (None, None), **last: Any) -> Callable[..., None]:
    """The estimator (Q-Prop) and critics are those of the first two sites; options of the last one follow."""

    def guide() -> None:
        own, below = ({"bpq": {"estimator": first or QProp(), "critic": critic}} for critic in critics)
        a = pyro.sample("a", Lattice(pyro.param("qa", irregular(3, start=1))), infer=own)
        logits = pyro.param("qb", irregular(2, 3, start=2)) * (1.3 - a)
        b = pyro.sample("b", Lattice(logits).to_event(1), infer=below)
        fn = dist.Bernoulli(logits=pyro.param("qc", irregular(start=3)) * b.sum() + 0.3 * a)
        pyro.sample("c", fn, infer={"bpq": last})

    return guide


def train(model: Any, guide: Any, *args: Any, steps: int = 20, **options: Any) -> TraceBackpropQ_ELBO:
    return trained(TraceBackpropQ_ELBO(**{"num_particles": 1, **options}), model, guide, *args, steps=steps).eval()


def critics_of(elbo: TraceBackpropQ_ELBO, kind: str) -> list[Tensor]:
    blocks = [block for block in elbo.critics.blocks.values() if kind in block.kind]
    return [weight for block in blocks for weight in block.weights().values()]


SERVED: dict[str, tuple[QProp, tuple[Any, Any]]] = {
    "default": (QProp(), (None, None)),
    "fixed_scales": (QProp(adaptive=False), (None, None)),
    "layers": (QProp(), (None, MomentCritic((8, 4)))),
    "first_only": (QProp(), (MomentCritic(()), False)),
    "second_only": (QProp(), (False, None)),
}


@pytest.mark.parametrize("name", SERVED)
def test_q_prop_is_unbiased(name: str) -> None:
    guide = chain_guide(*SERVED[name])
    elbo = train(chain_model, guide)
    assert any(bool((weight.abs() > 1e-2).any()) for weight in critics_of(elbo, "MomentCritic"))
    assert_unbiased(elbo, chain_model, guide)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_nonsense_critics_are_harmless(scale: float) -> None:
    elbo, generator = train(chain_model, chain_guide(), steps=5), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in critics_of(elbo, "critic"):
            weight.add_(scale * torch.rand(weight.shape, generator=generator))
    assert_unbiased(elbo, chain_model, chain_guide(), atol=1e-10 * scale)


def pair_model() -> None:
    a = pyro.sample("a", Lattice(irregular(3, start=7)))
    observe("x", a**2, 0.9)


def pair_guide() -> None:
    pyro.sample("a", Lattice(pyro.param("qa", irregular(3, start=1))))


def test_two_particles_are_unbiased() -> None:
    elbo = train(pair_model, pair_guide, num_particles=2, estimator=QProp())
    assert_unbiased(elbo, pair_model, pair_guide)


def test_the_variance_is_below_that_of_a_running_mean() -> None:
    ours, theirs = (
        expected_moments(train(pair_model, pair_guide, estimator=estimator, steps=100), pair_model, pair_guide)
        for estimator in (QProp(), ScoreFunction(RunningBaseline()))
    )
    assert ours.total_variance < 0.8 * theirs.total_variance


def no_expectation(own: Any, context: SiteContext) -> SiteTerm:
    """Subtracts the critic without adding its expectation."""
    still = context.moments._replace(expected=torch.zeros_like(context.moments.expected))
    return own(replace(context, moments=still))


def test_a_missing_expectation_is_seen() -> None:
    elbo = train(pair_model, pair_guide, estimator=faulty(QProp(), no_expectation))
    with pytest.raises(AssertionError):
        assert_unbiased(elbo, pair_model, pair_guide)


# A reparameterised site with a critic corrects the sites before it.


def reparam_model(*_: Any) -> None:
    z = pyro.sample("z", dist.Bernoulli(logits=irregular(start=4))).long()
    x = pyro.sample("x", dist.Normal(irregular(start=5), 0.9))
    observe("y", irregular(2, start=6)[z] + 2.0 * x**2 + x * z, 0.4)


def reparam_guide(critic: Any) -> None:
    infer = {"bpq": {"critic": critic}}
    z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("qz", irregular(start=1)))).long()
    loc = pyro.param("loc", irregular(2, start=2))[z]
    pyro.sample("x", TwoPoint(loc, pyro.param("scale", torch.tensor(0.8))), infer=infer)


def test_reparameterised_sites_correct_earlier_ones() -> None:
    # The second power of a two-point variable is constant: its critic is linear here, and exact.
    variance = []
    for critic in (False, MomentCritic(())):
        elbo = train(reparam_model, reparam_guide, critic, steps=150)
        assert_unbiased(elbo, reparam_model, reparam_guide, critic)
        moments = expected_moments(elbo, reparam_model, reparam_guide, critic)
        variance.append(float(moments.variance["qz"]))
    assert bool(critics_of(elbo, "MomentCritic")[0].any())
    assert variance[1] < 0.5 * variance[0]


def test_errors_say_what_to_write() -> None:
    with pytest.raises(UnsupportedSiteError, match="AllAction"):
        train(chain_model, chain_guide(QProp(), estimator=QProp()), steps=1)
    with pytest.raises(OptionError, match="finite components"):
        train(chain_model, chain_guide(critic=MomentCritic()), steps=1)
