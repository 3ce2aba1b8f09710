"""Conversions of an objective to other types: critics and statistics have their own, results that of the program."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import SGD
from pyro.poutine.messenger import Messenger
from steps import repeat

from pyro_bpq import (
    MLPCritic,
    TraceBackpropQ_ELBO,
)
from pyro_bpq.critics.bank import Block, CriticBank
from pyro_bpq.estimators import DebiasedStraightThrough, Hindsight
from pyro_bpq.testing import assert_unbiased

Program = Callable[[], None]


def mixed(parameters: torch.dtype, data: torch.dtype, length: int = 10) -> tuple[Program, Program]:
    """Binary sites whose costs read all earlier ones; parameters have one type, priors and data have another."""

    def model() -> None:
        z = total = torch.zeros((), dtype=parameters)
        for t in range(length):
            z = pyro.sample(f"z{t}", dist.Bernoulli(logits=0.5 * z + torch.zeros((), dtype=data)))
            total = total + z
            pyro.sample(f"x{t}", dist.Normal(total, torch.ones((), dtype=data)), obs=torch.ones((), dtype=data))

    def guide() -> None:
        q = pyro.param("q", torch.zeros(length, dtype=parameters))
        for t in range(length):
            pyro.sample(f"z{t}", dist.Bernoulli(logits=q[t]))

    return model, guide


def chain(dtype: torch.dtype) -> tuple[Program, Program]:
    return mixed(dtype, dtype, 4)


def escaping(dtype: torch.dtype) -> tuple[Program, Program]:
    """The same sites in every run, but values leave torch."""
    model, guide = chain(dtype)
    return model, LeavesTorch()(guide)


class LeavesTorch(Messenger):
    def _pyro_post_sample(self, msg: Any) -> None:
        bool(msg["value"].sum())


CASES: dict[str, tuple[Callable[[torch.dtype], tuple[Any, Any]], dict[str, Any]]] = {
    "ancestor": (chain, {"num_particles": 1}),
    "single": (chain, {"reduction": "single", "num_particles": 2}),
    "history": (escaping, {"critic": MLPCritic(hidden=(5,))}),
}


def step(objective: Any, programs: tuple[Any, Any], times: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Encountered NaN")
        repeat(times, SVI(*programs, SGD({"lr": 0.01}), objective).step)


def test_conversions_reach_critics_and_their_optimiser() -> None:
    objective, programs = TraceBackpropQ_ELBO(reduction="per_cost"), chain(torch.float32)
    step(objective, programs, 3)
    for name in ("double", "float", "double"):
        dtype = getattr(objective, name)() and getattr(torch, name)
        step(objective, programs, 1)
        assert {tensor.dtype for tensor in objective.critics.blocks.state_dict().values()} == {dtype}
        assert objective.trainer.optimizer is not None
        for optimizer in objective.trainer.optimizer.optimizers.values():
            assert {s["v"].dtype for s in optimizer.state.values()} == {dtype}


@pytest.mark.parametrize("name", CASES)
def test_unbiased_with_critics_of_another_type(name: str) -> None:
    make, options = CASES[name]
    objective, programs = TraceBackpropQ_ELBO(**options), make(torch.float64)
    step(objective, programs, 6)
    objective.float()
    step(objective, programs, 6)
    assert {tensor.dtype for tensor in objective.critics.blocks.state_dict().values()} == {torch.float32}
    assert any(bool(weight.any()) for weight in objective.critics.weights().values())
    assert_unbiased(objective.eval(), *programs)


def test_the_count_of_steps_goes_on_in_half_precision() -> None:
    bank = CriticBank()
    selection = bank.select("k", ("a",), lambda keys: Block("k", keys, None, {"count": torch.zeros(1)}).bfloat16())
    assert selection is not None
    for _ in range(300):
        bank.commit(selection.write("count", selection.read("count") + 1))
    assert selection.read("count").item() == 300.0 and selection.read("count", torch.bfloat16).dtype == torch.bfloat16


SEVERAL: dict[str, Any] = {"num_particles": 4, "vectorize_particles": True}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_particles": 1},
        {"estimator": Hindsight(crossed=True), **SEVERAL},
        {"estimator": DebiasedStraightThrough(), **SEVERAL},
    ],
    ids=["default", "one particle", "hindsight", "corrected slopes"],
)
@pytest.mark.parametrize(
    "types",
    [("float32", "float64"), ("float64", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")],
    ids=" ".join,
)
def test_programs_of_mixed_types_and_of_half_precision_train(types: tuple[str, str], options: dict[str, Any]) -> None:
    parameters, data = (getattr(torch, name) for name in types)
    step(TraceBackpropQ_ELBO(**options), mixed(parameters, data), 6)
    q = pyro.get_param_store()["q"]
    assert q.dtype == parameters and bool(q.isfinite().all()) and bool(q.any())
