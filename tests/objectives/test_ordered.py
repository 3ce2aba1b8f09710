"""The default on programs that sampled values steer: program order, unbiased before, during and after it is settled."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import from_seed, trained

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.estimators import AllAction, TrimmedBaseline
from pyro_bpq.rollout.runs import Program
from pyro_bpq.testing import assert_unbiased


def tree(q: torch.Tensor, kind: str) -> torch.Tensor:
    """Draws that depend on one another; one branch may have a choice of its own."""
    # What a site is charged with must not follow from its value, nor what was drawn before it.
    start = pyro.sample("s", dist.Bernoulli(logits=q[6]))
    if pyro.sample("a", dist.Bernoulli(logits=q[0])) > 0:
        b = pyro.sample("b", dist.Categorical(logits=q[1:4]))
        return 0.5 * b + (pyro.sample("c", dist.Bernoulli(logits=q[4])) if b > 0 else start)
    chosen = {"bpq": {"estimator": AllAction()}} if kind == "choice" else {}
    return -1.5 * pyro.sample("d", dist.Bernoulli(logits=q[5]), infer=chosen)


def guide(kind: str = "") -> None:
    tree(pyro.param("q", torch.tensor([0.2, -0.3, 0.4, 0.1, 0.5, -0.6, 0.9], dtype=torch.float64)), kind)


def model(kind: str = "") -> None:
    w = pyro.param("w", torch.tensor([0.3, -0.1], dtype=torch.float64))
    total = tree(w[0] * torch.arange(7.0, dtype=torch.float64), kind)
    pyro.sample("x", dist.Normal(total + w[1], 0.8), obs=torch.tensor(1.1, dtype=torch.float64))


def after(steps: int, kind: str = "", **options: Any) -> TraceBackpropQ_ELBO:
    """The default after some steps that change no parameter."""
    elbo = TraceBackpropQ_ELBO(**options)
    return trained(elbo, lambda: model(kind), lambda: guide(kind), steps=steps)


@pytest.mark.parametrize("steps", [0, 1, 12])
def test_a_step_is_unbiased(steps: int) -> None:
    elbo = after(steps)
    recordings = elbo.runner.recordings
    assert recordings.is_ordered == (steps > 0) and recordings.num_recorded == min(steps, 1)
    assert_unbiased(elbo.eval(), model, guide)


def test_what_a_branch_shows_counts_from_the_next_step_on() -> None:
    # Without the choice it settles; then a branch shows it.
    elbo = after(3)
    recordings = elbo.runner.recordings
    assert recordings.in_order
    # Every branch is served alike until then, that one included.
    assert_unbiased(elbo.eval(), model, guide, "choice")
    elbo.train()
    for seed in range(20):
        from_seed(seed, elbo.loss_and_grads, model, guide, "choice")
    assert recordings.needs_graphs and not recordings.in_order
    assert_unbiased(elbo.eval(), model, guide, "choice")


def test_the_plan_says_why() -> None:
    elbo = after(3)
    assert elbo.plan is not None and "sampled values steer the program" in str(elbo.plan)
    # Another run may have other sites, and another plan.
    assert "the last run: others may have other sites" in str(elbo.plan)
    assert elbo.plan.layout.specs["a"].estimator == ScoreFunction(TrimmedBaseline())
    assert "go in program order" in str(elbo)
    assert elbo.runner.refuses_recording()
    # What sites are told can be asked for.
    assert elbo.observe(Program(model, guide, (), {})).items and elbo.runner.recordings.is_ordered


@pytest.mark.parametrize("options", [{"structure": "dynamic"}, {"estimator": AllAction()}, {"window": 2}])
def test_what_is_chosen_stays(options: dict[str, Any]) -> None:
    elbo = after(3, **options)
    assert not elbo.runner.recordings.is_ordered and elbo.runner.recordings.num_recorded == 3
    assert isinstance(elbo.info["a"]["estimator"], AllAction)


def test_baselines_are_those_of_recent_costs_of_a_site() -> None:
    elbo = after(12)
    recent = elbo.trainer.recent.state_dict()
    assert len(recent["a"]) > len(recent["d"]) > 0
    from_seed(3, elbo.loss_and_grads, model, guide)
    for name, told in elbo.info.items():
        costs = sorted(recent[name])
        assert told["baseline"].item() == costs[(len(costs) - 1) // 2]
        assert told["cost_to_go"].shape == (1,)
    # The step's own cost waits until after it.
    assert elbo.trainer.recent.state_dict()["a"] == [*recent["a"], elbo.info["a"]["cost_to_go"].item()]
