"""Sums over all values follow a structure that changes at the same sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from steps import coin_guide, filtered, fitted, repeat, rows, seeing
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.plan import rules
from pyro_bpq.testing import assert_unbiased, exact_loss

pytestmark = pytest.mark.usefixtures("early")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One particle runs where nothing is summed: its outcomes can be enumerated."""
    monkeypatch.setattr(rules, "MOST_PARTICLES", 1)


X = torch.tensor([0.3, -1.0])
# Programs read its value, of which no plain value tells.
SWITCH = torch.tensor(False)


@pytest.fixture(autouse=True)
def _off() -> None:
    SWITCH.fill_(False)


def _fork(is_full: Callable[[Any], bool], start: Callable[[int], Tensor] = torch.zeros) -> tuple[Any, Any]:
    """A program of two coins, the second of which counts from some time on."""

    def model(*args: Any) -> None:
        w = pyro.param("w", torch.tensor([0.5, 1.5]))
        with pyro.plate("d", len(X)):
            a, b = (pyro.sample(name, dist.Bernoulli(0.4)) for name in "ab")
            loc = w[0] * a + w[1] * b * (1 - 2 * a) if is_full(args) else w[0] * a
            pyro.sample("x", dist.Normal(loc, 0.5), obs=X)

    def guide(*args: Any) -> None:
        with pyro.plate("d", len(X)):
            for name in "ab":
                pyro.sample(name, dist.Bernoulli(logits=pyro.param(f"q{name}", start(2))))

    return model, guide


def _summed(model: Any, guide: Any, *args: Any, steps: int = 20, **options: Any) -> TraceBackpropQ_ELBO:
    """An ELBO after some steps, which sums."""
    elbo = fitted(TraceBackpropQ_ELBO(**options), model, guide, [args] * steps)
    assert elbo.particles.now.sums
    return elbo


def _go_on(elbo: TraceBackpropQ_ELBO, model: Any, guide: Any, *args: Any, steps: int = 1) -> None:
    with filtered("ignore"):
        repeat(steps, SVI(model, guide, Adam({"lr": 0.01}), elbo).step, *args)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("old", "new"), [(False, True), ([-1, 0, 1], [-1, 0, 0])], ids=["flag", "list"])
def test_a_flag_or_a_list_among_the_arguments_is_another_structure_at_once(old: Any, new: Any) -> None:
    model, guide = _fork(lambda args: args[0] == new)
    elbo = _summed(model, guide, old, steps=30)
    for arg in (new, old, new):
        with filtered("ignore"):
            assert_unbiased(elbo.eval(), model, guide, arg)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("steps", [0, 1])
def test_a_change_that_no_plain_value_shows_is_found_by_evaluations_and_within_some_steps(steps: int) -> None:
    model, guide = _fork(lambda _: bool(SWITCH))
    elbo = _summed(model, guide, steps=40)
    SWITCH.fill_(True)
    _go_on(elbo, model, guide, steps=steps)
    with filtered("ignore"):
        assert_unbiased(elbo.eval(), model, guide)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("compile", [False, "eager"])
def test_a_number_among_the_arguments_is_looked_at_at_once(compile: Any) -> None:
    model, guide = _fork(lambda args: args[0])
    elbo = _summed(model, guide, 0, steps=45, compile=compile)
    _go_on(elbo, model, guide, 1)
    assert not elbo.particles.now.sums
    assert_unbiased(elbo.eval(), model, guide, 1)


@pytest.mark.parametrize("read", [torch.sum, torch.max, lambda z: z.reshape(-1)[0]])
@pytest.mark.parametrize("steps", [0, 1])
def test_rows_that_a_flag_mixes_are_not_summed(read: Callable[[Tensor], Tensor], steps: int) -> None:
    """A single run has one value, of which these reads make what it means."""

    model = seeing(lambda z, mixes: pyro.param("m", torch.tensor(0.7)) * (read(z) if mixes else z))
    elbo = _summed(model, coin_guide, False)
    _go_on(elbo, model, coin_guide, True, steps=steps)
    assert_unbiased(elbo.eval(), model, coin_guide, True)
    assert elbo.plan is not None and not elbo.plan.sums
    elbo.train()
    for mixes in (False, True):
        _go_on(elbo, model, coin_guide, mixes)
        assert elbo.particles.now.sums is not mixes


def test_rows_of_data_that_begin_to_meet_are_not_summed() -> None:
    model, guide = rows(lambda z: pyro.param("w", torch.tensor(0.7)) * z.roll(int(SWITCH), -1), X)
    elbo = _summed(model, guide)
    SWITCH.fill_(True)
    with filtered("ignore"):
        elbo.eval().loss_and_grads(model, guide)
        assert elbo.plan is not None and not elbo.plan.sums
        elbo.train().loss_and_grads(model, guide)
    assert not elbo.particles.now.sums


def test_an_infinite_slope_at_an_impossible_value_is_not_summed() -> None:
    never = torch.tensor([-torch.inf, 0.0, 0.0])

    def model() -> None:
        z = pyro.sample("z", dist.Categorical(logits=never))
        # The square root has an infinite slope at zero.
        pyro.sample("x", dist.Normal((pyro.param("r", torch.tensor(0.3)).exp() * z).sqrt(), 1.0), obs=X[0])

    def guide() -> None:
        pyro.sample("z", dist.Categorical(logits=pyro.param("q", torch.tensor([0.1, 0.2, -0.3])) + never))

    elbo = fitted(TraceBackpropQ_ELBO(), model, guide, [()] * 8)
    assert not elbo.particles.now.sums and "gradient is not finite" in elbo.particles.said
    assert all(bool(value.isfinite().all()) for _, value in pyro.get_param_store().items())


def test_initial_values_that_every_run_draws_do_no_harm() -> None:
    programs, plain = (_fork(lambda _: False, start) for start in (torch.randn, torch.zeros))
    elbo = _summed(*programs)
    assert elbo.eval().loss_and_grads(*programs) == pytest.approx(float(exact_loss(*plain)), abs=1e-12)


def test_a_program_that_cannot_be_summed_is_not_taken_to_be_steered() -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
        pyro.sample("y", dist.Binomial(z.float(), torch.tensor(0.4)))

    def guide() -> None:
        z = pyro.sample("z", dist.Categorical(logits=pyro.param("lz", torch.zeros(3))))
        pyro.sample("y", dist.Binomial(z.float(), pyro.param("p", torch.tensor(0.5))))

    assert not fitted(TraceBackpropQ_ELBO(), model, guide, [()] * 30).runner.recordings.escapes
