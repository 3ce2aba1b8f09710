"""Biased estimators: what they are exact for, their noise, their schedules."""

from __future__ import annotations

from typing import Any

import pyro
import pytest
import torch
from models import Case, coin, p, pair_model
from pyro.infer import SVI
from pyro.optim import Adam
from steps import repeat

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.errors import OptionError
from pyro_bpq.estimators import Annealed, Concrete, GumbelStraightThrough, ReinMax, StraightThrough
from pyro_bpq.estimators.relaxation import draw_given, uniform_given
from pyro_bpq.testing import exact_gradient, expected_gradient


def one_guide() -> None:
    coin("z", p("qz"))


PAIR = Case("pair", pair_model, one_guide, {"pz": (), "mean": (), "qz": ()}, 2)
SCHEDULED = [ReinMax, GumbelStraightThrough, Concrete]


def error_of(estimator: Any, num_particles: int = 1) -> float:
    PAIR.params()
    truth = exact_gradient(PAIR.model, PAIR.guide)["qz"]
    elbo = TraceBackpropQ_ELBO(estimator=estimator).eval()
    return float((expected_gradient(elbo, PAIR.model, PAIR.guide)["qz"] - truth).abs() / truth.abs())


def test_reinmax_is_exact_for_a_quadratic_cost_of_one_coin() -> None:
    # The cost of this model is quadratic in z; straight-through is exact for linear costs only.
    assert error_of(ReinMax()) < 1e-10
    assert error_of(StraightThrough()) > 0.05
    assert error_of(ReinMax(temperature=2.0)) > 0.01


def mean_gradient(estimator: Any, number: int = 100_000) -> float:
    PAIR.params(seed=0)
    elbo = TraceBackpropQ_ELBO(number, estimator=estimator, vectorize_particles=True, max_plate_nesting=0, critic=None)
    elbo.loss_and_grads(PAIR.model, PAIR.guide)
    return float(pyro.get_param_store()._params["qz"].grad)


@pytest.mark.parametrize("kind", [Concrete, GumbelStraightThrough])
def test_temperature_trades_bias(kind: Any) -> None:
    PAIR.params()
    truth = float(exact_gradient(PAIR.model, PAIR.guide)["qz"])
    errors = {t: abs(mean_gradient(kind(temperature=t)) - truth) / abs(truth) for t in (0.3, 5.0)}
    assert errors[5.0] > 0.2
    if kind is Concrete:
        assert errors[0.3] < 0.5 * errors[5.0]


def test_other_gradients_of_concrete_are_exact() -> None:
    # The program runs with discrete values: the model's parameters do not see the relaxation.
    PAIR.params(seed=0)
    truth = exact_gradient(PAIR.model, PAIR.guide)["mean"]
    elbo = TraceBackpropQ_ELBO(estimator=Concrete()).eval()
    mean = {"mean": pyro.param("mean").unconstrained()}
    found = expected_gradient(elbo, PAIR.model, PAIR.guide, parameters=mean)["mean"]
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", SCHEDULED)
def test_temperature_follows_the_steps(kind: Any) -> None:
    seen: list[int] = []

    def temperature(step: int) -> float:
        seen.append(step)
        return 1.0 / (1.0 + step)

    PAIR.params()
    svi = SVI(PAIR.model, PAIR.guide, Adam({"lr": 0.01}), TraceBackpropQ_ELBO(estimator=kind(temperature=temperature)))
    repeat(4, svi.step)
    assert sorted(set(seen)) == [0, 1, 2, 3]
    assert kind(temperature=temperature).at(3) == kind(temperature=0.25)
    assert [Annealed(1.0, 0.2, 0.5)(step) for step in (1, 50)] == [0.5, 0.2]


@pytest.mark.parametrize("kind", SCHEDULED)
def test_a_temperature_of_a_schedule_must_be_positive(kind: Any) -> None:
    with pytest.raises(OptionError, match="step 2"):
        kind(temperature=lambda step: 1.0 - 0.5 * step).at(2)


def test_uniform_given_is_on_the_right_side_and_uniform() -> None:
    generator = torch.Generator().manual_seed(0)
    prob = torch.full((200_000,), 0.3)
    value = (torch.rand(prob.shape, generator=generator) < prob).long()
    u = uniform_given(prob, value, generator)
    assert torch.equal((u < prob).long(), value)
    for order in (1, 2, 3):
        assert abs(float((u**order).mean()) - 1 / (order + 1)) < 5e-3


def test_draw_given_has_its_largest_entry_there_and_the_right_moments() -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.tensor([0.1, 0.7, 0.2]).log().expand(200_000, 3)
    index = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(-1)
    found = draw_given(log_probs, index, generator)
    assert torch.equal(found.argmax(-1), index)
    in_rows = draw_given(log_probs.reshape(400, 500, 3), index.reshape(400, 500), generator)
    assert torch.equal(in_rows.argmax(-1).flatten(), index)
    noise = found - log_probs
    assert float((noise.mean(0) - 0.57722).abs().max()) < 0.02
    assert float((noise.var(0) - torch.pi**2 / 6).abs().max()) < 0.05
    assert float(torch.corrcoef(noise.T).tril(-1).abs().max()) < 0.01


def test_draw_given_bears_impossible_values() -> None:
    log_probs = torch.tensor([[0.0, -1e6, -800.0]])
    found = draw_given(log_probs, torch.tensor([0]), torch.Generator().manual_seed(0))
    assert bool(found.isfinite().all()) and int(found.argmax()) == 0
