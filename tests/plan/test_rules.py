"""The rules by which sites get their estimators, read from top to bottom, and how a plan prints them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import limited, trained

from pyro_bpq import AllAction, LinearCritic, TraceBackpropQ_ELBO
from pyro_bpq.plan.rules import MANY_COMPONENTS, MOST_PARTICLES, SITES
from pyro_bpq.short import short

ROWS = 12
DATA = torch.linspace(-1.0, 1.0, ROWS)


def after(draw: Callable[..., Any], rows: int = 0, max_elements: int = 1 << 21, **options: Any) -> TraceBackpropQ_ELBO:
    """An ELBO after two steps on one site, or on two that follow each other in rows."""

    def sites(rate: torch.Tensor, is_observed: bool = False) -> None:
        data = DATA[:rows] if rows else torch.tensor(0.5)
        with pyro.plate("rows", rows) if rows else contextlib.nullcontext():
            y = pyro.sample("y", draw(rate + data)).float() if rows else 0.0
            z = pyro.sample("z", draw(rate + y)).float()
            if is_observed:
                pyro.sample("x", dist.Normal(z if rows else z.sum(), 1.0), obs=data)

    def model() -> None:
        sites(torch.zeros(()), is_observed=True)

    def guide() -> None:
        sites(pyro.param("rate", lambda: torch.tensor(0.2)))

    return trained(limited(max_elements, **options), model, guide, steps=2)


def coin(rate: torch.Tensor) -> Any:
    return dist.Bernoulli(logits=rate)


def coins(number: int) -> Callable[..., Any]:
    return lambda rate: dist.Bernoulli(logits=rate * torch.ones(number)).to_event(1)


COUNTS = "counts: differences of one step, which slopes predict where there are many"
SLOPES = "the only site of many components: slopes of the costs, corrected by a true difference"
SUM, OTHERS = "few values: a sum over all of them", "other particles are the baseline"
CASES: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "pathwise": ("reparameterised", lambda r: dist.Normal(r, 1.0), {}),
    "all": ("chosen for all sites", coin, {"estimator": AllAction()}),
    "few": (SUM, coin, {}),
    "counts": (COUNTS, lambda r: dist.Poisson(r.exp()), {}),
    "rows": (f"rows of data, or few sites: {OTHERS}", coin, {"rows": ROWS}),
    "few sites": (f"rows of data, or few sites: {OTHERS}", coin, {"rows": ROWS - 3}),
    "few sites, one particle": (SUM, coin, {"rows": ROWS - 3, "num_particles": 1}),
    "many components": (SUM, coins(MANY_COMPONENTS), {}),
    "some components": (f"many components: {OTHERS}", coins(MANY_COMPONENTS - 1), {}),
    "many components, a dear run": (f"many components: {OTHERS}", coins(20), {"max_elements": 1}),
    "slopes": (SLOPES, coins(20), {"max_elements": 1, "num_particles": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_each_site_says_by_which_rule_it_was_served(name: str) -> None:
    rule, draw, options = CASES[name]
    elbo = after(draw, **options)
    assert elbo.plan.rules["z"] == rule
    text = str(elbo.plan)
    assert f"z: {short(elbo.plan.layout.specs['z'].estimator)}" in text and f", because {rule}" in text


def test_a_plan_tells_particles_critics_and_exact_costs() -> None:
    elbo = after(coin)
    assert str(elbo.plan).splitlines() == [
        "1 particle",
        "z: AllAction(), because few values: a sum over all of them; known at all values: -log p(x), -log p(z), "
        "log q(z), by 2 rows of an extra run; critic: none, as nothing is left to learn",
    ]
    assert str(after(coin, rows=ROWS).plan).startswith(f"{MOST_PARTICLES} particles\n")


def test_sites_with_observations_of_their_own_are_told_together() -> None:
    def program(obs: torch.Tensor | None) -> None:
        z = torch.tensor(0.0)
        for t in range(12):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3)) + z))
            if obs is not None:
                pyro.sample(f"x_{t}", dist.Normal(z, 1.0), obs=obs)

    elbo = trained(TraceBackpropQ_ELBO(), lambda: program(torch.tensor(0.5)), lambda: program(None), steps=1)
    text = str(elbo.plan)
    assert "-log p(x_t), -log p(the site), log q(the site)" in text and text.count("because") < 6
    assert "-log p(x_11)" in text and "\0" not in text and "\1" not in text


def test_rules_have_names_of_their_own() -> None:
    says = [rule.says for rule in SITES]
    assert len(set(says)) == len(says)
    assert {rule for rule, _, _ in CASES.values()} <= set(says)


def test_what_an_extra_run_tells_is_not_learned() -> None:
    # The last cost reads a site beside the one whose values are run: it is not immediate, but known.
    def sites(rate: torch.Tensor) -> tuple[Any, Any]:
        return pyro.sample("s", dist.Poisson(rate.exp())), pyro.sample("k", dist.Bernoulli(logits=rate))

    def model() -> None:
        s, k = sites(torch.tensor(0.1))
        pyro.sample("x", dist.Normal(k, 1.0 + s), obs=torch.tensor(1.3))

    def guide() -> None:
        sites(pyro.param("rate", torch.tensor(0.2)))

    def plan(**options: Any) -> str:
        return str(trained(TraceBackpropQ_ELBO(**options), model, guide, steps=1).plan)

    told = plan(num_particles=1)
    assert "critic: none, as nothing is left to learn" in told and "known at all values: -log p(x)" in told
    assert "critic: LinearCritic()" in plan(critic=LinearCritic())
