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
from models import BY_NAME, Case
from pyro.infer import ELBO, SVI, Trace_ELBO
from pyro.optim import SGD, Adam
from steps import CHAIN, DATA, assert_equal, module, run, state_of, step
from torch import Tensor

from pyro_bpq import (
    AllAction,
    RunningBaseline,
    ScoreFunction,
    TraceBackpropQ_ELBO,
)

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


@pytest.mark.parametrize("number", [None, 1])
def test_elbo_module_state_dict_round_trip(number: int | None) -> None:
    with pyro.settings.context(module_local_params=True):
        check_elbo_module_state_dict_round_trip(number)


def check_elbo_module_state_dict_round_trip(number: int | None) -> None:
    fit = module(TraceBackpropQ_ELBO(number))
    optimiser = torch.optim.SGD(fit.parameters(), lr=0.01)
    for _ in range(5):
        optimiser.zero_grad()
        fit(DATA).backward()
        optimiser.step()
    state = through_file(fit.state_dict())
    fresh = module(TraceBackpropQ_ELBO(number))
    fresh.load_state_dict(state)
    grads = []
    for each in (fit, fresh):
        each.zero_grad()
        pyro.set_rng_seed(3)
        each(DATA).backward()
        grads.append([p.grad.clone() for p in each.parameters()])
    assert_equal(grads[0], grads[1])


# What it survives


def test_batch_size_may_change() -> None:
    case = BY_NAME["global_local"]
    for options in (
        {},
        {"num_particles": 1},
        {"num_particles": 2},
        {"estimator": ScoreFunction(RunningBaseline())},
        {"learner": None},
    ):
        elbo = TraceBackpropQ_ELBO(**options)
        case.params()
        svi = SVI(case.model, case.guide, SGD({"lr": 0.01}), elbo)
        for size in (3, 5, 1, 3, 2):
            svi.step(torch.linspace(-1.0, 1.0, size))
        assert elbo.num_steps == 5


def test_two_elbos_share_nothing() -> None:
    alone = TraceBackpropQ_ELBO(1)
    expected = run(alone, steps=6)
    one, other = TraceBackpropQ_ELBO(1), TraceBackpropQ_ELBO(num_particles=2)
    run(other)
    found = run(one, steps=3)
    state = torch.get_rng_state()
    run(other, BY_NAME["reordered_guide"], steps=4, seed=5)
    CHAIN.params()
    torch.set_rng_state(state)
    assert_equal(found + [step(one) for _ in range(3)], expected)


@pytest.mark.parametrize("number", [None, 1])
def test_one_elbo_may_serve_two_programs_with_the_same_names(number: int | None) -> None:
    elbo = TraceBackpropQ_ELBO(number)
    for name in ("chain", "fork", "diamond", "vector", "nested_plates", "chain", "global_local", "plate"):
        grads = run(elbo, BY_NAME[name], steps=4)
        assert all(bool(torch.isfinite(g).all()) for grad in grads for g in grad.values())
    assert elbo.num_steps == 32


def test_clear_param_store_in_between() -> None:
    for options in ({}, {"num_particles": 1}, {"learner": None}):
        elbo = TraceBackpropQ_ELBO(**options)
        for _ in range(3):
            CHAIN.params()
            svi = SVI(CHAIN.model, CHAIN.guide, Adam({"lr": 0.01}), elbo)
            for _ in range(3):
                svi.step()
        assert elbo.num_steps == 9


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
    return {str(w.message) for w in caught}


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


def test_nan_in_one_particle_reaches_no_critic() -> None:
    calls, bad = [], [0]

    def model() -> None:
        CHAIN.model()
        calls.append(None)
        factor = torch.tensor(float("nan") if len(calls) == bad[0] else 0.0)
        pyro.sample("f", dist.Unit(factor, validate_args=False), obs=torch.empty(0))

    elbo = TraceBackpropQ_ELBO(num_particles=2, estimator=AllAction(exact=True))
    case = Case("nan", model, CHAIN.guide, CHAIN.shapes, 0)
    run(elbo, case)
    before = state_of(elbo)
    # The second particle of the next step.
    bad[0] = len(calls) + 2
    with pytest.warns(UserWarning, match="NaN"):
        elbo.loss_and_grads(case.model, case.guide)
    assert_equal(state_of(elbo), before)


def test_impossible_values_give_finite_gradients() -> None:
    def model() -> None:
        k = pyro.sample("k", dist.Categorical(logits=torch.tensor([0.3, -torch.inf, 0.1])))
        pyro.sample("x", dist.Normal(torch.tensor([0.0, torch.nan, 2.0])[k], 1.0), obs=torch.tensor(1.3))

    def guide() -> None:
        logits = pyro.param("q", torch.tensor([0.2, 0.4, -0.3]))
        pyro.sample("k", dist.Categorical(logits=logits + torch.tensor([0.0, -torch.inf, 0.0])))

    elbo = TraceBackpropQ_ELBO(estimator=AllAction(exact=True))
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    for _ in range(5):
        assert elbo.loss_and_grads(model, guide) == pytest.approx(elbo.loss(model, guide), abs=5.0)
        gradient = pyro.param("q").grad
        assert bool(torch.isfinite(gradient).all())
        assert gradient[1] == 0.0
        assert float(gradient.abs().max()) > 1e-3
        pyro.param("q").grad = None
