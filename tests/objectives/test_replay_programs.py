"""Replay, slow copies and limited steps of programs that values steer, of expected costs, and with other critics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from lattice import Lattice
from pyro.infer import SVI
from pyro.optim import Adam
from steps import critic_targets, fresh, repeat
from test_steered import exact, guide, model, train
from torch import Tensor

from pyro_bpq import (
    CostCounter,
    CriticLearner,
    ExpectedCost,
    MomentCritic,
    ProximalSVI,
    QProp,
    Replay,
    SlowTracking,
    TraceBackpropQ_ELBO,
    TrustRegionSVI,
    cost,
)
from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.objectives.local_objective import LocalObjective
from pyro_bpq.objectives.observation import Staged
from pyro_bpq.reruns.redraw import Hold
from pyro_bpq.step.values import Learning
from pyro_bpq.testing import expected_gradient

EVERYTHING = CriticLearner(
    lr=0.03, steps=2, replay=Replay(capacity=16, batch_size=2), slow=SlowTracking(0.1, guide=True)
)

# Programs that sampled values steer


@pytest.mark.parametrize("particles", [1, 2])
def test_steered_steps_stay_unbiased(particles: int) -> None:
    elbo = train(40, num_particles=particles, learner=EVERYTHING)
    assert elbo.replay_buffer is not None and len(elbo.replay_buffer) == 16 and elbo.replay_buffer.num_dropped == 0
    critics = [block for block in elbo.critics.blocks.values() if block.critic is not None]
    assert max(float(w.detach().abs().max()) for block in critics for w in block.weights().values()) > 0.1
    found = expected_gradient(elbo, model, guide)
    for name, gradient in exact().items():
        torch.testing.assert_close(found[name], gradient, rtol=0.0, atol=1e-10)


def test_steered_replay_redraws_all_later_sites() -> None:
    """The mean target of a replayed site is its expectation over all that the program may do next."""
    elbo = train(30, learner=CriticLearner(replay=Replay(capacity=64, updates_per_step=0)))
    assert elbo.trainer.replayer is not None and elbo.replay_buffer is not None

    def target(staged: Staged) -> Tensor:
        return critic_targets(staged.signals.again(), Learning(1.0))["z_0"][1]

    short = next(stored for stored in elbo.replay_buffer._rollouts if "z_2" not in stored.values[0])
    held = {"z_0": short.values[0]["z_0"]}
    wanted, weights = 0.0, 0.0
    # The program stops where z_1 is zero.
    for later in ({"z_1": 0.0}, {"z_1": 1.0, "z_2": 0.0}, {"z_1": 1.0, "z_2": 1.0}):
        values = {**held, **{name: torch.tensor(value, dtype=torch.float64) for name, value in later.items()}}
        with Hold(values):
            traced = elbo.run_program(short.programs[0])
        sites = traced.run.sites
        weight = math.exp(sum(float(sites[name].fn.log_prob(sites[name].value).detach()) for name in later))
        weights, wanted = weights + weight, wanted + weight * float(target(elbo.stage([traced], short.programs)))
    assert weights == pytest.approx(1.0)
    found, rejected = [], []
    for seed in range(300):
        staged = elbo.trainer.replayer._rerun(elbo, short, [held], seed)
        assert staged is not None and torch.equal(staged.traced[0].run.sites["z_0"].value, held["z_0"])
        found.append(target(staged))
        if staged.traced[0].key == short.key:
            rejected.append(found[-1])
    mean, error = torch.stack(found).mean(), torch.stack(found).std() / 300**0.5
    assert abs(mean - wanted) < 3.5 * error
    # Keeping only runs of the stored structure would be wrong, and would be seen.
    biased, error = torch.stack(rejected).mean(), torch.stack(rejected).std() / len(rejected) ** 0.5
    assert abs(biased - wanted) > 10 * error and abs(biased - mean) > 0.1


def test_steered_rollouts_that_miss_their_site_are_dropped() -> None:
    name = ["z"]

    def program(logits: Callable[[], Tensor]) -> None:
        first = pyro.sample("a", dist.Bernoulli(logits=logits()))
        if first.item() > -1.0:
            pyro.sample(name[0], dist.Bernoulli(logits=logits()))
        pyro.factor("f", -first) if logits is zero else None

    def zero() -> Tensor:
        return torch.zeros(())

    elbo = TraceBackpropQ_ELBO(learner=CriticLearner(replay=Replay(capacity=10, updates_per_step=0)))
    repeat(10, elbo.loss_and_grads, lambda: program(zero), lambda: program(lambda: pyro.param("q", torch.zeros(()))))
    assert elbo.replay(updates=3) == 3
    name[0] = "other"
    elbo.replay(["z"], updates=20)
    assert elbo.replay_buffer is not None and elbo.replay_buffer.num_dropped > 0


# Expected costs


def policy() -> Tensor:
    a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("qa", torch.tensor(0.3))))
    return pyro.sample("b", dist.Bernoulli(logits=pyro.param("qb", torch.tensor([0.1, -0.4]))[a.long()]))


def environment() -> None:
    b = pyro.sample("b", dist.Bernoulli(0.5))
    c = pyro.sample("c", dist.Bernoulli(logits=0.7 * b))
    cost("hit", lambda x, y: (x + 2.0 * y - 1.0) ** 2, b, c)


@pytest.mark.parametrize("world", [None, environment], ids=["policy", "environment"])
def test_replay_of_expected_costs(world: Any) -> None:
    def alone() -> None:
        cost("hit", lambda x: (x - 1.0) ** 2, policy())

    elbo = ExpectedCost(learner=EVERYTHING)
    svi = SVI(world, policy if world else alone, Adam({"lr": 0.1}), elbo)
    losses = [svi.step() for _ in range(60)]
    assert elbo.replay_buffer is not None and len(elbo.replay_buffer) > 0 and elbo.replay_buffer.num_dropped == 0
    assert elbo.replay(updates=3) == 3
    assert sum(losses[-20:]) < sum(losses[:20])


@pytest.mark.parametrize("kind", [ProximalSVI, TrustRegionSVI])
def test_limited_steps_of_expected_costs_call_the_cost_once(kind: Any) -> None:
    elbo = ExpectedCost(num_particles=20, vectorize_particles=True, max_plate_nesting=0)
    svi = kind(environment, policy, Adam({"lr": 0.05}), elbo)
    svi.step()
    with CostCounter() as counter:
        steps = [(svi.step(), svi.last) for _ in range(20)]
    assert counter.calls == {"hit": 20}
    losses = [loss for loss, _ in steps]
    assert sum(report.epochs for _, report in steps) >= 10 and max(report.total_kl for _, report in steps) > 0.0
    assert sum(losses[-5:]) < sum(losses[:5])


def test_no_cost_of_the_guide_is_taxed_in_an_expected_cost() -> None:
    elbo = ExpectedCost().eval()
    elbo.trainer.keeps_staged = True
    elbo.differentiable_loss(environment, policy)
    objective = LocalObjective(elbo.trainer.staged.items, 1)
    with torch.no_grad():
        pyro.param("qa").add_(1.0)
    nearby = objective.nearby()
    assert float(nearby.total_kl.detach()) > 0.01 and not bool(nearby.penalty.any())


# Critics that read a value as a whole, and what limited steps refuse


def points() -> tuple[Any, Any]:
    options = {"bpq": {"estimator": QProp(), "critic": MomentCritic()}}

    def model() -> None:
        x = pyro.sample("x", Lattice(torch.zeros(3)))
        pyro.sample("y", dist.Bernoulli(logits=x))
        pyro.sample("obs", dist.Normal(x, 1.0), obs=torch.tensor(0.3))

    def guide() -> None:
        x = pyro.sample("x", Lattice(pyro.param("q", torch.tensor([0.4, -0.1, 0.3]))), infer=options)
        pyro.sample("y", dist.Bernoulli(logits=pyro.param("w", torch.tensor(0.2)) * x))

    return model, guide


def test_q_prop_replays_but_has_no_limited_steps() -> None:
    model, guide = points()
    fresh()
    elbo = TraceBackpropQ_ELBO(learner=EVERYTHING)
    svi = SVI(model, guide, Adam({"lr": 0.02}), elbo)
    repeat(10, svi.step)
    assert elbo.replay(updates=2) == 2 and any("MomentCritic" in block.kind for block in elbo.critics.blocks.values())
    with pytest.raises(UnsupportedSiteError, match=r"'x'.*through parameters.*ScoreFunction"):
        ProximalSVI(model, guide, Adam({"lr": 0.02}), TraceBackpropQ_ELBO()).step()


def test_limited_steps_refuse_guides_with_sites_summed_out() -> None:
    def model() -> None:
        a = pyro.sample("a", dist.Bernoulli(0.3))
        pyro.sample("b", dist.Bernoulli(logits=a))

    def guide() -> None:
        a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.1))), infer={"enumerate": "parallel"})
        pyro.sample("b", dist.Bernoulli(logits=pyro.param("w", torch.tensor(0.2))), infer={"was": a.dim()})

    svi = ProximalSVI(model, guide, Adam({"lr": 0.02}), TraceBackpropQ_ELBO(enumeration="exact"))
    with pytest.raises(UnsupportedSiteError, match="'a' of the guide are summed out"):
        svi.step()
