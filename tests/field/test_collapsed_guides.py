"""Guides that have come to one value: ``diagnose`` says so, with what each site costs, and what to try."""

from __future__ import annotations

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import WAYS, stepped

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.diagnostics import diagnose


def model() -> None:
    z = pyro.sample("z", dist.Bernoulli(0.4))
    k = pyro.sample("k", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
    pyro.sample("x", dist.Normal(z + k, 1.0), obs=torch.tensor(0.7))


def guide(at_z: float, at_k: float) -> Any:
    def draw() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("qz", torch.tensor(at_z))))
        pyro.sample("k", dist.Categorical(logits=pyro.param("qk", torch.tensor([at_k, 0.0, 0.0]))))

    return draw


def look(program: Any, guide: Any, **options: Any) -> Any:
    elbo = stepped(2, TraceBackpropQ_ELBO(**options), program, guide)
    return diagnose(elbo, program, guide, num_samples=8)


OPTIONS = [{}, {"num_particles": 1}, WAYS["vectorised"], WAYS["leave_one_out"]]


@pytest.mark.parametrize("options", OPTIONS, ids=["default", "one", "together", "apart"])
def test_sites_that_draw_one_value_are_named_with_their_divergence(options: dict[str, Any]) -> None:
    found = look(model, guide(30.0, 30.0), **options)
    (finding,) = [finding for finding in found if finding.kind == "collapsed"]
    assert finding.sites == ("z", "k") and "draws one value only" in finding.message
    # The law is certain: log q is zero, and -log p that of the one value.
    for site, probability in (("z", 0.4), ("k", 0.2)):
        assert f"'{site}' {-math.log(probability):.3g}"[:8] in finding.message
    assert "poutine.scale" in finding.advice and "No problem" not in str(found)


def test_only_these_sites_are_named() -> None:
    (finding,) = [f for f in look(model, guide(0.3, 30.0)) if f.kind == "collapsed"]
    assert finding.sites == ("k",) and "'z'" in finding.message


def test_a_guide_that_draws_several_values_is_left_alone() -> None:
    assert "collapsed" not in look(model, guide(0.3, 0.5)).kinds()


@pytest.mark.parametrize(("signs", "is_one"), [([1.0, 1.0, 1.0], True), ([1.0, -1.0, 1.0], False)])
def test_rows_that_are_sure_of_different_values_have_not_collapsed(signs: list[float], is_one: bool) -> None:
    def rows(law: Any) -> None:
        with pyro.plate("rows", 3):
            pyro.sample("z", law)

    def sure() -> None:
        rows(dist.Bernoulli(logits=pyro.param("q", 30.0 * torch.tensor(signs))))

    found = look(lambda: rows(dist.Bernoulli(0.4)), sure, num_particles=2)
    assert ("collapsed" in found.kinds()) is is_one
