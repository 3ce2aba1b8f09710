"""The state of an ELBO: what is saved, what an exception or a NaN leaves behind."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import Case
from pyro.infer import ELBO, Trace_ELBO
from steps import CHAIN, assert_equal, run, state_of
from torch import Tensor

from pyro_bpq import AllAction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning

# Saving and loading


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("through", [copy.deepcopy, through_file], ids=["state_dict", "file"])
@pytest.mark.parametrize("is_waiting", [False, True], ids=["applied", "waiting"])
def test_state_dict_continues_in_a_new_process(
    options: dict[str, Any], through: Callable[[Any], Any], is_waiting: bool
) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    run(elbo)
    if is_waiting:
        elbo.differentiable_loss(CHAIN.model, CHAIN.guide)
    state = through(elbo.state_dict())
    fresh = TraceBackpropQ_ELBO(**options)
    fresh.load_state_dict(state)
    assert_equal(through(fresh.state_dict()).keys() >= {"_extra_state"}, True)
    # What was loaded before the critics exist is kept when it is saved again.
    again = TraceBackpropQ_ELBO(**options)
    again.load_state_dict(through(fresh.state_dict()))
    for other in (fresh, again):
        expected, found = run(copy.deepcopy(elbo), steps=5, seed=4), run(other, steps=5, seed=4)
        assert_equal(found, expected)


def test_state_dict_continues_when_critics_exist(options: dict[str, Any]) -> None:
    elbo, other = TraceBackpropQ_ELBO(**options), TraceBackpropQ_ELBO(**options, seed=3)
    run(elbo)
    run(other, steps=3, seed=8)
    other.load_state_dict(elbo.state_dict())
    run_one, run_other = run(elbo, steps=5, seed=4), run(other, steps=5, seed=4)
    assert_equal(run_other, run_one)
    assert_equal(state_of(other), state_of(elbo))


# What it survives


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("where", "number"),
    [("model", 1), ("guide", 1), ("backward", 1), ("critic", 1), ("model", None), ("guide", None), ("backward", None)],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_exception_leaves_everything_as_before(
    where: str, number: int | None, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    elbo = TraceBackpropQ_ELBO(number)
    CHAIN.params()
    if not is_first:
        run(elbo)

    def model() -> None:
        CHAIN.model()
        if where == "model":
            raise Stop

    def guide() -> None:
        CHAIN.guide()
        if where == "guide":
            raise Stop

    def fail(*_: Any, **__: Any) -> None:
        raise Stop

    if where == "backward":
        monkeypatch.setattr(Tensor, "backward", fail)
    if where == "critic":
        monkeypatch.setattr("pyro_bpq.step.critic_loss.regression", fail)
    before, rest = state_of(elbo), elbo.num_steps
    with pytest.raises(Stop):
        elbo.loss_and_grads(model, guide)
    monkeypatch.undo()
    assert_equal(state_of(elbo), before)
    assert elbo.num_steps == rest
    assert_equal(run(elbo, steps=1), run(copy_without_waiting(before, number), steps=1))


def copy_without_waiting(state: dict[str, Any], number: int | None) -> TraceBackpropQ_ELBO:
    elbo = TraceBackpropQ_ELBO(number)
    elbo.load_state_dict(copy.deepcopy(state))
    return elbo


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

    elbo = TraceBackpropQ_ELBO(estimator=AllAction(exact=True))
    for _ in range(5):
        assert elbo.loss_and_grads(model, guide) == pytest.approx(elbo.loss(model, guide), abs=5.0)
        gradient = pyro.param("q").grad
        assert bool(torch.isfinite(gradient).all())
        assert gradient[1] == 0.0
        assert float(gradient.abs().max()) > 1e-3
        pyro.param("q").grad = None
