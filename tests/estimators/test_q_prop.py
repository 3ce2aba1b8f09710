"""Q-Prop: exactly unbiased where enumerable, by standard error elsewhere; its scales; its variance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from lattice import Lattice
from models import irregular, observe
from steps import trained
from torch import Tensor

from pyro_bpq import MomentCritic, QProp, RunningBaseline, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.errors import OptionError, UnsupportedSiteError
from pyro_bpq.estimators.base import SiteContext, SiteTerm
from pyro_bpq.testing import TwoPoint, assert_unbiased, expected_moments, sample_gradients, z_scores


def chain_model(*_: Any) -> None:
    a = pyro.sample("a", Lattice(irregular(3, start=7)))
    b = pyro.sample("b", Lattice(irregular(2, 3, start=8) * (a - 0.4)).to_event(1))
    c = pyro.sample("c", dist.Bernoulli(logits=0.4 * a * b.sum()))
    observe("x", b.sum() * a + 0.7 * b.prod() + c, 0.9)


def chain_guide(critics: tuple[Any, Any] = (None, None)) -> None:
    infer = [{} if critic is None else {"bpq": {"critic": critic}} for critic in critics]
    a = pyro.sample("a", Lattice(pyro.param("qa", irregular(3, start=1))), infer=infer[0])
    logits = pyro.param("qb", irregular(2, 3, start=2)) * (1.3 - a)
    b = pyro.sample("b", Lattice(logits).to_event(1), infer=infer[1])
    pyro.sample("c", dist.Bernoulli(logits=pyro.param("qc", irregular(start=3)) * b.sum() + 0.3 * a))


def train(
    model: Any, guide: Any, *args: Any, steps: int = 20, num_particles: int = 1, **options: Any
) -> TraceBackpropQ_ELBO:
    return trained(TraceBackpropQ_ELBO(num_particles, **options), model, guide, *args, steps=steps).eval()


def critics_of(elbo: TraceBackpropQ_ELBO, kind: str) -> list[Tensor]:
    blocks = [block for block in elbo.critics.blocks.values() if kind in block.kind]
    return [weight for block in blocks for weight in block.weights().values()]


# Options of single sites.


def with_options(guide: Any, **options: Any) -> Any:
    class Chosen(pyro.poutine.messenger.Messenger):
        def _pyro_sample(self, msg: Any) -> None:
            if msg["name"] in options:
                msg["infer"]["bpq"] = {**msg["infer"].get("bpq", {}), **options[msg["name"]]}

    return Chosen()(guide)


def with_estimators(guide: Any, **estimators: Any) -> Any:
    return with_options(guide, **{name: {"estimator": estimator} for name, estimator in estimators.items()})


def q_prop_guide(estimator: QProp | None = None) -> Any:
    return with_estimators(chain_guide, a=estimator or QProp(), b=estimator or QProp())


@pytest.mark.parametrize(
    ("estimator", "critics"),
    [
        (QProp(), (None, None)),
        (QProp(adaptive=False), (None, None)),
        (QProp(), (None, MomentCritic((8, 4)))),
        (QProp(), (MomentCritic(()), False)),
        (QProp(), (False, None)),
    ],
    ids=["default", "fixed_scales", "layers", "first_only", "second_only"],
)
def test_q_prop_is_unbiased(estimator: QProp, critics: tuple[Any, Any]) -> None:
    guide = q_prop_guide(estimator)
    elbo = train(chain_model, guide, critics)
    assert any(bool((weight.abs() > 1e-2).any()) for weight in critics_of(elbo, "MomentCritic"))
    assert_unbiased(elbo, chain_model, guide, critics)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_nonsense_critics_are_harmless(scale: float) -> None:
    guide = q_prop_guide()
    elbo = train(chain_model, guide, steps=5)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in critics_of(elbo, "critic"):
            weight.add_(scale * torch.rand(weight.shape, generator=generator))
    assert_unbiased(elbo, chain_model, guide, atol=1e-10 * scale)


def pair_model() -> None:
    a = pyro.sample("a", Lattice(irregular(3, start=7)))
    observe("x", a**2, 0.9)


def pair_guide() -> None:
    pyro.sample("a", Lattice(pyro.param("qa", irregular(3, start=1))))


def test_two_particles_are_unbiased() -> None:
    guide = with_estimators(pair_guide, a=QProp())
    elbo = train(pair_model, guide, num_particles=2)
    assert_unbiased(elbo, pair_model, guide)


@dataclass(frozen=True)
class NoExpectation(QProp):
    """Subtracts the critic without adding its expectation."""

    def __call__(self, context: SiteContext) -> SiteTerm:
        assert context.moments is not None
        still = context.moments._replace(expected=torch.zeros_like(context.moments.expected))
        return super().__call__(replace(context, moments=still))


def test_a_missing_expectation_is_seen() -> None:
    guide = with_estimators(pair_guide, a=NoExpectation())
    elbo = train(pair_model, guide)
    with pytest.raises(AssertionError):
        assert_unbiased(elbo, pair_model, guide)


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


# Where nothing can be enumerated.


def poisson_model() -> None:
    with pyro.plate("rows", 20):
        a = pyro.sample("a", dist.Poisson(torch.tensor(2.5)))
        b = pyro.sample("b", dist.Poisson(1.0 + 0.5 * a))
        observe("x", 0.3 * a + 0.4 * b, 3.0)


def poisson_guide() -> None:
    qa, qb = pyro.param("qa", torch.tensor(1.1)), pyro.param("qb", torch.tensor(0.2))
    with pyro.plate("rows", 20):
        a = pyro.sample("a", dist.Poisson(qa.exp()))
        pyro.sample("b", dist.Poisson((qb + 0.2 * a).exp()))


def poisson_exact() -> dict[str, Tensor]:
    """The gradient by summation over both supports, cut where nothing is left."""
    qa = torch.tensor(1.1, requires_grad=True)
    qb = torch.tensor(0.2, requires_grad=True)
    a, b = torch.arange(60.0).unsqueeze(1), torch.arange(400.0)
    log_q = dist.Poisson(qa.exp()).log_prob(a) + dist.Poisson((qb + 0.2 * a).exp()).log_prob(b)
    log_p = dist.Poisson(2.5).log_prob(a) + dist.Poisson(1.0 + 0.5 * a).log_prob(b)
    log_p = log_p + dist.Normal(0.3 * a + 0.4 * b, 0.8).log_prob(torch.tensor(3.0))
    loss = 20 * (log_q.exp() * (log_q - log_p)).sum()
    return dict(zip(("qa", "qb"), torch.autograd.grad(loss, (qa, qb)), strict=True))


def test_q_prop_is_unbiased_over_infinite_supports() -> None:
    exact, samples = poisson_exact(), {}
    for estimator in (QProp(), ScoreFunction(RunningBaseline())):
        elbo = train(poisson_model, poisson_guide, steps=250, estimator=estimator)
        drawn = sample_gradients(elbo, poisson_model, poisson_guide, num_samples=800)
        samples[type(estimator)] = {name: drawn[name] for name in exact}
    for name, z in z_scores(samples[QProp], exact).items():
        assert float(z.abs()) < 4.0, name
    for name in exact:
        ours, theirs = (samples[kind][name] - exact[name] for kind in (QProp, ScoreFunction))
        # A lower variance, by three standard errors.
        difference = theirs.square() - ours.square()
        assert float(difference.mean()) > 3.0 * float(difference.std()) / len(difference) ** 0.5, name


def test_errors_say_what_to_write() -> None:
    with pytest.raises(UnsupportedSiteError, match="AllAction"):
        train(chain_model, with_estimators(chain_guide, c=QProp()), steps=1)
    with pytest.raises(OptionError, match="finite components"):
        train(chain_model, with_options(chain_guide, c={"critic": MomentCritic()}), steps=1)
    for wrong in ({"decay": 1.0}, {"max_scale": 0.0}):
        with pytest.raises(OptionError, match="write a"):
            QProp(**wrong)
