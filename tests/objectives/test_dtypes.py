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
from torch import Tensor, nn

from pyro_bpq import (
    AllAction,
    CriticLearner,
    ExpectedCost,
    LinearCritic,
    MLPCritic,
    MomentCritic,
    QProp,
    Replay,
    RunningBaseline,
    ScoreFunction,
    SlowTracking,
    TabularCritic,
    TraceBackpropQ_ELBO,
    TraceBackpropQ_IWAE,
    cost,
)
from pyro_bpq.critics.bank import Block, CriticBank
from pyro_bpq.estimators import DebiasedStraightThrough, Hindsight
from pyro_bpq.testing import assert_unbiased

TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# The default suite converts to these; `make test-all` to all.
QUICK = (torch.float64, torch.float16)
Program = Callable[[], None]


def chain(dtype: torch.dtype, length: int = 4, plate: bool = False, steered: bool = False) -> tuple[Program, Program]:
    """Binary sites that read the one before, with an observation each."""
    table = torch.tensor([-0.5, 0.8], dtype=dtype)

    def rows() -> Any:
        return pyro.plate("rows", 3, dim=-1)

    def model() -> None:
        z = torch.zeros((), dtype=dtype)
        for t in range(length):
            if plate and t == 1:
                with rows():
                    pyro.sample("rest", dist.Bernoulli(logits=table[z.long()].expand(3)))
            z = pyro.sample(f"z{t}", dist.Bernoulli(logits=table[z.long()]))
            if steered and bool(z):
                pyro.sample(f"more{t}", dist.Bernoulli(logits=table[0]))
            pyro.sample(f"x{t}", dist.Normal(z, torch.ones((), dtype=dtype)), obs=torch.tensor(0.5, dtype=dtype))

    def guide() -> None:
        q = pyro.param("q", torch.zeros(length, dtype=dtype))
        z = torch.zeros((), dtype=dtype)
        for t in range(length):
            if plate and t == 1:
                with rows():
                    pyro.sample("rest", dist.Bernoulli(logits=(q[t] + z).expand(3)))
            z = pyro.sample(f"z{t}", dist.Bernoulli(logits=q[t] + z))
            if steered and bool(z):
                pyro.sample(f"more{t}", dist.Bernoulli(logits=q[0]))

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


def policy(dtype: torch.dtype) -> tuple[Program, None]:
    def program() -> None:
        q, z = pyro.param("q", torch.zeros(3, dtype=dtype)), torch.zeros((), dtype=dtype)
        for t in range(3):
            z = pyro.sample(f"z{t}", dist.Bernoulli(logits=q[t] + z))
            cost(f"c{t}", (z - 0.3).square())

    return program, None


def moments(dtype: torch.dtype) -> tuple[Program, Program]:
    one = torch.ones((), dtype=dtype)
    by_moments = {"bpq": {"estimator": QProp(), "critic": MomentCritic()}}

    def model() -> None:
        n = pyro.sample("n", dist.Poisson(2.0 * one))
        pyro.sample("z", dist.Bernoulli(logits=0.1 * n))
        pyro.sample("x", dist.Normal(n, one), obs=2.0 * one)

    def guide() -> None:
        n = pyro.sample("n", dist.Poisson(pyro.param("rate", one.clone()).exp()), infer=by_moments)
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", one.clone()) + 0.1 * n))

    return model, guide


def vector(dtype: torch.dtype) -> tuple[Program, Program]:
    data = torch.tensor([0.2, -0.4, 1.0], dtype=dtype)

    def model() -> None:
        with pyro.plate("rows", 3):
            z = pyro.sample("z", dist.Bernoulli(logits=torch.zeros(3, 4, dtype=dtype)).to_event(1))
            w = pyro.sample("w", dist.Bernoulli(logits=z.sum(-1) - 2.0))
            pyro.sample("x", dist.Normal(w + z.sum(-1), torch.ones((), dtype=dtype)), obs=data)

    def guide() -> None:
        q = pyro.param("q", torch.zeros(4, dtype=dtype))
        with pyro.plate("rows", 3):
            z = pyro.sample("z", dist.Bernoulli(logits=q.expand(3, 4)).to_event(1))
            pyro.sample("w", dist.Bernoulli(logits=z.sum(-1) - 1.0))

    return model, guide


def elbo(**options: Any) -> Callable[[], Any]:
    return lambda: TraceBackpropQ_ELBO(**options)


CASES: dict[str, tuple[Callable[[torch.dtype], tuple[Any, Any]], Callable[[], Any]]] = {
    "ancestor": (chain, elbo(num_particles=1)),
    "one particle": (chain, elbo(num_particles=1, critic=MLPCritic(hidden=(5,)))),
    "two particles": (chain, elbo(num_particles=2)),
    "single": (chain, elbo(reduction="single", num_particles=2)),
    "per cost": (chain, elbo(reduction="per_cost")),
    "td": (chain, elbo(lam=0.0, gamma=0.9)),
    "history": (escaping, elbo(critic=MLPCritic(hidden=(5,)))),
    "history td": (escaping, elbo(lam=0.0, gamma=0.9, num_particles=2)),
    "tabular": (chain, elbo(critic=TabularCritic())),
    "linear": (chain, elbo(critic=LinearCritic(), num_particles=2)),
    "plates": (lambda dtype: chain(dtype, plate=True), elbo(reduction="single")),
    "steered": (lambda dtype: chain(dtype, steered=True), elbo(num_particles=2)),
    "score function": (chain, elbo(estimator=ScoreFunction(RunningBaseline()))),
    "replay": (chain, elbo(learner=CriticLearner(replay=Replay(batch_size=2)))),
    "slow": (chain, elbo(learner=CriticLearner(slow=SlowTracking(0.1), steps=2))),
    "own optimiser": (chain, elbo(learner=None)),
    "expected cost": (policy, ExpectedCost),
    "moments": (moments, elbo()),
    "vector": (vector, elbo(critic=LinearCritic(), estimator=AllAction(exact=False))),
    "bound": (chain, lambda: TraceBackpropQ_IWAE(num_particles=3)),
}


def convert(objective: Any, dtype: torch.dtype) -> None:
    names = {torch.float64: "double", torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}
    getattr(objective, names[dtype])()


def step(objective: Any, programs: tuple[Any, Any], times: int) -> None:
    model, guide = programs
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Encountered NaN")
        svi = SVI(*((model, guide) if guide is not None else (model, model)), SGD({"lr": 0.01}), objective)
        for _ in range(times):
            svi.step() if guide is not None else objective.loss_and_grads(None, model)


@pytest.mark.parametrize("program", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=() if dtype in QUICK else pytest.mark.slow, id=str(dtype)) for dtype in TYPES]
)
@pytest.mark.parametrize("name", CASES)
def test_objectives_of_any_type_train(name: str, dtype: torch.dtype, program: torch.dtype) -> None:
    make_programs, make = CASES[name]
    objective, programs = make(), make_programs(program)
    for _ in range(2):
        # First what there is is converted, then critics learn; at the end there are old blocks and new ones.
        step(objective, programs, 3)
        convert(objective, dtype)
    step(objective, programs, 2)
    store = {name: value for name, value in pyro.get_param_store().items() if not name.startswith("bpq_critics")}
    assert all(value.dtype == program for value in store.values())
    assert all(tensor.isfinite().all() for tensor in [*store.values(), *objective.critics.blocks.state_dict().values()])
    found = objective.critics.blocks.state_dict().values()
    assert list(found) and all(tensor.element_size() >= 4 for tensor in found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_leaves_critics_as_they_are(dtype: torch.dtype) -> None:
    def run(converts: bool) -> list[Tensor]:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        objective = TraceBackpropQ_ELBO()
        step(objective, chain(torch.float64), 4)
        if converts:
            convert(objective, dtype)
        step(objective, chain(torch.float64), 4)
        return [*pyro.get_param_store().values(), *objective.critics.blocks.state_dict().values()]

    assert all(torch.equal(*pair) for pair in zip(run(True), run(False), strict=True))


def test_conversions_reach_critics_and_their_optimiser() -> None:
    objective, programs = TraceBackpropQ_ELBO(reduction="per_cost"), chain(torch.float32)
    step(objective, programs, 3)
    for dtype in (torch.float64, torch.float32, torch.float64):
        convert(objective, dtype)
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


@pytest.mark.filterwarnings("ignore:The parameters")
def test_gradients_of_critics_that_wait_follow_a_conversion() -> None:
    """As a module, the objective hands critics' gradients over at the next call."""
    layer = nn.Linear(1, 1)

    def model() -> None:
        z = torch.zeros(1, dtype=layer.weight.dtype)
        for t in range(5):
            z = pyro.sample(f"z{t}", dist.Bernoulli(logits=layer(z)).to_event(1))

    def guide() -> None:
        q = pyro.param("q", torch.zeros(5)).to(layer.weight.dtype)
        for t in range(5):
            pyro.sample(f"z{t}", dist.Bernoulli(logits=q[t : t + 1]).to_event(1))

    module = TraceBackpropQ_ELBO(num_particles=1)(model, guide)
    layer.float()
    for step in range(4):
        if step == 2:
            layer.double()
            module.double()
        module().backward()
    state = module.state_dict().values()
    assert all(bool(value.isfinite().all()) for value in state if isinstance(value, Tensor))


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
