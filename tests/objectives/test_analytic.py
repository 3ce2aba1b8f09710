"""KL divergences and entropies in closed form keep the expectation of the gradient."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME
from pyro import poutine
from steps import from_seed, settled, trained

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.testing import TwoPoint, assert_unbiased


@pytest.mark.parametrize("name", ["discrete_above_reparam", "reparam_above_discrete", "reparam_in_plate"])
def test_gradient_is_unbiased(name: str) -> None:
    assert_unbiased(settled(BY_NAME[name], 30, num_particles=1, analytic_kl=True).eval(), *BY_NAME[name].programs)


def later_model() -> None:
    w = pyro.sample("w", dist.Normal(0.3, 1.2))
    with poutine.scale(scale=2.0):
        z = pyro.sample("z", dist.Normal(0.8 * w, 0.9))
    pyro.sample("x", dist.Normal(z + w, 1.0), obs=torch.tensor(0.7))


def later_guide() -> None:
    with poutine.scale(scale=2.0):
        z = pyro.sample("z", TwoPoint(pyro.param("loc", torch.tensor(0.4)), torch.tensor(0.7)))
    pyro.sample("w", TwoPoint(pyro.param("slope", torch.tensor(0.9)) * z, torch.tensor(0.6)))


def scaled_guide() -> None:
    w = pyro.sample("w", TwoPoint(pyro.param("slope", torch.tensor(0.9)), torch.tensor(0.6)))
    pyro.sample("z", TwoPoint(pyro.param("loc", torch.tensor(0.4)) * w, pyro.param("scale", torch.tensor(0.7))))


@pytest.mark.parametrize("guide", [later_guide, scaled_guide])
def test_a_prior_that_depends_on_a_later_site_and_other_scales_of_the_guide_are_unbiased(guide: Any) -> None:
    """A prior is sampled then, and where scales differ only the entropy is known."""
    assert_unbiased(TraceBackpropQ_ELBO(analytic_kl=True).eval(), later_model, guide)


@pytest.mark.parametrize("is_masked", [False, True])
def test_densities_of_deltas_and_masks_within_laws_count(is_masked: bool) -> None:
    def guide() -> None:
        scale = pyro.param("scale", torch.tensor(0.7))
        pyro.sample("z", TwoPoint(torch.tensor(0.3), scale).mask(True) if is_masked else dist.Delta(scale, scale.log()))

    def model() -> None:
        pyro.sample("z", dist.Normal(0.0, 1.0).mask(False) if is_masked else dist.Normal(0.0, 1.0))

    assert_unbiased(TraceBackpropQ_ELBO(analytic_kl=True).eval(), model, guide)


def test_transforms_of_equal_numbers_have_gradients_of_their_own() -> None:
    def program(mean: float, shift: torch.Tensor) -> None:
        law = dist.TransformedDistribution(dist.Normal(mean, 1.0), [dist.transforms.AffineTransform(shift, 1.0)])
        pyro.sample("z", law)

    shift = torch.zeros((), requires_grad=True)
    programs = lambda: program(0.0, shift.detach()), lambda: program(9.0, shift)
    trained(TraceBackpropQ_ELBO(analytic_kl=True), *programs, steps=1)
    assert shift.grad is not None and shift.grad > 3.0


def model() -> None:
    with pyro.plate("rows", 3), poutine.mask(mask=torch.tensor([True, False, True])):
        pyro.sample("z", dist.Normal(torch.zeros(3, 2), 1.3).to_event(1))


def guide() -> None:
    with pyro.plate("rows", 3), poutine.mask(mask=torch.tensor([True, False, True])):
        loc = pyro.param("loc", torch.tensor([[0.3, 0.1], [0.2, 0.9], [-0.5, 0.4]]))
        pyro.sample("z", dist.Normal(loc, pyro.param("scale", torch.tensor(0.8))).to_event(1))


def test_gradient_of_a_divergence_has_no_noise() -> None:
    found = []
    for seed in (0, 1):
        trained(TraceBackpropQ_ELBO(analytic_kl=True), model, guide, steps=1, seed=seed)
        found.append([p.grad for p in pyro.get_param_store()._params.values()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    loc, scale = (p.detach() for p in pyro.get_param_store()._params.values())
    mask = torch.tensor([[1.0], [0.0], [1.0]])
    torch.testing.assert_close(found[0][0], mask * loc / 1.3**2)
    torch.testing.assert_close(found[0][1], 4 * (scale / 1.3**2 - 1 / scale))


def test_loss_is_that_of_the_sample() -> None:
    elbos = (TraceBackpropQ_ELBO(analytic_kl=option) for option in (True, False))
    analytic, sampled = (from_seed(2, elbo.loss_and_grads, model, guide) for elbo in elbos)
    assert analytic == sampled
