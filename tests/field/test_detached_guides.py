"""Guides whose parameters get no gradient: told in the first step, and by ``diagnose``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from steps import LAWS, CoinModule, filtered, seeing, stepped, warnings_of
from torch import Tensor

from pyro_bpq import ExpectedCost, TraceBackpropQ_ELBO, cost
from pyro_bpq.diagnostics import compare_estimators, diagnose, gradient_moments

Cut = Callable[[Tensor], Tensor]


each_kind = pytest.mark.parametrize("kind", LAWS)


def programs(kind: str, cut: Cut = Tensor.detach, learns: bool = False) -> tuple[Any, Any]:
    def model() -> None:
        z = pyro.sample("z", LAWS[kind](torch.tensor(0.1)))
        mean = pyro.param("mean", torch.tensor(0.2)) if learns else 0.0
        pyro.sample("x", dist.Normal(z + mean, 1.0), obs=torch.tensor(0.7))

    return model, lambda: pyro.sample("z", LAWS[kind](cut(pyro.param("q", torch.tensor(0.3)))))


warned = partial(warnings_of, steps=3, category=Warning)


@pytest.mark.parametrize("learns", [False, True])
@each_kind
def test_training_tells_it_once(kind: str, learns: bool) -> None:
    (text,) = warned(*programs(kind, learns=learns))
    assert text.startswith("No gradient reaches the parameters of the guide, 'q'")
    assert ".detach()" in text and 'pyro.poutine.block(guide, hide_types=["param"])' in text


@each_kind
def test_a_guide_with_a_gradient_is_left_alone(kind: str) -> None:
    assert not warned(*programs(kind, cut=Tensor.clone))


def test_blocked_parameters_others_and_evaluations_are_left_alone() -> None:
    model, guide = programs("bits")
    assert not warned(model, poutine.block(guide, hide_types=["param"]))
    assert not warned(programs("bits", learns=True)[0], lambda: pyro.sample("z", dist.Bernoulli(0.4)))
    assert not warned(seeing(lambda z: z + pyro.param("q")), guide)
    with filtered("error"):
        TraceBackpropQ_ELBO().loss(model, guide)


@pytest.mark.parametrize(("cut", "number"), [(Tensor.detach, 1), (Tensor.clone, 0)])
def test_a_policy_without_a_gradient_is_told_too(cut: Cut, number: int) -> None:
    guide = programs("bits", cut)[1]
    assert len(warned(None, lambda: cost("fee", 2.0 * guide()), kind=ExpectedCost)) == number


@pytest.mark.parametrize("is_local", [False, True])
def test_a_module_is_told_too(is_local: bool) -> None:
    model, _ = programs("bits")
    with pyro.settings.context(module_local_params=is_local), pytest.warns(UserWarning, match="No gradient reaches"):
        TraceBackpropQ_ELBO()(model, CoinModule(Tensor.detach))()


@pytest.mark.filterwarnings("ignore:No gradient reaches")
@each_kind
def test_diagnose_says_that_no_parameter_gets_a_gradient(kind: str) -> None:
    model, guide = programs(kind)
    elbo = stepped(1, TraceBackpropQ_ELBO(), model, guide)
    found = diagnose(elbo, model, guide, num_samples=6, num_outcomes=1)
    text = " ".join(str(found).split())
    assert "The guide's parameters 'q' get no gradient" in text
    assert "No parameter of model or guide gets one." in text and "inf" not in text


@pytest.mark.filterwarnings("ignore:No gradient reaches")
def test_measurements_of_no_gradient_run() -> None:
    model, guide = programs("smooth")
    elbo = TraceBackpropQ_ELBO()
    moments = gradient_moments(elbo, model, guide, num_samples=4)
    assert moments.total_variance == 0.0 and all(bool((mean == 0.0).all()) for mean in moments.mean.values())
    compare_estimators(model, guide, num_samples=4)
