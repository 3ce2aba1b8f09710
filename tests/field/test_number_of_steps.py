"""The number of steps counts with and without critics, and with batches that have nothing to learn, too.

Such batches return at once, or touch no parameter. Looks become rare with the number of steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import SGD
from steps import LAWS, stepped

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


def learns(law: str, runs: list[int] | None = None) -> tuple[Any, Any]:
    """Each batch has something to learn; the steps in which the model runs go into a list."""

    def model(step: int) -> None:
        if runs is not None:
            runs.append(step)
        z = pyro.sample("z", LAWS[law](torch.tensor(0.2)))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(0.7))

    def guide(step: int) -> None:
        pyro.sample("z", LAWS[law](pyro.param("q", torch.tensor(0.3))))

    return model, guide


one_particle = partial(TraceBackpropQ_ELBO, num_particles=1)
IN_A_PLATE: dict[str, Any] = {"vectorize_particles": True, "max_plate_nesting": 0}
# An objective, and the loop that takes its steps.
WAYS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "default": (TraceBackpropQ_ELBO, SVI),
    "no critics": (lambda: TraceBackpropQ_ELBO(critic=None), SVI),
    "one particle": (one_particle, SVI),
    "in a plate": (lambda: TraceBackpropQ_ELBO(8, critic=None, **IN_A_PLATE), SVI),
    "analytic": (lambda: TraceBackpropQ_ELBO(num_particles=1, analytic_kl=True), SVI),
    "user trains critics": (lambda: TraceBackpropQ_ELBO(learner=None), SVI),
    "replay": (lambda: TraceBackpropQ_ELBO(learner=CriticLearner(replay=Replay(batch_size=2))), SVI),
    "recorded": (lambda: TraceBackpropQ_ELBO(num_particles=2, compile="eager"), SVI),
    "bound": (lambda: TraceBackpropQ_IWAE(8), SVI),
    "bound of one": (lambda: TraceBackpropQ_IWAE(1), SVI),
    "bound in a plate": (lambda: TraceBackpropQ_IWAE(8, **IN_A_PLATE), SVI),
    "recorded bound": (lambda: TraceBackpropQ_IWAE(8, compile="eager", **IN_A_PLATE), SVI),
    "recorded updates": (one_particle, partial(CompiledSVI, compile="eager")),
    "trust region": (one_particle, TrustRegionSVI),
    "proximal": (one_particle, ProximalSVI),
}
PROGRAMS: dict[str, Any] = {
    **{f"{make.__name__} {i}": make(i) for make in (returns_at_once, observes_only, detaches) for i in (0, 1)},
    **{law: learns(law) for law in LAWS},
}
# A first step that is detached looks as if the guide never learned.
pytestmark = pytest.mark.filterwarnings("ignore:No gradient reaches")


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("programs", PROGRAMS.values(), ids=PROGRAMS)
def test_steps_count(programs: tuple[Any, Any], name: str) -> None:
    objective, loop = WAYS[name][0](), WAYS[name][1]
    assert_trains(loop(*programs, SGD({"lr": 0.01}), objective), objective, 12)


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
    elbo = stepped(1, one_particle(), model, guide, 1)
    leaf = pyro.get_param_store()._params["q"]
    leaf.grad = None
    assert elbo.loss_and_grads(model, guide, 0) == 0.0 and leaf.grad is None
    assert float(exact_gradient(model, guide, 0, parameters={"q": leaf})["q"]) == 0.0


@pytest.mark.parametrize("law", LAWS)
def test_a_step_of_a_bound_runs_the_model_once(law: str) -> None:
    """But for the looks after 1, 2, 4, ... steps, which compare particles with runs of one."""
    runs, objective = list[int](), TraceBackpropQ_IWAE(8, **IN_A_PLATE)
    assert_trains(SVI(*learns(law, runs), SGD({"lr": 1e-3}), objective), objective, 32)
    often = {step for step in runs if runs.count(step) > 1}
    assert often <= {0, 1, 2, 4, 8, 16} and set(runs) == set(range(32))
