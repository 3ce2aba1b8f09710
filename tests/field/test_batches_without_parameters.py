"""Batches with nothing to learn: programs that return at once, or that touch no parameter."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import SGD

from pyro_bpq import (
    CompiledSVI,
    CriticLearner,
    ProximalSVI,
    Replay,
    TraceBackpropQ_ELBO,
    TraceBackpropQ_IWAE,
    TrustRegionSVI,
)
from pyro_bpq.testing import exact_gradient

EVERY = 4


def chain(i: int, q: torch.Tensor | None = None) -> torch.Tensor:
    z = torch.zeros(())
    for t in range(4):
        z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=0.3 - z if q is None else q))
    return z


def returns_at_once(empty: int, rows: int = 0) -> tuple[Any, Any]:
    def plate() -> Any:
        return pyro.plate("rows", rows) if rows else contextlib.nullcontext()

    def model(i: int) -> None:
        if i % EVERY != empty:
            with plate():
                pyro.sample("x", dist.Normal(chain(i), 1.0), obs=torch.ones(rows or ()))

    def guide(i: int) -> None:
        if i % EVERY != empty:
            with plate():
                chain(i, pyro.param("q", torch.tensor(0.3)))

    return model, guide


def observes_only(empty: int) -> tuple[Any, Any]:
    def model(i: int) -> None:
        mean = torch.zeros(()) if i % EVERY == empty else chain(i)
        pyro.sample("x", dist.Normal(mean, 1.0), obs=torch.tensor(0.7))

    return model, returns_at_once(empty)[1]


def detaches(empty: int) -> tuple[Any, Any]:
    def model(i: int) -> None:
        pyro.sample("x", dist.Normal(chain(i), 1.0), obs=torch.tensor(0.7))

    def guide(i: int) -> None:
        q = pyro.param("q", torch.tensor(0.3))
        chain(i, q.detach() if i % EVERY == empty else q)

    return model, guide


OBJECTIVES: dict[str, Callable[[], Any]] = {
    "default": TraceBackpropQ_ELBO,
    "one particle": lambda: TraceBackpropQ_ELBO(num_particles=1),
    "user trains critics": lambda: TraceBackpropQ_ELBO(learner=None),
    "replay": lambda: TraceBackpropQ_ELBO(learner=CriticLearner(replay=Replay(batch_size=2))),
    "recorded": lambda: TraceBackpropQ_ELBO(num_particles=2, compile="eager"),
    "bound": lambda: TraceBackpropQ_IWAE(3),
    "recorded bound": lambda: TraceBackpropQ_IWAE(3, vectorize_particles=True, max_plate_nesting=0, compile="eager"),
}
LOOPS: dict[str, Callable[..., Any]] = {
    "recorded updates": functools.partial(CompiledSVI, compile="eager"),
    "trust region": TrustRegionSVI,
    "proximal": ProximalSVI,
}
PROGRAMS = [returns_at_once, observes_only, detaches]
# A first step that is detached looks as if the guide never learned.
pytestmark = pytest.mark.filterwarnings("ignore:No gradient reaches")


@pytest.mark.parametrize("empty", [0, 1])
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("make", PROGRAMS)
def test_every_fourth_batch_has_nothing_to_learn(make: Any, name: str, empty: int) -> None:
    objective = OBJECTIVES[name]()
    svi = SVI(*make(empty), SGD({"lr": 0.01}), objective)
    assert_trains(svi, objective, 12)


@pytest.mark.parametrize("empty", [0, 1])
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("make", PROGRAMS)
def test_other_loops_meet_such_batches(make: Any, name: str, empty: int) -> None:
    objective = TraceBackpropQ_ELBO(num_particles=1)
    assert_trains(LOOPS[name](*make(empty), SGD({"lr": 0.01}), objective), objective, 12)


def assert_trains(svi: SVI, objective: Any, steps: int) -> None:
    for step in range(steps):
        svi.step(step)
    assert objective.num_steps == steps
    assert float(pyro.param("q").detach()) != 0.3


@pytest.mark.parametrize("empty", [0, 1])
def test_rows_of_a_bound_may_be_missing(empty: int) -> None:
    objective = TraceBackpropQ_IWAE(3, plate="rows", vectorize_particles=True, max_plate_nesting=1)
    assert_trains(SVI(*returns_at_once(empty, 2), SGD({"lr": 0.01}), objective), objective, 8)


def test_a_batch_without_parameters_leaves_them_alone() -> None:
    model, guide = returns_at_once(0)
    elbo = TraceBackpropQ_ELBO(num_particles=1)
    elbo.loss_and_grads(model, guide, 1)
    leaf = pyro.get_param_store()._params["q"]
    leaf.grad = None
    assert elbo.loss_and_grads(model, guide, 0) == 0.0 and leaf.grad is None
    assert float(exact_gradient(model, guide, 0, parameters={"q": leaf})["q"]) == 0.0
