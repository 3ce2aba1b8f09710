"""Replay, slow copies and limited steps of programs that values steer, of expected costs, and with other critics."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from lattice import Lattice
from pyro.infer import SVI
from pyro.optim import Adam
from steps import repeat
from test_steered import EVERYTHING, train
from torch import Tensor

from pyro_bpq import (
    CostCounter,
    CriticLearner,
    ExpectedCost,
    MomentCritic,
    ProximalSVI,
    QProp,
    Replay,
    TraceBackpropQ_ELBO,
    TrustRegionSVI,
    cost,
)
from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.objectives.local_objective import LocalObjective

# Programs that sampled values steer


def test_steered_replay_redraws_all_later_sites() -> None:
    """A replayed site is held; then comes all that the program may do next, of other structures too."""
    elbo = train(30, learner=CriticLearner(replay=Replay(capacity=64, updates_per_step=0)))
    short = next(stored for stored in elbo.replay_buffer._rollouts if "z_2" not in stored.values[0])
    held, found = {"z_0": short.values[0]["z_0"]}, set()
    for seed in range(40):
        staged = elbo.trainer.replayer._rerun(elbo, short, [held], seed)
        values = {name: site.value for name, site in staged.traced[0].run.sites.items()}
        assert torch.equal(values["z_0"], held["z_0"])
        found.add(tuple(float(value) for name, value in values.items() if name > "z_0"))
    # The program stops where z_1 is zero.
    assert found == {(0.0,), (1.0, 0.0), (1.0, 1.0)}


def test_steered_rollouts_that_miss_their_site_are_dropped() -> None:
    name = ["z"]

    def program(logits: Tensor) -> Tensor:
        first = pyro.sample("a", dist.Bernoulli(logits=logits))
        if first.item() > -1.0:
            pyro.sample(name[0], dist.Bernoulli(logits=logits))
        return first

    def model() -> None:
        pyro.factor("f", -program(torch.zeros(())))

    elbo = TraceBackpropQ_ELBO(learner=CriticLearner(replay=Replay(capacity=10, updates_per_step=0)))
    repeat(10, elbo.loss_and_grads, model, lambda: program(pyro.param("q", torch.zeros(()))))
    assert elbo.replay(updates=3) == 3
    name[0] = "other"
    elbo.replay(["z"], updates=20)
    assert elbo.replay_buffer.num_dropped > 0


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
    assert len(elbo.replay_buffer) > 0 and elbo.replay_buffer.num_dropped == 0
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


def test_q_prop_replays_but_has_no_limited_steps() -> None:
    options = {"bpq": {"estimator": QProp(), "critic": MomentCritic()}}

    def model() -> None:
        x = pyro.sample("x", Lattice(torch.zeros(3)))
        pyro.sample("y", dist.Bernoulli(logits=x))
        pyro.sample("obs", dist.Normal(x, 1.0), obs=torch.tensor(0.3))

    def guide() -> None:
        x = pyro.sample("x", Lattice(pyro.param("q", torch.tensor([0.4, -0.1, 0.3]))), infer=options)
        pyro.sample("y", dist.Bernoulli(logits=pyro.param("w", torch.tensor(0.2)) * x))

    elbo = TraceBackpropQ_ELBO(learner=EVERYTHING)
    repeat(10, SVI(model, guide, Adam({"lr": 0.02}), elbo).step)
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
