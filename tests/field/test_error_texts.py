"""Mistakes whose message names what is wrong: the cost, the plate, the option, the value."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import warnings_of
from torch import Tensor

from pyro_bpq import AllAction, ExpectedCost, MLPCritic, TraceBackpropQ_ELBO, TraceBackpropQ_IWAE, cost
from pyro_bpq.errors import OptionError, PlateError, UnsupportedProgramError, UnsupportedSiteError

Program = Callable[..., Any]
TOGETHER: dict[str, Any] = {"num_particles": 3, "vectorize_particles": True}


def coin(name: str = "z", rows: int | None = None, **infer: Any) -> Tensor:
    logits = pyro.param(f"logits of {name}", torch.full(() if rows is None else (rows,), 0.3))
    return pyro.sample(name, dist.Bernoulli(logits=logits), infer=infer)


def prior() -> Tensor:
    return pyro.sample("z", dist.Bernoulli(0.4))


def in_rows(program: Program, rows: int = 4) -> Program:
    def inside(*args: Any) -> None:
        with pyro.plate("rows", rows):
            program(*args)

    return inside


def text_of(kind: type[Exception], elbo: Any, model: Program | None, guide: Program) -> str:
    with pytest.raises(kind) as caught:
        elbo.loss_and_grads(model, guide)
    return str(caught.value)


def warned(model: Program, guide: Program) -> str:
    return "\n".join(warnings_of(model, guide, category=Warning))


# Numbers that are missing or infinite.


NAN: dict[str, Program] = {
    "value": lambda z: cost("fee", (z - 5.0).log()),
    "number": lambda z: cost("fee", float("nan")),
    "function": lambda z: cost("fee", lambda value: (value - 5.0).log(), z),
}


@pytest.mark.parametrize("fee", NAN.values(), ids=NAN)
def test_a_cost_that_is_nan_is_named(fee: Program) -> None:
    text = text_of(UnsupportedSiteError, TraceBackpropQ_ELBO(), lambda: fee(prior()), coin)
    assert text.startswith("The cost 'fee' is NaN at 1 of 1 elements.")
    alone = text_of(UnsupportedSiteError, ExpectedCost(), None, lambda: fee(coin()))
    assert alone.startswith("The cost 'fee' is NaN at 1 of 1 elements.")


def test_a_cost_that_is_nan_is_named_without_validation_too() -> None:
    with pyro.validation_enabled(False):
        assert "The cost 'fee' is NaN at 1 of 1 elements." in warned(lambda: cost("fee", (prior() - 5.0).log()), coin)


def test_an_infinite_cost_is_named() -> None:
    text = warned(lambda: cost("fee", prior().new_tensor(float("inf"))), coin)
    assert "The cost 'fee' is infinite at 1 of 1 elements" in text


def test_a_factor_that_is_nan_is_named() -> None:
    with pyro.validation_enabled(False):
        text = warned(lambda: pyro.factor("weight", (prior() - 5.0).log()), coin)
    assert "The factor of site 'weight' is NaN at 1 of 1 elements." in text


# Shapes.


@pytest.mark.parametrize("options", [{}, TOGETHER], ids=["one", "together"])
@pytest.mark.parametrize("validates", [True, False])
def test_a_cost_of_the_wrong_shape_is_named_with_its_plates(options: dict[str, Any], validates: bool) -> None:
    model = in_rows(lambda: cost("fee", torch.ones(5) + prior().sum(-1, keepdim=True)))
    with pyro.validation_enabled(validates):
        text = text_of(PlateError, TraceBackpropQ_ELBO(**options), model, in_rows(coin))
    assert (
        "the plate 'rows' has 4 rows" in text and "site 'fee' has 5 there" in text and ".sum(-1) behind a cost" in text
    )


def test_a_factor_of_the_wrong_shape_is_told_what_to_write() -> None:
    text = text_of(
        PlateError,
        TraceBackpropQ_ELBO(),
        in_rows(lambda: pyro.factor("f", torch.ones(5) * prior().sum())),
        in_rows(coin),
    )
    assert "site 'f' has 5 there" in text and ".sum(-1) behind a cost or factor" in text


def rows_model(size: int, indexed: bool = False) -> None:
    data = torch.linspace(-1.0, 1.0, size)
    with pyro.plate("rows", size) as rows:
        z = prior()
        pyro.sample("x", dist.Normal(z, 1.0), obs=data[rows] if indexed else data)


@pytest.mark.parametrize("validates", [True, False])
def test_a_plate_of_two_sizes_is_named_with_both(validates: bool) -> None:
    with pyro.validation_enabled(validates):
        text = text_of(
            PlateError, TraceBackpropQ_ELBO(), lambda: rows_model(40), in_rows(lambda: coin(rows=20), rows=20)
        )
    assert "The plate 'rows' around site 'z' has 20 rows in the guide, and 40 in the model." in text
    assert "The data of site" not in text


def test_a_plate_of_two_sizes_that_runs_is_told() -> None:
    """The model replays the rows of the guide, so that its data, taken by row, fit."""
    text = warned(lambda: rows_model(40, indexed=True), in_rows(lambda: coin(rows=20), rows=20))
    assert "The plate 'rows' around site 'z' has 20 rows in the guide, and 40 in the model." in text


def test_a_plate_of_one_size_is_not() -> None:
    assert not warned(lambda: rows_model(20, indexed=True), in_rows(lambda: coin(rows=20), rows=20))


@pytest.mark.parametrize("shape", [(5, 2), (4, 1, 2)])
def test_a_context_of_the_wrong_size_is_named_as_the_option(shape: tuple[int, ...]) -> None:
    options = {"context": torch.ones(shape), "critic": MLPCritic()}
    text = text_of(PlateError, TraceBackpropQ_ELBO(), in_rows(prior), in_rows(lambda: coin(bpq=options)))
    assert f"Site 'z': the option context has the shape {shape}" in text and "rows are (4,)" in text


@pytest.mark.parametrize("shape", [(4, 2), (1, 2), (2,)])
def test_a_context_that_broadcasts_to_the_rows_is_taken(shape: tuple[int, ...]) -> None:
    options = {"context": torch.ones(shape), "critic": MLPCritic()}
    TraceBackpropQ_ELBO().loss_and_grads(in_rows(prior), in_rows(lambda: coin(bpq=options)))


def test_an_expected_cost_without_a_cost_says_so() -> None:
    text = text_of(UnsupportedProgramError, ExpectedCost(), None, coin)
    assert "has no cost" in text and "pyro_bpq.cost(name, value)" in text


def test_an_expected_cost_may_lack_costs_in_some_runs() -> None:
    seen = set()

    def policy() -> None:
        if coin():
            cost("fee", 1.0)

    elbo = ExpectedCost()
    for _ in range(12):
        seen.add(elbo.loss_and_grads(None, policy))
    assert seen == {0.0, 1.0}


WRONG: list[tuple[str, Any, str]] = [
    ("max_plate_nesting", "auto", "'auto'"),
    ("max_iarange_nesting", "auto", "'auto'"),
    ("num_particles", 0, "num_particles"),
    ("seed", "a", "'a'"),
    ("lam", "high", "'high'"),
    ("lam", 1.5, "[0, 1]"),
    ("lam", float("nan"), "[0, 1]"),
    ("gamma", None, "None"),
    ("gamma", 0.0, "(0, 1]"),
    ("window", 2.5, "write a positive integer"),
    ("window", 0, "write a positive integer"),
    ("structure", "statik", "'dynamic'"),
    ("reduction", "tre", "'tree'"),
    ("enumeration", "parallel", "'parallel' is unknown; write one of 'sample', 'exact'"),
    ("compile", "nonsense", "'nonsense'"),
    ("learner", 0.1, "CriticLearner(lr="),
    ("critic", "mlp", "MLPCritic()"),
    ("critic", MLPCritic, "MLPCritic()"),
    ("estimator", "allaction", "AllAction()"),
    ("estimator", AllAction, "AllAction()"),
    ("estimator", 3, "3"),
]


@pytest.mark.filterwarnings("ignore:max_iarange_nesting is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("option", "value", "words"), WRONG)
def test_an_option_of_the_wrong_kind_is_refused(option: str, value: Any, words: str) -> None:
    with pytest.raises(OptionError, match=re.escape(words)) as caught:
        TraceBackpropQ_ELBO(**{option: value})
    assert isinstance(caught.value, ValueError) and option.replace("iarange", "plate") in str(caught.value)


def test_a_bound_refuses_a_nesting_that_is_no_number() -> None:
    with pytest.raises(OptionError, match="max_plate_nesting='auto': write a whole number"):
        TraceBackpropQ_IWAE(max_plate_nesting="auto")  # type: ignore[arg-type]
