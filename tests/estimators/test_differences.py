"""Differences of counts: exact over all values of truncated laws, and what one step changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import problems
import pyro
import pyro.distributions as dist
import pytest
import torch
from counts import ListedGeometric, ListedNegativeBinomial, ListedPoisson
from models import real
from problems import WEIGHT, error_of_draws, two_rows, with_change
from pyro import poutine
from steps import bias, filtered, fresh, stepped
from torch import Tensor

from pyro_bpq import ExpectedCost, TraceBackpropQ_ELBO, cost
from pyro_bpq.estimators import Differences
from pyro_bpq.estimators import differences as estimator_module
from pyro_bpq.rollout.features import count_mean, neighbours
from pyro_bpq.testing import exact_gradient

Program = tuple[Callable[[], None], Callable[[], None]]


def trained(program: Program, particles: int = 1, steps: int = 3, **options: Any) -> TraceBackpropQ_ELBO:
    elbo = stepped(steps, TraceBackpropQ_ELBO(particles, **{"estimator": Differences(), **options}), *program)
    return elbo.eval()


LAWS = {
    "poisson": lambda q: ListedPoisson((q - 1.0).exp()),
    "binomial": lambda q: dist.Binomial(4, (q - 1.0).sigmoid()),
    "binomial logits": lambda q: dist.Binomial(4, logits=q - 0.4),
    "likely binomial": lambda q: dist.Binomial(4, logits=q + 1.4),
    "negative binomial": lambda q: ListedNegativeBinomial(2.5, 0.05 + 0.05 * q.sigmoid()),
    "negative binomial logits": lambda q: ListedNegativeBinomial(1.5, logits=q - 3.5),
    "dispersion": lambda q: ListedNegativeBinomial(q.exp(), logits=q - 3.5),
    "geometric": lambda q: ListedGeometric(0.85 + 0.1 * q.sigmoid()),
    "geometric logits": lambda q: ListedGeometric(logits=q + 2.0),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_identity_holds_over_the_support(name: str) -> None:
    q = real(0.3)[0].requires_grad_()
    fn = LAWS[name](q if name != "dispersion" else torch.tensor(0.7).double())
    values = fn.enumerate_support()
    near, probs = neighbours(fn, values), fn.log_prob(values).exp()

    def f(z: Tensor) -> Tensor:
        return (0.7 * z).sin() + 0.1 * z.square()

    if name != "dispersion":
        (slope,) = torch.autograd.grad((probs * f(values)).sum(), q, retain_graph=True)
        (of_mean,) = torch.autograd.grad(count_mean(fn), q)
        found = (probs * near.step * near.weight * (f(values + near.step) - f(values))).sum() * of_mean
        torch.testing.assert_close(found, slope, rtol=0, atol=1e-10)
    # The weight of the other side: the same sum, by the values that steps lead to.
    forth = (probs * near.weight * f(values + near.step)).sum()
    torch.testing.assert_close((probs * near.back * f(values)).sum(), forth, rtol=0, atol=1e-9)


def alone(law: Callable[[Tensor], Any], is_masked: bool = False) -> Program:
    """One count, scaled, with a cost that torch cannot differentiate."""

    def guide() -> None:
        with poutine.scale(scale=1.5):
            pyro.sample("z", law(pyro.param("q", real(0.3)[0])))

    def model() -> None:
        with poutine.scale(scale=1.5), poutine.mask(mask=not is_masked):
            z = pyro.sample("z", law(pyro.param("p", real(0.1)[0])))
        pyro.sample("x", dist.Normal((0.4 * z + 0.2).round() + 0.3 * z, 0.7), obs=real(0.4)[0])

    return model, guide


@pytest.mark.parametrize("is_masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("name", LAWS)
def test_a_count_is_exact(name: str, is_masked: bool) -> None:
    program = alone(LAWS[name], is_masked)
    assert bias(trained(program), *program) < 1e-8


def small(kind: str) -> Any:
    """Poisson laws of few likely values, or binomial ones."""
    if kind == "poisson":
        return lambda mean: ListedPoisson((0.05 * mean).clamp(min=1e-30))
    return lambda mean: dist.Binomial(2, logits=mean - 1.0)


def chain(kind: str, excludes: bool = False, is_short: bool = True) -> Program:
    """Two counts or three, each drawn from the last ones; with ``excludes`` a zero has only zeros after it."""
    law = small(kind)

    def run(side: str) -> None:
        a, b, c = pyro.param(f"{side}", real(0.9, 0.6, 1.1) if side == "q" else real(0.7, 0.9, 0.5)).unbind()
        more = 0.0 if excludes else 1.0
        x = pyro.sample("x", law(a.exp()))
        y = pyro.sample("y", law(b * x + more))
        z = y if is_short else pyro.sample("z", law(c * y + 0.3 * x + more))
        if side == "p":
            pyro.sample("d", dist.Normal(x * y - 0.4 * z + 0.3 * z.square(), 0.9), obs=real(0.6)[0])

    return (lambda: run("p")), (lambda: run("q"))


@pytest.mark.parametrize(("kind", "excludes"), [("poisson", False), ("poisson", True), ("binomial", False)])
def test_a_chain_is_exact(kind: str, excludes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ListedPoisson, "most", 7)
    program = chain(kind, excludes, is_short=kind == "poisson")
    elbo = trained(program)
    assert {"x", "y"} <= set(elbo.plan.held.sites)
    assert bias(elbo, *program) < (1e-10 if kind == "binomial" else 1e-8)


def test_two_particles_are_exact() -> None:
    program = chain("binomial")
    elbo = trained(program, 2, vectorize_particles=True, max_plate_nesting=0)
    assert bias(elbo, *program) < 1e-10


# Many components, some of which are drawn.


# Predicted by the trapezoid rule.
DRAWN = Differences(draws=1, whole=1, curvature=False)


def layers(kind: str, rows: int = 1) -> Program:
    """Two layers of two counts above data that reads both, in a plate; the lower one has a nonlinear decoder."""
    law, table = small(kind), partial(problems.table, scale=0.8)

    def guide() -> None:
        with pyro.plate("rows", rows), poutine.scale(scale=2.0):
            low = pyro.sample("low", law(table("qlow", rows, 2).exp()).to_event(1))
            mean = torch.nn.functional.linear(low, table("w", 1, 2), table("bias", 1))
            pyro.sample("top", law(mean.exp().clamp(max=2.0)).to_event(1))

    def model() -> None:
        with pyro.plate("rows", rows):
            with poutine.scale(scale=2.0):
                top = pyro.sample("top", law(table("ptop", 1).exp().expand(rows, 1)).to_event(1))
                low = pyro.sample("low", law((0.4 * top + 0.3).expand(rows, 2)).to_event(1))
            mean = torch.nn.functional.linear(low, table("v", 3, 2)).tanh() + top
            pyro.sample("x", dist.Normal(mean.sum(-1), 0.8), obs=real(0.7)[0].expand(rows))

    return model, guide


SLOW = [("poisson", 1, False), ("poisson", 1, True), ("binomial", 2, False)]


@pytest.mark.parametrize(
    ("kind", "rows", "curvature"),
    [("binomial", 1, False), ("binomial", 1, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_drawn_components_are_exact(kind: str, rows: int, curvature: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ListedPoisson, "most", 7)
    program = layers(kind, rows)
    elbo = trained(program, estimator=replace(DRAWN, curvature=curvature))
    assert elbo.plan.held.sites["low"].is_drawn
    assert error_of_draws(elbo, *program) < (1e-10 if kind == "binomial" else 1e-8)


TOGETHER = {"vectorize_particles": True, "max_plate_nesting": 1}


@pytest.mark.parametrize("options", [TOGETHER, {}], ids=["together", "one by one"])
def test_components_of_one_of_two_particles_are_exact(options: dict[str, Any]) -> None:
    def run(kind: str) -> None:
        with pyro.plate("rows", 1):
            mean = pyro.param(kind, real(0.4, -0.7)).expand(1, 2)
            z = pyro.sample("z", dist.Binomial(2, logits=mean).to_event(1))
            if kind == "p":
                pyro.sample("x", dist.Normal(z.prod(-1) + z.sum(-1).sin(), 0.8), obs=real(0.7))

    program = (lambda: run("p")), (lambda: run("q"))
    elbo = trained(program, 2, estimator=DRAWN, **options)
    assert elbo.plan.held.sites["z"].is_drawn
    assert error_of_draws(elbo, *program) < 1e-10


def test_slopes_of_costs_that_read_several_rows_leave_it_exact() -> None:
    """The cost is known at other values of ``y`` alone, and is no immediate one of ``x``."""

    def run(kind: str) -> None:
        y = pyro.sample("y", dist.Binomial(1, logits=pyro.param(f"{kind}y", real(0.4, -0.7))).to_event(1))
        with pyro.plate("rows", 2):
            logits = pyro.param(f"{kind}x", real(0.3, -0.2)).expand(2, 2)
            x = pyro.sample("x", dist.Binomial(1, logits=logits).to_event(1))
            if kind == "p":
                pyro.sample("e", dist.Normal(x.sum(-1), 0.9), obs=real(0.7, 0.1))
        if kind == "p":
            pyro.sample("d", dist.Normal((1.3 * x.sum()).sin() + y.prod(-1), 0.8), obs=real(0.7)[0])

    program = (lambda: run("p")), (lambda: run("q"))
    elbo = trained(program, estimator=DRAWN)
    assert elbo.plan.held.sites["x"].rest == ("-log p(d)",)
    assert error_of_draws(elbo, *program) < 1e-10


def test_a_law_without_a_derivative_beside_costs_that_have_one_leaves_it_exact() -> None:
    def agent() -> None:
        z = pyro.sample("z", dist.Binomial(2, logits=pyro.param("qz", real(0.4, -0.7))).to_event(1))
        shown = torch.special.gammainc(z + 1.0, torch.ones_like(z)).sum(-1)  # torch refuses to go backward
        y = pyro.sample("y", dist.Binomial(1, logits=pyro.param("qy", real(0.3))[0] + shown))
        cost("c", (1.3 * z).sin().sum(-1) + z.prod(-1))
        cost("d", 1.5 * y)

    with filtered("ignore"):
        elbo = stepped(4, ExpectedCost(1, estimator=DRAWN), None, agent).eval()
        truth = exact_gradient(None, agent, only_costs=True)
        assert error_of_draws(elbo, None, agent, truth=truth) < 1e-10


def with_small_slopes(held: Any) -> Any:
    return held if held.ahead is None else held._replace(ahead=0.9 * held.ahead)


# Of which function which argument is changed, how, and after how many steps: before any the score serves later costs.
FAULTS: dict[str, tuple[str, int, Callable[[Any], Any], int]] = {
    "weight": ("_differences", 2, lambda near: near._replace(weight=torch.ones_like(near.weight)), 0),
    "way back": ("_differences", 2, lambda near: near._replace(back=1.01 * near.back), 0),
    "mean of the linear variate": ("_without_linear", 1, lambda held: held._replace(log_q=0.9 * held.log_q), 3),
    "slope at the next value": ("_table", 0, with_small_slopes, 3),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, at, change, steps = FAULTS[name]
    is_drawn = name == "slope at the next value"
    program, estimator = (layers("binomial"), DRAWN) if is_drawn else (chain("binomial"), Differences())
    monkeypatch.setattr(estimator_module, function, with_change(getattr(estimator_module, function), at, change))
    assert error_of_draws(trained(program, steps=steps, estimator=estimator), *program) > 1e-4


@pytest.mark.parametrize("is_quadratic", [False, True])
def test_slopes_at_both_values_tell_costs_of_second_order(is_quadratic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, right = list[Any](), estimator_module._table
    program = two_rows(dist.Poisson, lambda z: z @ WEIGHT.t() if is_quadratic else (z @ WEIGHT.t()).sin())
    monkeypatch.setattr(estimator_module, "_table", lambda held, *rest: seen.append(held) or right(held, *rest))
    trained(program, steps=2, estimator=DRAWN)
    held = seen[-1]
    slopes = held.changes.immediate.gather(-1, held.drawn) + held.ahead
    error = (held.exact.immediate - 0.5 * slopes).abs().max()
    assert bool(error < 1e-10) if is_quadratic else bool(error > 1e-2)


def test_what_a_count_excludes_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ListedPoisson, "most", 7)
    monkeypatch.setattr(estimator_module, "_MOST", math.inf)
    program = chain("poisson", excludes=True)
    elbo = trained(program)
    (moments,) = (value for key, value in elbo.state_dict().items() if key.endswith("moments"))
    assert bool((moments > 0).any())
    assert bias(elbo, *program) > 1e-4


def priced(price: Callable[[Tensor], Any], dtype: torch.dtype = torch.float64) -> Program:
    """Two counts, whose price the model states."""

    def run(kind: str) -> Tensor:
        logits = pyro.param(kind, (real(0.3, -0.2) if kind == "q" else real(0.1, 0.4)).to(dtype))
        return pyro.sample("z", dist.Binomial(3, logits=logits).to_event(1))

    return (lambda: price(run("p"))), (lambda: run("q"))


def test_outdated_costs_leave_it_exact() -> None:
    flags = {"flag": 0.0}
    program = priced(lambda z: pyro.factor("f", torch.as_tensor(z.sum(-1) * flags["flag"] + 0.3 * z.prod(-1))))
    elbo = trained(program, steps=20)
    flags["flag"] = 1.0
    assert bias(elbo, *program) < 1e-10


def test_counts_may_have_another_type_than_costs() -> None:
    program = priced(lambda z: pyro.factor("f", 0.3 * z.double().prod(-1)), torch.float32)
    assert bias(trained(program), *program) < 1e-6


def test_costs_that_are_not_known_at_other_values_multiply_the_score() -> None:
    program = priced(lambda z: cost("c", lambda: (z.numpy() ** 2).sum(-1)))
    elbo = trained(program)
    assert elbo.plan.held.sites["z"].rest
    assert bias(elbo, *program) < 1e-10


def test_compiled_steps_have_the_same_gradient() -> None:
    program = chain("binomial")
    found = []
    for options in ({}, {"compile": "eager"}):
        fresh(3)
        trained(program, 2, 12, vectorize_particles=True, **options)
        found.append(torch.cat([leaf.grad.reshape(-1) for leaf in pyro.get_param_store()._params.values()]))
    torch.testing.assert_close(*found)
