"""The state of an ELBO: what is saved, what an exception or a NaN leaves behind."""

from __future__ import annotations

import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import Case
from pyro.infer import ELBO, Trace_ELBO
from steps import CHAIN, assert_equal, run, state_of, stepped, through_file, unbiased
from torch import Tensor

from pyro_bpq import AllAction, TraceBackpropQ_ELBO, paper_settings
from pyro_bpq.errors import BPQWarning
from pyro_bpq.estimators import Estimator, Hindsight

# Saving and loading


@pytest.mark.parametrize("is_waiting", [False, True], ids=["applied", "waiting"])
def test_state_dict_continues_in_a_new_process(options: dict[str, Any], is_waiting: bool) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    run(elbo)
    if is_waiting:
        elbo.differentiable_loss(CHAIN.model, CHAIN.guide)
    # What was loaded before the critics exist is kept when it is saved again; critics that exist are replaced.
    fresh, again, used = (TraceBackpropQ_ELBO(**options, seed=seed) for seed in (0, 0, 3))
    run(used, steps=3, seed=8)
    fresh.load_state_dict(through_file(elbo.state_dict(), weights_only=True))
    again.load_state_dict(through_file(fresh.state_dict(), weights_only=True))
    used.load_state_dict(through_file(elbo.state_dict(), weights_only=True))
    expected = run(elbo, steps=5, seed=4)
    for other in (fresh, again, used):
        assert_equal(run(other, steps=5, seed=4), expected)
    assert_equal(state_of(used), state_of(elbo))


# What it survives


ONE = {"num_particles": 1}
FAILURES = [("model", {}), ("backward", {}), ("backward", ONE), ("backward", paper_settings()), ("critic", ONE)]


@pytest.mark.parametrize(("where", "options"), FAILURES)
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_exception_leaves_everything_as_before(where: str, options: Any, is_first: bool, monkeypatch: Any) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    run(elbo, steps=0 if is_first else 10)

    def fail(*_: Any, **__: Any) -> None:
        raise InterruptedError

    if where == "backward":
        monkeypatch.setattr(Tensor, "backward", fail)
    if where == "critic":
        monkeypatch.setattr("pyro_bpq.step.learning.regression", fail)
    before, rest = state_of(elbo), elbo.num_steps
    with pytest.raises(InterruptedError):
        elbo.loss_and_grads(fail if where == "model" else CHAIN.model, CHAIN.guide)
    monkeypatch.undo()
    assert_equal(state_of(elbo), before)
    assert elbo.num_steps == rest
    fresh = TraceBackpropQ_ELBO(**options)
    fresh.load_state_dict(before)
    assert_equal(run(elbo, steps=1), run(fresh, steps=1))


def warned(elbo: ELBO, case: Case) -> set[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        elbo.loss_and_grads(case.model, case.guide)
    # A recorded step says more than Pyro: which site it comes from.
    return {str(w.message) for w in caught if not issubclass(w.category, BPQWarning)}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_warns_as_pyro_does_and_reaches_no_critic(options: dict[str, Any], bad: float) -> None:
    scale = torch.tensor(1.0)

    def model() -> None:
        CHAIN.model()
        pyro.sample("f", dist.Unit(1.0 - scale, validate_args=False), obs=torch.empty(0))

    elbo = TraceBackpropQ_ELBO(**options)
    case = Case("nan", model, CHAIN.guide, CHAIN.shapes, 0)
    run(elbo, case)
    before = state_of(elbo)
    scale.fill_(bad)
    names = ("num_particles", "vectorize_particles", "max_plate_nesting")
    theirs = Trace_ELBO(**{name: value for name, value in options.items() if name in names})
    assert warned(elbo, case) == warned(theirs, case)
    scale.fill_(1.0)
    elbo.trainer.learn(elbo)
    assert_equal(state_of(elbo), before)
    assert all(bool(torch.isfinite(g).all()) for g in run(elbo, case, steps=1)[0].values())


def test_impossible_values_give_finite_gradients() -> None:
    def model() -> None:
        k = pyro.sample("k", dist.Categorical(logits=torch.tensor([0.3, -torch.inf, 0.1])))
        pyro.sample("x", dist.Normal(torch.tensor([0.0, torch.nan, 2.0])[k], 1.0), obs=torch.tensor(1.3))

    def guide() -> None:
        logits = pyro.param("q", torch.tensor([0.2, 0.4, -0.3]))
        pyro.sample("k", dist.Categorical(logits=logits + torch.tensor([0.0, -torch.inf, 0.0])))

    stepped(5, TraceBackpropQ_ELBO(estimator=AllAction(exact=True)), model, guide)
    gradient = pyro.param("q").grad
    assert bool(gradient.isfinite().all()) and gradient[1] == 0.0 and float(gradient.abs().max()) > 1e-3


@pytest.mark.parametrize("estimator", [AllAction(exact=True), Hindsight()], ids=str)
def test_values_that_probabilities_rule_out_may_cost_infinitely_much(estimator: Estimator) -> None:
    """Given such a value, a later law may have no values left."""
    rules = torch.tensor([[0.0, -torch.inf], [0.0, 0.0], [-torch.inf, -torch.inf]])

    def model() -> None:
        k = pyro.sample("k", dist.Categorical(logits=torch.tensor([0.3, 0.1, -torch.inf])))
        y = pyro.sample("y", dist.Categorical(torch.tensor([0.6, 0.4])))
        pyro.factor("x", rules[k, y] + torch.where(pyro.sample("z", dist.Bernoulli(0.6)) == 1, k - 0.4, -torch.inf))

    def guide() -> None:
        free = pyro.param("q", torch.tensor([0.4, 0.3]))
        k = pyro.sample("k", dist.Categorical(torch.stack([free[0], 1.0 - free[0], torch.tensor(0.0)], -1)))
        pyro.sample("y", dist.Categorical(logits=rules[k] + free))
        pyro.sample("z", dist.Bernoulli(torch.tensor(1.0)))

    unbiased(TraceBackpropQ_ELBO(1, estimator=estimator), model, guide, steps=3)
