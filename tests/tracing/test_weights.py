"""Masks and scales that read latents: a cost depends on all that its final value is made from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import fill, real
from pyro import poutine
from steps import trained
from torch import Tensor

from pyro_bpq import AllAction, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.batching.site_batch import SiteBatch
from pyro_bpq.estimators import CrossedLeaveOneOut, LeaveOneOut, SecondRun
from pyro_bpq.record.components import elements_of
from pyro_bpq.testing import assert_unbiased

Program = Callable[[], None]
DATA = real(0.7, -0.4, 1.3)
SIZE = 3


def coins(name: str, logits: Tensor) -> Tensor:
    return pyro.sample(name, dist.Bernoulli(logits=logits).to_event(1))


def observed(mean: Tensor, name: str = "x") -> None:
    with pyro.plate("pixels", SIZE):
        pyro.sample(name, dist.Normal(mean, 0.8), obs=DATA)


def weight(kind: str, z: Tensor) -> Any:
    """A handler whose weight reads other components than the cost itself."""
    handlers = {
        "mask": lambda: poutine.mask(mask=z.cumprod(-1) > 0),
        "flipped_mask": lambda: poutine.mask(mask=z.flip(-1) > 0),
        "scale": lambda: poutine.scale(scale=0.3 + z[..., 0]),
        "scales": lambda: poutine.scale(scale=0.3 + z.flip(-1)),
    }
    return handlers[kind]()


KINDS = ("mask", "flipped_mask", "scale", "scales")


def one_guide() -> None:
    coins("z", pyro.param("q"))


def flat(kind: str) -> tuple[Program, Program]:
    def model() -> None:
        z = coins("z", pyro.param("p"))
        with weight(kind, z):
            observed(2.0 * z)

    return model, one_guide


def masked_distribution() -> tuple[Program, Program]:
    def model() -> None:
        z = coins("z", pyro.param("p"))
        with pyro.plate("pixels", SIZE):
            pyro.sample("x", dist.Normal(2.0 * z, 0.8).mask(z.flip(-1) > 0), obs=DATA)

    return model, one_guide


def event() -> tuple[Program, Program]:
    """A scale of an event whose elements read one component each."""

    def model() -> None:
        z = coins("z", pyro.param("p"))
        with poutine.scale(scale=0.3 + z[..., 1]):
            pyro.sample("x", dist.Normal(2.0 * z, 0.8).to_event(1), obs=DATA)

    return model, one_guide


def layers(kind: str) -> tuple[Program, Program]:
    """Two components in each of two layers."""

    def guide() -> None:
        z = coins("z", pyro.param("q")[:2])
        with poutine.scale(scale=1.3 - z[..., 1]):
            coins("y", pyro.param("q2")[:2] + z)

    def model() -> None:
        z = coins("z", pyro.param("p")[:2])
        y = coins("y", pyro.param("p2")[:2] - z)
        with weight(kind, z), pyro.plate("pixels", 2):
            pyro.sample("x", dist.Normal(2.0 * y - z, 0.8), obs=DATA[:2])

    return model, guide


VECTORS: dict[str, tuple[Program, Program]] = {
    **{f"flat_{kind}": flat(kind) for kind in KINDS},
    **{f"layers_{kind}": layers(kind) for kind in KINDS},
    "masked_distribution": masked_distribution(),
    "event": event(),
}


def early(kind: str, in_guide: bool) -> tuple[Program, Program]:
    """Weights of a latent site that read an earlier one."""

    def weighted(b: Tensor) -> Any:
        return poutine.scale(scale=0.3 + b) if kind == "scale" else poutine.mask(mask=b > 0)

    def guide() -> None:
        b = pyro.sample("b", dist.Bernoulli(logits=pyro.param("q")[0]))
        with pyro.plate("rows", 2), weighted(b) if in_guide else contextlib.nullcontext():
            pyro.sample("z", dist.Bernoulli(logits=pyro.param("q2")[:2]))

    def model() -> None:
        b = pyro.sample("b", dist.Bernoulli(logits=pyro.param("p")[0]))
        with pyro.plate("rows", 2):
            with weighted(b):
                z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("p2")[:2] - b))
            pyro.sample("x", dist.Normal(2.0 * z - b, 0.8), obs=DATA[:2])

    return model, guide


def late() -> tuple[Program, Program]:
    """A weight of a model's site that reads what the guide draws later."""

    def guide() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q")[0]))
        pyro.sample("b", dist.Bernoulli(logits=pyro.param("q2")[0] + z))

    def model() -> None:
        b = pyro.sample("b", dist.Bernoulli(logits=pyro.param("p")[0]))
        with poutine.scale(scale=0.3 + b):
            z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("p2")[0]))
        pyro.sample("x", dist.Normal(2.0 * z - b, 0.8), obs=DATA[0])

    return model, guide


def of_itself() -> tuple[Program, Program]:
    """A scale of a model's site that reads the site itself by way of the guide."""
    given: dict[str, Tensor] = {}

    def guide() -> None:
        given["z"] = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q")[0]))

    def model() -> None:
        with poutine.scale(scale=0.3 + given["z"]):
            z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("p")[0]))
        pyro.sample("x", dist.Normal(2.0 * z, 0.8), obs=DATA[0])

    return model, guide


def in_place() -> tuple[Program, Program]:
    """A mask of a model's site that is written when the site is known."""

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q")[0]))

    def model() -> None:
        mask = torch.ones((), dtype=torch.bool)
        with poutine.mask(mask=mask):
            z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("p")[0]))
        mask.copy_(z > 0)
        pyro.sample("x", dist.Normal(2.0 * z, 0.8), obs=DATA[0])

    return model, guide


def of_parameters() -> tuple[Program, Program]:
    def guide() -> None:
        with poutine.scale(scale=pyro.param("s")[0].exp()):
            pyro.sample("z", dist.Bernoulli(logits=pyro.param("q")[0]))

    def model() -> None:
        with poutine.scale(scale=pyro.param("s")[1].exp()):
            z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("p")[0]))
        with poutine.scale(scale=pyro.param("s")[2].exp() + z):
            pyro.sample("x", dist.Normal(2.0 * z, 0.8), obs=DATA[0])

    return model, guide


def masked_out() -> tuple[Program, Program]:
    """A site of the guide whose own cost is left out; what reads it is not."""

    def guide() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q")[0]).mask(False))
        pyro.sample("w", dist.Bernoulli(logits=pyro.param("q")[1] + z))

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("p")[0]))
        w = pyro.sample("w", dist.Bernoulli(logits=pyro.param("p")[1] - z))
        pyro.sample("x", dist.Normal(2.0 * z - w, 0.8), obs=DATA[0])

    return model, guide


SITES: dict[str, tuple[Program, Program]] = {
    **{f"early_{kind}_{own}": early(kind, own) for kind in ("scale", "mask") for own in (False, True)},
    "late": late(),
    "of_itself": of_itself(),
    "in_place": in_place(),
    "masked_out": masked_out(),
    "of_parameters": of_parameters(),
}


def train(model: Program, guide: Program, **options: Any) -> TraceBackpropQ_ELBO:
    """An ELBO that has seen a few steps, at parameters that have not moved."""
    elbo = TraceBackpropQ_ELBO(**options)
    return trained(elbo, model, guide, params=partial(fill, ("q", "p", "q2", "p2", "s"), SIZE), steps=5).eval()


ONE: dict[str, dict[str, Any]] = {
    "default": {},
    "score_function": {"estimator": ScoreFunction()},
    "second_run": {"estimator": SecondRun()},
    "all_action": {"estimator": AllAction(exact=False)},
}
TWO: dict[str, dict[str, Any]] = {
    "two": {},
    "leave_one_out": {"estimator": ScoreFunction(LeaveOneOut())},
    "crossed": {"estimator": CrossedLeaveOneOut()},
}


@pytest.mark.parametrize("options", ONE)
@pytest.mark.parametrize("name", VECTORS)
def test_components_are_charged_with_what_weighs_their_elements(name: str, options: str) -> None:
    model, guide = VECTORS[name]
    assert_unbiased(train(model, guide, num_particles=1, **ONE[options]), model, guide)


@pytest.mark.parametrize("name", ["flat_scale", "flat_flipped_mask"])
def test_leave_one_out_of_components(name: str) -> None:
    model, guide = VECTORS[name]
    assert_unbiased(train(model, guide, num_particles=2, estimator=ScoreFunction(LeaveOneOut())), model, guide)


@pytest.mark.parametrize("name", ["flat_mask", "flat_flipped_mask", "flat_scale", "flat_scales", "event"])
def test_elements_without_their_weights_are_a_bias_that_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pyro_bpq.record.tracer.elements_of", lambda site: elements_of({**site, "scale": 1.0, "mask": None})
    )
    model, guide = VECTORS[name]
    with pytest.raises(AssertionError, match="is biased"):
        assert_unbiased(train(model, guide, num_particles=1, estimator=ScoreFunction()), model, guide)


def test_components_that_a_weight_does_not_mix_stay_apart() -> None:
    def model() -> None:
        z = coins("z", pyro.param("p"))
        with poutine.scale(scale=0.3 + z), poutine.mask(mask=z > 0):
            observed(2.0 * z)

    guide = VECTORS["flat_mask"][1]
    elbo = train(model, guide, num_particles=1, estimator=ScoreFunction())
    assert_unbiased(elbo, model, guide)
    assert elbo.runner.plans.last is not None and "-log p(x)" in elbo.runner.plans.last.plan.layout.charged["z"]


@pytest.mark.parametrize("options", [*ONE, *TWO])
@pytest.mark.parametrize("name", SITES)
def test_weights_of_latent_sites_may_read_anything(name: str, options: str) -> None:
    model, guide = SITES[name]
    chosen = {"num_particles": 1, **ONE[options]} if options in ONE else {"num_particles": 2, **TWO[options]}
    assert_unbiased(train(model, guide, **chosen), model, guide)


@pytest.mark.parametrize("name", [name for name in SITES if name != "in_place"])
def test_weights_of_vectorised_particles(name: str) -> None:
    model, guide = SITES[name]
    options = {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": 1}
    assert_unbiased(train(model, guide, **options), model, guide)


def test_a_scale_of_another_particle_is_a_bias_that_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(self: SiteBatch, which: str) -> Tensor:
        sites = self.rollout.runs[0].sites
        scales = [torch.as_tensor(getattr(sites[name], which)).double() for name in self.cls.names]
        return torch.stack(scales)[:, None, None]

    monkeypatch.setattr(SiteBatch, "_scales", first)
    model, guide = SITES["early_scale_True"]
    with pytest.raises(AssertionError, match="is biased"):
        assert_unbiased(train(model, guide, num_particles=2), model, guide)


def test_a_weight_by_the_site_itself_is_not_tabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_bpq.record.tracer._self_read", lambda *_: frozenset())
    model, guide = SITES["in_place"]
    with pytest.raises(AssertionError, match="is biased"):
        assert_unbiased(train(model, guide, num_particles=1), model, guide)


def test_a_weight_by_the_site_itself_is_found_where_no_other_cost_reads_more() -> None:
    is_weighted = []

    def model() -> None:
        mask = torch.ones((), dtype=torch.bool)
        with poutine.mask(mask=mask):
            z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("p")[0]))
        if is_weighted:
            mask.copy_(z > 0)
        pyro.sample("x", dist.Normal(2.0 * z, 0.8), obs=DATA[0])

    guide = in_place()[1]
    elbo = train(model, guide, num_particles=1)
    is_weighted.append(True)
    assert_unbiased(elbo, model, guide)
