"""Conversions of an objective to other types: critics and statistics have their own, results that of the program."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import SGD
from steps import repeat

from pyro_bpq import (
    MLPCritic,
    TraceBackpropQ_ELBO,
)
from pyro_bpq.critics.bank import Block, CriticBank
from pyro_bpq.estimators import DebiasedStraightThrough, Hindsight
from pyro_bpq.testing import assert_unbiased

pytestmark = pytest.mark.filterwarnings("error:Encountered NaN")


def mixed(parameters: torch.dtype, data: torch.dtype, length: int = 10, leaves: bool = False) -> tuple[Any, Any]:
    """Binary sites whose costs read all earlier ones; parameters have one type, priors and data have another.

    The sites are the same in every run, also where values of the guide leave torch.
    """

    def model() -> None:
        z = total = torch.zeros((), dtype=parameters)
        for t in range(length):
            z = pyro.sample(f"z{t}", dist.Bernoulli(logits=0.5 * z + torch.zeros((), dtype=data)))
            total = total + z
            pyro.sample(f"x{t}", dist.Normal(total, torch.ones((), dtype=data)), obs=torch.ones((), dtype=data))

    def guide() -> None:
        q = pyro.param("q", torch.zeros(length, dtype=parameters))
        for t in range(length):
            z = pyro.sample(f"z{t}", dist.Bernoulli(logits=q[t]))
            assert not leaves or bool(z >= 0.0)

    return model, guide


def chain(dtype: torch.dtype, leaves: bool = False) -> tuple[Any, Any]:
    return mixed(dtype, dtype, 4, leaves)


CASES: dict[str, dict[str, Any]] = {
    "ancestor": {"num_particles": 1},
    "single": {"reduction": "single", "num_particles": 2},
    "history": {"critic": MLPCritic(hidden=(5,))},
}


def step(objective: Any, programs: tuple[Any, Any], times: int) -> None:
    repeat(times, SVI(*programs, SGD({"lr": 0.01}), objective).step)


def test_conversions_reach_critics_and_their_optimiser() -> None:
    objective, programs = TraceBackpropQ_ELBO(reduction="per_cost"), chain(torch.float32)
    step(objective, programs, 3)
    for name in ("double", "float", "double"):
        dtype = getattr(objective, name)() and getattr(torch, name)
        step(objective, programs, 1)
        assert {tensor.dtype for tensor in objective.critics.blocks.state_dict().values()} == {dtype}
        for optimizer in objective.trainer.optimizer.optimizers.values():
            assert {s["v"].dtype for s in optimizer.state.values()} == {dtype}


@pytest.mark.parametrize("name", CASES)
def test_unbiased_with_critics_of_another_type(name: str) -> None:
    objective, programs = TraceBackpropQ_ELBO(**CASES[name]), chain(torch.float64, leaves=name == "history")
    step(objective, programs, 6)
    objective.float()
    step(objective, programs, 6)
    assert {tensor.dtype for tensor in objective.critics.blocks.state_dict().values()} == {torch.float32}
    assert any(bool(weight.any()) for weight in objective.critics.weights().values())
    assert_unbiased(objective.eval(), *programs)


def test_the_count_of_steps_goes_on_in_half_precision() -> None:
    bank = CriticBank()
    selection = bank.select("k", ("a",), lambda keys: Block("k", keys, None, {"count": torch.zeros(1)}).bfloat16())
    for _ in range(300):
        bank.commit(selection.write("count", selection.read("count") + 1))
    assert selection.read("count").item() == 300.0 and selection.read("count", torch.bfloat16).dtype == torch.bfloat16


SEVERAL: dict[str, Any] = {"num_particles": 4, "vectorize_particles": True}
ESTIMATORS = (Hindsight(crossed=True), DebiasedStraightThrough())
OPTIONS = [{}, {"num_particles": 1}, *({"estimator": own, **SEVERAL} for own in ESTIMATORS)]
TYPES = [("float32", "float64"), ("float64", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")]


@pytest.mark.parametrize("options", OPTIONS, ids=["default", "one particle", "hindsight", "corrected slopes"])
@pytest.mark.parametrize("types", TYPES, ids=" ".join)
def test_programs_of_mixed_types_and_of_half_precision_train(types: tuple[str, str], options: dict[str, Any]) -> None:
    parameters, data = (getattr(torch, name) for name in types)
    step(TraceBackpropQ_ELBO(**options), mixed(parameters, data), 6)
    q = pyro.get_param_store()["q"]
    assert q.dtype == parameters and bool(q.isfinite().all()) and bool(q.any())
