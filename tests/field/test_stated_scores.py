"""Guides that draw by hand and state ``log q`` as a factor: one warning, and an advice that is exact."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import coin_guide, seeing, unbiased, warnings_of

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.testing import assert_unbiased, exact_gradient

model = seeing(lambda z: 2.0 * z)


def law() -> Any:
    return dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3)))


def stated_first() -> None:
    q = law()
    z = torch.bernoulli(q.probs.detach())
    pyro.factor("log_q", q.log_prob(z), has_rsample=False)
    pyro.sample("z", dist.Delta(z))


def stated_of_the_value_handed_over() -> None:
    q = law()
    z = pyro.sample("z", dist.Delta(torch.bernoulli(q.probs.detach())))
    pyro.factor("log_q", q.log_prob(z), has_rsample=False)


def from_numpy() -> None:
    q = law()
    z = torch.as_tensor(float(torch.rand(()).numpy() < float(q.probs.detach())))
    pyro.factor("log_q", q.log_prob(z), has_rsample=False)
    pyro.sample("z", dist.Delta(z))


def warned(guide: Any, **options: Any) -> list[str]:
    pyro.clear_param_store()
    return warnings_of(model, guide, steps=3, category=Warning, **options)


@pytest.mark.parametrize("options", [{}, {"num_particles": 1}, {"num_particles": 3}], ids=["open", "one", "three"])
@pytest.mark.parametrize("guide", [stated_first, stated_of_the_value_handed_over, from_numpy])
def test_the_factor_is_named_once_with_what_to_write(guide: Any, options: dict[str, Any]) -> None:
    (text,) = warned(guide, **options)
    assert text.startswith("The factor 'log_q' of the guide has has_rsample=False")
    assert "pyro.sample(" in text and "has_rsample=True" in text


def auxiliary() -> None:
    """The value has no site in the model: the guide's own site is auxiliary."""
    w = pyro.sample("log_q", law(), infer={"is_auxiliary": True})
    pyro.sample("z", dist.Bernoulli(0.2 + 0.5 * w))


def reads_the_draw() -> None:
    z = pyro.sample("z", law())
    pyro.factor("fee", pyro.param("w", torch.tensor(0.6)) * z, has_rsample=False)


@pytest.mark.parametrize("guide", [coin_guide, auxiliary, reads_the_draw])
def test_what_the_warning_advises_and_factors_that_read_draws_are_exact(guide: Any) -> None:
    assert not warned(guide)
    unbiased(TraceBackpropQ_ELBO(num_particles=2), model, guide, steps=5)


def fee_guide(**options: bool) -> Any:
    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(0.4))
        pyro.factor("fee", -0.5 * pyro.param("w", torch.tensor(0.6)) ** 2, **options)

    return guide


def test_a_cost_that_says_that_it_is_one_counts_whole() -> None:
    """``has_rsample=True`` is what the warning advises for a cost that reads no draw."""
    guide = fee_guide(has_rsample=True)
    assert not warned(guide) and len(warned(fee_guide(has_rsample=False))) == 1
    pyro.clear_param_store()
    # The factor's own gradient: the loss has log q of the guide with a plus.
    torch.testing.assert_close(exact_gradient(model, guide)["w"], torch.tensor(-0.6))
    assert_unbiased(TraceBackpropQ_ELBO(num_particles=2).eval(), model, guide)


def test_factors_of_the_model_are_left_alone() -> None:
    def plain() -> None:
        pyro.factor("prior", -(pyro.param("m", torch.tensor(0.3)) ** 2))
        model()

    assert not warnings_of(plain, coin_guide, category=Warning)
