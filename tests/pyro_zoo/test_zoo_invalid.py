"""Programs with mistakes: the same kind of error or warning as from Pyro's own ELBOs, and no trace left behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam
from pyro.poutine.runtime import _PYRO_STACK
from zoo import DATA, coin, see, store

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO

ELBOS = [TraceGraph_ELBO, TraceBackpropQ_ELBO]
Program = Callable[[], Any]


def run(elbo: Any, model: Program, guide: Program) -> list[str]:
    """Takes steps; gives the texts of all warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        svi = SVI(model, guide, Adam({"lr": 0.01}), elbo)
        for _ in range(2):
            svi.step()
    return [str(warning.message) for warning in found]


def assert_ok(elbo: Any, model: Program, guide: Program) -> None:
    assert run(elbo, model, guide) == []


def assert_warning(elbo: Any, model: Program, guide: Program, text: str) -> None:
    assert any(text in warning for warning in run(elbo, model, guide))


def assert_error(elbo: Any, model: Program, guide: Program, kind: type[Exception], text: str | None = None) -> None:
    with pytest.raises(kind, match=text):
        run(elbo, model, guide)
    assert not _PYRO_STACK
    if isinstance(elbo, TraceBackpropQ_ELBO):
        # A failed step has taught nothing, and the next one is as if it had not been.
        assert elbo.num_steps == 0 and not list(elbo.critics.blocks)
    pyro.clear_param_store()
    assert_ok(elbo, plain_model, plain_guide)


def plain_model() -> None:
    with pyro.plate("rows", 3):
        see("x", coin("z", store("pz", 0.1)), DATA[:3])


def plain_guide() -> None:
    with pyro.plate("rows", 3):
        coin("z", store("qz", 0.1))


@pytest.fixture(params=ELBOS, ids=["pyro", "ours"])
def elbo(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_valid_program_is_ok(elbo: Any) -> None:
    assert_ok(elbo, plain_model, plain_guide)


def test_latent_of_the_model_only(elbo: Any) -> None:
    def model() -> None:
        plain_model()
        coin("extra", 0.1)

    with pytest.warns(UserWarning, match="extra"), pytest.raises(KeyError):
        SVI(model, plain_guide, Adam({"lr": 0.01}), elbo).step()
    assert not _PYRO_STACK


def test_latent_of_the_guide_only(elbo: Any) -> None:
    def guide() -> None:
        plain_guide()
        coin("extra", 0.1)

    assert_warning(elbo, plain_model, guide, "extra")


@pytest.mark.parametrize("where", ["model", "guide"])
def test_two_sites_of_the_same_name(elbo: Any, where: str) -> None:
    def twice() -> None:
        coin("z", 0.1)
        coin("z", 0.1)

    pair = (twice, plain_guide) if where == "model" else (plain_model, twice)
    assert_error(elbo, *pair, RuntimeError, "z")


def test_batch_outside_of_plates(elbo: Any) -> None:
    def model() -> None:
        coin("z", torch.zeros(3))

    assert_error(elbo, model, model, ValueError, "z")


def test_plate_of_another_size_in_the_guide(elbo: Any) -> None:
    def guide() -> None:
        with pyro.plate("rows", 4):
            coin("z", store("qz", 0.1))

    assert_error(elbo, plain_model, guide, ValueError)


def test_shape_that_does_not_fit_the_plate(elbo: Any) -> None:
    def model() -> None:
        with pyro.plate("rows", 3):
            see("x", coin("z", 0.0), torch.zeros(2))

    assert_error(elbo, model, plain_guide, ValueError)


def test_event_shape_that_differs(elbo: Any) -> None:
    def guide() -> None:
        with pyro.plate("rows", 3):
            pyro.sample("z", dist.Bernoulli(torch.full((3, 2), 0.5)).to_event(1))

    assert_error(elbo, plain_model, guide, ValueError)


def test_nested_plates_in_the_same_dimension(elbo: Any) -> None:
    def model() -> None:
        with pyro.plate("a", 3, dim=-1), pyro.plate("b", 3, dim=-1):
            coin("z", 0.0)

    assert_error(elbo, model, model, ValueError, "collide")


def test_value_outside_of_the_support(elbo: Any) -> None:
    def model() -> None:
        z = coin("z", 0.0)
        pyro.sample("x", dist.Bernoulli(0.5), obs=z + 3.0)

    def guide() -> None:
        coin("z", 0.0)

    assert_error(elbo, model, guide, ValueError)


def test_parameter_outside_of_its_range(elbo: Any) -> None:
    def model() -> None:
        see("x", coin("z", 0.0), 0.1, noise=torch.tensor(-1.0))

    def guide() -> None:
        coin("z", 0.0)

    assert_error(elbo, model, guide, ValueError)


def test_factor_of_the_guide_without_has_rsample(elbo: Any) -> None:
    def guide() -> None:
        plain_guide()
        pyro.factor("f", torch.tensor(0.3))

    assert_error(elbo, plain_model, guide, ValueError, "has_rsample")


def test_exception_of_the_model(elbo: Any) -> None:
    def model() -> None:
        with pyro.plate("rows", 3), poutine.scale(scale=2.0):
            coin("z", 0.0)
            raise ZeroDivisionError("mine")

    assert_error(elbo, model, plain_guide, ZeroDivisionError, "mine")


def test_loss_that_is_nan(elbo: Any) -> None:
    def model() -> None:
        plain_model()
        pyro.factor("f", torch.tensor(torch.inf))
        pyro.factor("g", torch.tensor(-torch.inf))

    assert_warning(elbo, model, plain_guide, "NaN")


def test_enumeration_marks(elbo: Any) -> None:
    def guide() -> None:
        with pyro.plate("rows", 3):
            coin("z", store("qz", 0.1), infer={"enumerate": "parallel"})

    assert_warning(elbo, plain_model, guide, "TraceEnum_ELBO")


def test_unknown_baseline_option(elbo: Any) -> None:
    def guide() -> None:
        with pyro.plate("rows", 3):
            coin("z", store("qz", 0.1), infer={"baseline": {"decaying": True}})

    assert_error(elbo, plain_model, guide, ValueError, "decaying")


def test_baseline_of_the_wrong_shape() -> None:
    def guide() -> None:
        with pyro.plate("rows", 3):
            coin("z", store("qz", 0.1), infer={"baseline": {"baseline_value": torch.zeros(2)}})

    assert_error(TraceBackpropQ_ELBO(estimator=ScoreFunction()), plain_model, guide, ValueError, "'z'.*baseline")


def test_without_validation_nothing_is_checked(elbo: Any) -> None:
    def guide() -> None:
        plain_guide()
        coin("extra", 0.1)

    with pyro.validation_enabled(False):
        assert_ok(elbo, plain_model, guide)
