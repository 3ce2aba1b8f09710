"""Masks and scales that read latents: a cost depends on all that its final value is made from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import coin, observe, real
from pyro import poutine
from steps import WAYS, at_irregular
from torch import Tensor

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.testing import assert_unbiased

Program = Callable[[], None]
Programs = tuple[Program, Program]
DATA = real(0.7, -0.4, 1.3)
p = pyro.param

# Ways of one particle, and of two.
ONE = ("score_function", "default", "second_run", "all_action")
TWO = ("two", "leave_one_out", "crossed", "vectorised")


def check(programs: Programs, **options: Any) -> TraceBackpropQ_ELBO:
    elbo = at_irregular("q p q2 p2 s", 3, *programs, **options)
    assert_unbiased(elbo, *programs)
    return elbo


# Components of vectors.


def coins(name: str, logits: Tensor) -> Tensor:
    return pyro.sample(name, dist.Bernoulli(logits=logits).to_event(1))


def one_guide() -> None:
    coins("z", p("q"))


# Handlers whose weights read other components than the cost itself.
WEIGHTS: dict[str, Callable[[Tensor], Any]] = {
    "mask": lambda z: poutine.mask(mask=z.cumprod(-1) > 0),
    "flipped_mask": lambda z: poutine.mask(mask=z.flip(-1) > 0),
    "scale": lambda z: poutine.scale(scale=0.3 + z[..., 0]),
    "scales": lambda z: poutine.scale(scale=0.3 + z.flip(-1)),
}


def flat(weight: Callable[[Tensor], Any]) -> Programs:
    def model() -> None:
        z = coins("z", p("p"))
        with weight(z), pyro.plate("pixels", 3):
            observe("x", 2.0 * z, DATA)

    return model, one_guide


def masked_distribution() -> None:
    z = coins("z", p("p"))
    with pyro.plate("pixels", 3):
        pyro.sample("x", dist.Normal(2.0 * z, 0.8).mask(z.flip(-1) > 0), obs=DATA)


def event() -> None:
    """A scale of an event whose elements read one component each."""
    z = coins("z", p("p"))
    with poutine.scale(scale=0.3 + z[..., 1]):
        pyro.sample("x", dist.Normal(2.0 * z, 0.8).to_event(1), obs=DATA)


def layers(weight: Callable[[Tensor], Any]) -> Programs:
    """Two components in each of two layers."""

    def guide() -> None:
        z = coins("z", p("q")[:2])
        with poutine.scale(scale=1.3 - z[..., 1]):
            coins("y", p("q2")[:2] + z)

    def model() -> None:
        z = coins("z", p("p")[:2])
        y = coins("y", p("p2")[:2] - z)
        with weight(z), pyro.plate("pixels", 2):
            observe("x", 2.0 * y - z, DATA[:2])

    return model, guide


VECTORS: dict[str, Programs] = {
    **{f"flat_{kind}": flat(weight) for kind, weight in WEIGHTS.items()},
    **{f"layers_{kind}": layers(weight) for kind, weight in WEIGHTS.items()},
    "masked_distribution": (masked_distribution, one_guide),
    "event": (event, one_guide),
}


PAIRS = [(name, options) for name in VECTORS for options in ONE]
PAIRS += [(f"flat_{kind}", "leave_one_out") for kind in WEIGHTS]


@pytest.mark.parametrize(("name", "options"), PAIRS)
def test_components_are_charged_with_what_weighs_their_elements(name: str, options: str) -> None:
    check(VECTORS[name], **WAYS[options])


def test_components_that_a_weight_does_not_mix_stay_apart() -> None:
    elbo = check(flat(lambda z: poutine.scale(scale=0.3 + z)), estimator=ScoreFunction())
    assert elbo.runner.plans.last is not None and "-log p(x)" in elbo.runner.plans.last.layout.charged["z"]


# Sites.


def plain_guide() -> None:
    coin("z", p("q")[0])


def early(kind: str, in_guide: bool) -> Programs:
    """Weights of a latent site that read an earlier one."""

    def weighted(b: Tensor) -> Any:
        return poutine.scale(scale=0.3 + b) if kind == "scale" else poutine.mask(mask=b > 0)

    def guide() -> None:
        b = coin("b", p("q")[0])
        with pyro.plate("rows", 2), weighted(b) if in_guide else contextlib.nullcontext():
            coin("z", p("q2")[:2])

    def model() -> None:
        b = coin("b", p("p")[0])
        with pyro.plate("rows", 2):
            with weighted(b):
                z = coin("z", p("p2")[:2] - b)
            observe("x", 2.0 * z - b, DATA[:2])

    return model, guide


def late() -> Programs:
    """A weight of a model's site that reads what the guide draws later."""

    def guide() -> None:
        coin("b", p("q2")[0] + coin("z", p("q")[0]))

    def model() -> None:
        b = coin("b", p("p")[0])
        with poutine.scale(scale=0.3 + b):
            z = coin("z", p("p2")[0])
        observe("x", 2.0 * z - b, DATA[0])

    return model, guide


def of_itself() -> Programs:
    """A scale of a model's site that reads the site itself by way of the guide."""
    given: dict[str, Tensor] = {}

    def guide() -> None:
        given["z"] = coin("z", p("q")[0])

    def model() -> None:
        with poutine.scale(scale=0.3 + given["z"]):
            z = coin("z", p("p")[0])
        observe("x", 2.0 * z, DATA[0])

    return model, guide


def in_place(is_written: Callable[[], bool] = lambda: True) -> Programs:
    """A mask of a model's site that is written when the site is known."""

    def model() -> None:
        mask = torch.ones((), dtype=torch.bool)
        with poutine.mask(mask=mask):
            z = coin("z", p("p")[0])
        if is_written():
            mask.copy_(z > 0)
        observe("x", 2.0 * z, DATA[0])

    return model, plain_guide


def of_parameters() -> Programs:
    def guide() -> None:
        with poutine.scale(scale=p("s")[0].exp()):
            coin("z", p("q")[0])

    def model() -> None:
        with poutine.scale(scale=p("s")[1].exp()):
            z = coin("z", p("p")[0])
        with poutine.scale(scale=p("s")[2].exp() + z):
            observe("x", 2.0 * z, DATA[0])

    return model, guide


def masked_out() -> Programs:
    """A site of the guide whose own cost is left out; what reads it is not."""

    def guide() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=p("q")[0]).mask(False))
        coin("w", p("q")[1] + z)

    def model() -> None:
        z = coin("z", p("p")[0])
        w = coin("w", p("p")[1] - z)
        observe("x", 2.0 * z - w, DATA[0])

    return model, guide


SITES: dict[str, Programs] = {
    **{f"early_{kind}_{own}": early(kind, own) for kind in ("scale", "mask") for own in (False, True)},
    **{make.__name__: make() for make in (late, of_itself, in_place, masked_out, of_parameters)},
}


# A mask that is written is one for all particles.
CASES = [(name, own) for name in SITES for own in (*ONE, *TWO) if (name, own) != ("in_place", "vectorised")]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_weights_of_latent_sites_may_read_anything(name: str, options: str) -> None:
    check(SITES[name], **WAYS[options])


def test_a_weight_by_the_site_itself_is_found_where_no_other_cost_reads_more() -> None:
    is_weighted = []
    programs = in_place(lambda: bool(is_weighted))
    elbo = at_irregular("q p", 3, *programs)
    is_weighted.append(True)
    assert_unbiased(elbo, *programs)
