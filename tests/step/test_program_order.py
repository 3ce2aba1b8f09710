"""Steps in program order: unbiased, unrecorded, and each site is charged with the loss of its run."""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import from_seed, stepped, trained

from pyro_bpq import LeaveOneOut, RunningBaseline, ScoreFunction, TraceBackpropQ_ELBO, cost
from pyro_bpq.estimators import AllAction, Estimator, Pathwise, TrimmedBaseline
from pyro_bpq.estimators.score_function import Baseline
from pyro_bpq.record.traced_run import PlainRun, TracedRun
from pyro_bpq.record.tracer import run_in_order, trace_run
from pyro_bpq.record.watch import TraceOptions
from pyro_bpq.step.program_order import in_order
from pyro_bpq.testing import assert_unbiased


def logits(name: str, start: float, size: int) -> torch.Tensor:
    return pyro.param(name, start + 0.3 * torch.arange(size, dtype=torch.float64).sin())


def branching(q: torch.Tensor, is_guide: bool, has_plate: bool) -> torch.Tensor:
    """A binary tree of draws whose number, names and plates follow from their values."""
    total = torch.zeros((), dtype=torch.float64)
    with pyro.poutine.scale(scale=q[4].exp()):
        a = pyro.sample("a", dist.Bernoulli(logits=q[0]))
    if a > 0:
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


def in_dense_order(estimator: Estimator, **options: Any) -> TraceBackpropQ_ELBO:
    elbo = TraceBackpropQ_ELBO(estimator=estimator, structure="dense", **options)
    return trained(elbo, model, guide, steps=8, lr=1e-2)


# Of two particles some states have a site in both, others in one of them.
SERVED = [(ScoreFunction(), 1), (ScoreFunction(RunningBaseline()), 1), (ScoreFunction(LeaveOneOut()), 2)]


@pytest.mark.parametrize(("estimator", "particles"), SERVED, ids=str)
def test_a_step_is_unbiased(estimator: Estimator, particles: int) -> None:
    elbo = in_dense_order(estimator, num_particles=particles)
    assert not elbo.runner.recordings.num_recorded
    assert_unbiased(elbo.eval(), model, guide)


def steered(name: str = "q", **infer: Any) -> None:
    """The value of the first site decides whether there is a second one."""
    q = logits(name, 0.2 if name == "q" else -0.4, 5)
    if pyro.sample("a", dist.Bernoulli(logits=q[0]), infer=infer) > 0:
        pyro.sample("b", dist.Bernoulli(logits=q[1]))


steered_model = partial(steered, "p")


def test_a_site_that_needs_more_costs_further_runs_once() -> None:
    calls = Counter[str]()

    def counted(name: str = "q") -> None:
        calls["runs"] += 1
        steered(name, bpq={"estimator": AllAction()})

    seen = partial(counted, "p")
    pyro.clear_param_store()
    elbo = TraceBackpropQ_ELBO(estimator=ScoreFunction(), structure="dense")
    runs = []
    for _ in range(6):
        before = calls["runs"]
        elbo.loss_and_grads(seen, counted)
        runs.append(calls["runs"] - before)
    # Each step runs guide and model; the first one also for the plan that is shown.
    assert runs == [4, 2, 2, 2, 2, 2]
    assert_unbiased(elbo.eval(), seen, counted)


@pytest.mark.parametrize("baseline", [LeaveOneOut(), TrimmedBaseline()], ids=repr)
def test_particles_are_compared_that_have_the_site(baseline: Baseline) -> None:
    elbo = TraceBackpropQ_ELBO(num_particles=3, estimator=ScoreFunction(baseline), structure="dense")
    stepped(4, elbo, steered_model, steered)
    assert_unbiased(elbo.eval(), steered_model, steered)


@pytest.mark.parametrize("particles", [1, 3])
def test_each_site_is_charged_with_the_loss_of_its_run(particles: int) -> None:
    estimator = ScoreFunction(LeaveOneOut() if particles > 1 else RunningBaseline())
    elbo = in_dense_order(estimator, num_particles=particles)
    assert elbo.info["a"]["cost_to_go"].shape == (particles,) and elbo.info["a"]["estimator"] == estimator
    for seed in range(5):
        loss = from_seed(seed, elbo.loss_and_grads, model, guide)
        charged = elbo.info["a"]["cost_to_go"]
        torch.testing.assert_close(float(charged.mean()), loss)
        for entry in elbo.info.values():
            assert all((charged == cost).any() for cost in entry["cost_to_go"])


def test_sites_without_a_score_have_no_part() -> None:
    def steered() -> None:
        z = pyro.sample("z", dist.Normal(pyro.param("m", torch.tensor(0.3)), 1.0))
        if z > 0:
            pyro.sample("w", dist.Normal(z, 1.0))

    stepped(4, TraceBackpropQ_ELBO(estimator=ScoreFunction(), structure="dense"), steered, steered)
    assert pyro.get_param_store()._params["m"].grad is not None


def weighted() -> None:
    q = pyro.param("q", torch.tensor([0.2, -0.3]))
    pyro.sample("c", dist.Categorical(logits=torch.stack((q[0], q[1], q[0] * q[1]))))
    with pyro.poutine.scale(scale=q.exp().sum()):
        pyro.sample("a", dist.Bernoulli(logits=q[0]))
        pyro.sample("r", dist.Normal(q[0], q[1].exp()))


def weighted_model() -> None:
    pyro.sample("c", dist.Categorical(logits=torch.zeros(3)))
    total = pyro.sample("a", dist.Bernoulli(0.4)) + pyro.sample("r", dist.Normal(0.0, 1.0))
    pyro.sample("x", dist.Normal(total * pyro.param("w", torch.tensor(0.7)), 1.0), obs=torch.tensor(1.0))


def test_a_plain_run_says_the_same_as_a_recorded_one() -> None:
    options = TraceOptions(choose=lambda info, _: Pathwise() if info.has_rsample else ScoreFunction())
    found = []
    for run in (run_in_order, trace_run):
        seen = from_seed(0, run, weighted_model, weighted, (), {}, options)
        told = in_order(seen, dict.fromkeys(seen.scored, ScoreFunction()))
        q = [pyro.get_param_store()._params[name] for name in ("q", "w")]
        gradients = torch.autograd.grad(told.scores @ torch.tensor([1.0, 3.0]) + told.differentiable, q)
        found.append((tuple(told.estimators), told.loss, told.scores, *gradients))
    plain, recorded = found
    assert plain[0] == recorded[0] == ("c", "a")
    assert all(torch.equal(*pair) for pair in zip(plain[1:], recorded[1:], strict=True))


@pytest.mark.parametrize(
    "infer", [{"bpq": {"estimator": ScoreFunction()}}, {"baseline": {"use_decaying_avg_baseline": True}}]
)
def test_a_run_with_choices_at_a_site_is_recorded(infer: dict[str, Any]) -> None:
    def guide() -> None:
        pyro.sample("a", dist.Bernoulli(0.4), infer=dict(infer))

    def model() -> None:
        pyro.sample("a", dist.Bernoulli(0.4))

    options = TraceOptions(choose=lambda info, _: ScoreFunction())
    kinds = [type(run_in_order(model, each, (), {}, options)) for each in (guide, model)]
    assert kinds == [TracedRun, PlainRun]
