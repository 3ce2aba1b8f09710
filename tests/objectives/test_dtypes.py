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
from pyro_bpq.critics.bank import CriticBank
from pyro_bpq.critics.blocks import Block
from pyro_bpq.estimators import DebiasedStraightThrough, Hindsight
from pyro_bpq.testing import assert_unbiased

Program = Callable[[], None]


def chain(dtype: torch.dtype, length: int = 4) -> tuple[Program, Program]:
    """Binary sites that read the one before, with an observation each."""
    table = torch.tensor([-0.5, 0.8], dtype=dtype)

    def model() -> None:
        z = torch.zeros((), dtype=dtype)
        for t in range(length):
            z = pyro.sample(f"z{t}", dist.Bernoulli(logits=table[z.long()]))
            pyro.sample(f"x{t}", dist.Normal(z, torch.ones((), dtype=dtype)), obs=torch.tensor(0.5, dtype=dtype))

    def guide() -> None:
        q = pyro.param("q", torch.zeros(length, dtype=dtype))
        z = torch.zeros((), dtype=dtype)
        for t in range(length):
            z = pyro.sample(f"z{t}", dist.Bernoulli(logits=q[t] + z))

    return model, guide


def escaping(dtype: torch.dtype) -> tuple[Program, Program]:
    """The same sites in every run, but values leave torch."""
    model, guide = chain(dtype)

    def leaks() -> None:
        with LeavesTorch():
            guide()

    return model, leaks


class LeavesTorch(Messenger):
    def _pyro_post_sample(self, msg: Any) -> None:
        bool(msg["value"].sum())


def elbo(**options: Any) -> Callable[[], Any]:
    return lambda: TraceBackpropQ_ELBO(**options)


CASES: dict[str, tuple[Callable[[torch.dtype], tuple[Any, Any]], Callable[[], Any]]] = {
    "ancestor": (chain, elbo(num_particles=1)),
    "single": (chain, elbo(reduction="single", num_particles=2)),
    "history": (escaping, elbo(critic=MLPCritic(hidden=(5,)))),
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


@pytest.mark.parametrize("name", ["ancestor", "single", "history"])
def test_unbiased_with_critics_of_another_type(name: str) -> None:
    make_programs, make = CASES[name]
    objective, programs = make(), make_programs(torch.float64)
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


def mixed(parameters: torch.dtype, data: torch.dtype, length: int = 10) -> tuple[Program, Program]:
    """More sites than share particles, with parameters of one type, and priors and data of another."""

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


SEVERAL: dict[str, Any] = {"num_particles": 4, "vectorize_particles": True}


@pytest.mark.parametrize(
    "make",
    [
        elbo(),
        elbo(num_particles=1),
        elbo(estimator=Hindsight(crossed=True), **SEVERAL),
        elbo(estimator=DebiasedStraightThrough(), **SEVERAL),
    ],
    ids=["default", "one particle", "hindsight", "corrected slopes"],
)
@pytest.mark.parametrize(
    "types",
    [
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_programs_of_mixed_types_and_of_half_precision_train(types: tuple[torch.dtype, ...], make: Any) -> None:
    step(make(), mixed(*types), 6)
    store = pyro.get_param_store()
    assert store["q"].dtype == types[0] and bool(store["q"].isfinite().all()) and bool(store["q"].any())
