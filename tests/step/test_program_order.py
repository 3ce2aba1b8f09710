"""Steps in program order: unbiased, untracked, and the same as the dense graph would give."""

from __future__ import annotations

import contextlib
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import SGD

from pyro_bpq import CriticLearner, LeaveOneOut, RunningBaseline, ScoreFunction, TraceBackpropQ_ELBO, cost
from pyro_bpq.estimators import Estimator
from pyro_bpq.testing import assert_unbiased


def logits(name: str, start: float, size: int) -> torch.Tensor:
    return pyro.param(name, start + 0.3 * torch.arange(size, dtype=torch.float64).sin())


def branching(q: torch.Tensor, is_guide: bool, has_plate: bool) -> torch.Tensor:
    """A binary tree of draws whose number, names and plates follow from their values."""
    total = torch.zeros((), dtype=torch.float64)
    if pyro.sample("a", dist.Bernoulli(logits=q[0])) > 0:
        for t in range(2):
            b = pyro.sample(f"b_{t}", dist.Bernoulli(logits=q[1 + t] + total))
            total = total + (t + 1.5) * b
            if b > 0:
                break
    else:
        table = torch.stack((q[3], q[4], -q[3])).expand(2, 3)
        with pyro.plate("rows", 2) if has_plate else contextlib.nullcontext():
            law = dist.Categorical(logits=table)
            c = pyro.sample("c", law if has_plate else law.to_event(1))
        total = total - c.sum() - 0.5 * c[0]
    if is_guide and total > 1.0:
        cost("fee", 0.7 * total)
    return total


def guide(has_plate: bool = True) -> None:
    branching(logits("q", 0.2, 5), True, has_plate)


def model(has_plate: bool = True) -> None:
    p = logits("p", -0.1, 5)
    total = branching(p, False, has_plate)
    pyro.sample("x", dist.Normal(total * p[0] + 0.3, 0.8), obs=torch.tensor(1.1, dtype=torch.float64))


def trained(estimator: Estimator, steps: int = 8, **options: Any) -> TraceBackpropQ_ELBO:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    elbo = TraceBackpropQ_ELBO(estimator=estimator, structure="dense", **options)
    svi = SVI(model, guide, SGD({"lr": 1e-2}), elbo)
    for _ in range(steps):
        svi.step()
    return elbo


@pytest.mark.parametrize(
    ("estimator", "particles"),
    [
        (ScoreFunction(), 1),
        (ScoreFunction(RunningBaseline()), 1),
        # Some states have a site in both particles, others in one of them.
        (ScoreFunction(LeaveOneOut()), 2),
    ],
    ids=["plain", "running mean", "leave-one-out"],
)
def test_a_step_is_unbiased(estimator: Estimator, particles: int) -> None:
    elbo = trained(estimator, num_particles=particles)
    assert elbo.runner.structure.tracked_runs <= particles
    assert_unbiased(elbo.eval(), model, guide)


# The graph of a run without plates has other shapes: there it compares fewer particles.
@pytest.mark.parametrize(("particles", "has_plate"), [(1, True), (1, False), (3, False)])
def test_it_gives_what_the_dense_graph_gives(particles: int, has_plate: bool) -> None:
    def gradients(**options: Any) -> list[torch.Tensor]:
        elbo = trained(ScoreFunction(LeaveOneOut() if particles > 1 else RunningBaseline()), 1, **options)
        found = []
        for seed in range(20):
            pyro.set_rng_seed(seed)
            elbo.loss_and_grads(model, guide, has_plate)
            params = pyro.get_param_store()._params
            found += [params[name].grad.clone() for name in ("p", "q")]
            for name in params:
                params[name].grad = None
        return found

    # Whatever learns later from a step needs its graph.
    slow = gradients(num_particles=particles, learner=CriticLearner(steps=2))
    fast = gradients(num_particles=particles)
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-10)


def test_it_tells_of_its_sites_what_any_step_tells() -> None:
    elbo = trained(ScoreFunction(LeaveOneOut()), num_particles=2)
    assert elbo.info["a"]["cost_to_go"].shape == (2,) and elbo.info["a"]["estimator"] == ScoreFunction(LeaveOneOut())


def test_sites_without_a_score_have_no_part() -> None:
    def steered() -> None:
        z = pyro.sample("z", dist.Normal(pyro.param("m", torch.tensor(0.3)), 1.0))
        if z > 0:
            pyro.sample("w", dist.Normal(z, 1.0))

    pyro.clear_param_store()
    elbo = TraceBackpropQ_ELBO(estimator=ScoreFunction(), structure="dense")
    for _ in range(4):
        elbo.loss_and_grads(steered, steered)
    assert pyro.get_param_store()._params["m"].grad is not None
