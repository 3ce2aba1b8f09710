"""Subsets and orders: by enumeration, as one site and as a chain of choices."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO, config_enumerate
from steps import unbiased
from torch import Tensor

from pyro_bpq import AllAction, KSubset, LeaveOneOut, PlackettLuce, ScoreFunction, TraceBackpropQ_ELBO, sample_chain
from pyro_bpq.errors import OptionError, UnsupportedSiteError
from pyro_bpq.estimators import Hindsight
from pyro_bpq.plan import plan as rule
from pyro_bpq.testing import exact_loss, iter_outcomes

LOGITS = torch.tensor([[0.4, -1.1, 0.7, 0.2], [3.0, 0.1, -2.0, -0.6]], dtype=torch.float64)
COSTS = torch.tensor([0.8, -0.5, 1.3, -0.9], dtype=torch.float64)
PAIRS = torch.outer(COSTS, COSTS.flip(0)) + torch.diag(COSTS)
CASES: dict[str, Any] = {f"{k} of 4": partial(KSubset, k=k) for k in (1, 2, 3, 4)}
CASES |= {"an order of 4": PlackettLuce, "1 place": partial(PlackettLuce, k=1), "2 places": partial(PlackettLuce, k=2)}
Law = Callable[[Tensor], Any]


@pytest.fixture(params=CASES)
def law(request: pytest.FixtureRequest) -> Law:
    return CASES[request.param]


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0.0, atol=1e-10)


def joint(fn: Any) -> dict[tuple[float, ...], float]:
    """The law of the chain's value, by enumeration of its sites."""
    found = dict[tuple[float, ...], float]()
    for probability, value in iter_outcomes(lambda: sample_chain("s", fn)):
        found[tuple(value.tolist())] = found.get(tuple(value.tolist()), 0.0) + probability
    return found


# The distributions.


def test_log_probs_of_all_values(law: Law) -> None:
    fn = law(LOGITS)
    values = fn.enumerate_support()
    assert values.shape == (len(values), 2, *fn.event_shape) and len(values.unique(dim=0)) == len(values)
    assert bool(fn.support.check(values).all())
    close(fn.log_prob(values).exp().sum(0), torch.ones(2, dtype=torch.float64))
    assert torch.equal(fn.enumerate_support(expand=False).expand(values.shape), values)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_subsets_by_their_definition(k: int) -> None:
    fn = KSubset(LOGITS, k)
    values = fn.enumerate_support()
    weights = (values * LOGITS).sum(-1).exp()
    close(fn.log_prob(values).exp(), weights / weights.sum(0))
    close(fn.mean, (weights.unsqueeze(-1) * values).sum(0) / weights.sum(0).unsqueeze(-1))
    close(fn.variance, fn.mean * (1 - fn.mean))


def test_orders_by_hand() -> None:
    a, b, c, d = LOGITS[0].exp().tolist()
    first = c / (a + b + c + d) * a / (a + b + d)
    close(PlackettLuce(LOGITS[0], 2).log_prob(torch.tensor([2, 0])).exp(), torch.tensor(first).double())
    whole = PlackettLuce(LOGITS[0]).log_prob(torch.tensor([2, 0, 3, 1])).exp()
    close(whole, torch.tensor(first * d / (b + d)).double())


def test_gradients_are_finite_at_all_values_and_that_of_a_subset_is_its_distance_from_the_mean(law: Law) -> None:
    logits = (30.0 * LOGITS).requires_grad_()
    fn = law(logits)
    for value in fn.enumerate_support():
        (gradient,) = torch.autograd.grad(fn.log_prob(value).sum(), logits)
        assert bool(gradient.isfinite().all())
        if isinstance(fn, KSubset):
            close(gradient, value - fn.mean.detach())


def test_draws_follow_the_law(law: Law) -> None:
    """Frequencies are within four standard errors, where twenty draws are expected."""
    fn, number = law(LOGITS), 20_000
    drawn, values = fn.sample((number,)), fn.enumerate_support()
    p = fn.log_prob(values).exp()
    found = torch.stack([(drawn == value).all(-1).double().mean(0) for value in values])
    errors = (found - p) / (p * (1 - p) / number).sqrt().clamp(min=1e-9)
    assert float(errors[p > 20 / number].abs().max()) < 4.0


def test_shapes_checks_and_copies(law: Law) -> None:
    fn = law(LOGITS)
    wide = copy.deepcopy(fn.expand((3, 2)))
    assert wide.sample((5,)).shape == (5, 3, 2, *fn.event_shape) and wide.log_prob(wide.sample()).shape == (3, 2)
    assert fn.to_event(1).log_prob(fn.sample()).shape == () and wide.n == 4 and wide.k == fn.k
    assert not fn.support.check(torch.tensor([1, 0, 0, 0] if isinstance(fn, KSubset) and fn.k > 1 else [0, 1, 1, 2]))
    with pytest.raises(ValueError, match="support"):
        fn.log_prob(torch.full(fn.event_shape, 7).to(fn.sample()))
    with pytest.raises(OptionError, match="k=1 of 0 items"):
        KSubset(torch.tensor(1.0), 1)
    with pytest.raises(OptionError, match="k=5 of 4 items"):
        type(fn)(LOGITS, 5)


def test_many_items_stay_finite_in_single_precision() -> None:
    logits = (40.0 * torch.sin(torch.arange(200.0))).requires_grad_()
    for fn in (KSubset(logits, 60), PlackettLuce(logits, 60)):
        value = fn.sample()
        (gradient,) = torch.autograd.grad(fn.log_prob(value), logits)
        assert bool(gradient.isfinite().all()) and bool(fn.support.check(value))
    assert math.isclose(float(KSubset(logits.detach(), 60).mean.sum()), 60.0, rel_tol=1e-4)


# The chains.


def test_a_chain_has_the_same_law(law: Law) -> None:
    fn = law(LOGITS[0])
    found, values = joint(fn), fn.enumerate_support()
    assert len(found) == len(values)
    close(torch.tensor([found[tuple(value.tolist())] for value in values]).double(), fn.log_prob(values).exp())


def test_a_chain_scores_what_it_draws(law: Law) -> None:
    fn = law(LOGITS)

    def program() -> Tensor:
        with pyro.plate("rows", 2):
            return sample_chain("s", fn)

    trace = poutine.trace(program).get_trace()
    own = sum(site["fn"].log_prob(site["value"]) for name, site in trace.nodes.items() if name.startswith("s_"))
    value = trace.nodes["_RETURN"]["value"]
    assert value.dtype == fn.sample().dtype and value.shape == (2, *fn.event_shape)
    close(own, fn.log_prob(value))


def test_other_laws_are_refused() -> None:
    for fn in (dist.Normal(0.0, 1.0), KSubset(LOGITS, 2).to_event(1)):
        with pytest.raises(UnsupportedSiteError, match=r"Site 's' .* is no chain .* KSubset or PlackettLuce"):
            sample_chain("s", fn)


# Gradients.


def programs(law: Law, draw: Any = sample_chain, rows: int = 0, items: bool = False, size: int = 4) -> Any:
    """A model and a guide of a subset or an order.

    Args:
        law: Its law, given logits.
        draw: ``sample_chain``, or ``pyro.sample``.
        rows: Number of rows of a plate; 0 for none.
        items: Whether the costs of single items are stated one by one, and nothing else costs.
        size: Number of items.
    """

    def plate() -> Any:
        return pyro.plate("rows", rows) if rows else contextlib.nullcontext()

    def model() -> None:
        with plate():
            values = draw("s", law(COSTS[:size]))
            if items:
                for i, part in enumerate(values.unbind(-1)):
                    pyro.sample(f"x_{i}", dist.Normal(COSTS[i] * part, 0.7), obs=torch.tensor(0.3))
            else:
                table = PAIRS[: values.shape[-1], : values.shape[-1]]
                pyro.factor("pairs", ((values.double() @ table) * values).sum(-1))

    def guide() -> None:
        scale = torch.tensor([[1.0], [-0.6]], dtype=torch.float64)[:rows] if rows else 1.0
        logits = pyro.param("logits", LOGITS[0].clone())[:size]
        with plate():
            draw("s", law(logits * scale))

    return model, guide


ESTIMATORS: dict[str, dict[str, Any]] = {
    "one particle": {"num_particles": 1},
    "all-action": {"num_particles": 1, "estimator": AllAction()},
    "leave-one-out": {"num_particles": 2, "estimator": ScoreFunction(LeaveOneOut())},
    "hindsight": {"num_particles": 2, "vectorize_particles": True, "estimator": Hindsight(crossed=True)},
}


SMALL = {"subset": partial(KSubset, k=1), "order": partial(PlackettLuce, k=2)}


@pytest.mark.parametrize(("options", "rows"), [*((options, 0) for options in ESTIMATORS), ("one particle", 2)])
@pytest.mark.parametrize("kind", SMALL)
def test_a_chain_has_the_exact_gradient(kind: str, options: str, rows: int) -> None:
    unbiased(TraceBackpropQ_ELBO(**ESTIMATORS[options]), *programs(SMALL[kind], rows=rows, size=3), steps=6)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("kind", ["1 of 4", "2 of 4", "2 places", "an order of 4"])
def test_one_site_is_served_by_the_default(number: int, kind: str) -> None:
    elbo = unbiased(TraceBackpropQ_ELBO(num_particles=number), *programs(CASES[kind], pyro.sample), steps=6)
    assert "ScoreFunction" in str(elbo.plan)


@pytest.mark.parametrize("rows", [0, 2])
def test_costs_of_items_are_summed_exactly(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(rule, "DRAWN_STEPS", (2, 2))
    both = programs(CASES["1 of 4" if rows else "2 of 4"], rows=rows, items=True, size=3 if rows else 4)
    elbo = unbiased(TraceBackpropQ_ELBO(), *both, steps=6)
    assert str(elbo.plan).startswith("nothing is drawn")
    assert math.isclose(elbo.loss(*both), exact_loss(*both), abs_tol=1e-10)


@pytest.mark.parametrize("law", [KSubset, PlackettLuce])
def test_items_that_cannot_be_chosen_have_probability_zero(law: Any) -> None:
    logits = torch.tensor([0.3, -math.inf, 1.0, -0.5], requires_grad=True)
    fn, total, left = law(logits, 2), torch.zeros(()), law(logits[[0, 2, 3]], 2)
    probs = fn.log_prob(fn.enumerate_support()).exp()
    assert torch.allclose(probs[probs > 0.0], left.log_prob(left.enumerate_support()).exp(), rtol=0.0, atol=1e-12)

    def draw(t: int, choice: Any) -> Tensor:
        nonlocal total
        value = choice.sample()
        total = total + choice.log_prob(value)
        return value

    whole = fn.log_prob(fn.chain(draw))
    assert torch.allclose(whole, total, rtol=0.0, atol=1e-12)
    (slope,) = torch.autograd.grad(probs.square().sum() + whole + 2.0 * total, logits)
    assert slope.isfinite().all() and slope[1] == 0.0


@pytest.mark.parametrize("law", [KSubset, PlackettLuce])
def test_a_chain_may_be_enumerated(law: Any) -> None:
    logits = torch.tensor([0.3, -0.2, 0.5])

    def model() -> None:
        value = sample_chain("s", law(logits, 2))
        pyro.factor("x", (value * torch.arange(1.0, value.shape[-1] + 1.0)).sum(-1))

    fn = law(logits, 2)
    values = fn.enumerate_support()
    exact = (fn.log_prob(values) + (values * torch.arange(1.0, values.shape[-1] + 1.0)).sum(-1)).logsumexp(0)
    found = TraceEnum_ELBO(max_plate_nesting=0).loss(config_enumerate(model), lambda: None)
    assert found == pytest.approx(-float(exact), abs=1e-10)
