"""Replay with stored costs, and guides that follow their critics: exact Q-functions, and no call of a cost."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from models import bit, real
from pyro import poutine
from pyro.optim import Adam
from steps import critic_targets, fresh, repeat, stepped
from tabular import WORKED, graph_of, set_policy
from torch import Tensor

from pyro_bpq import (
    ActorCriticSVI,
    CostCounter,
    CriticLearner,
    ExpectedCost,
    MLPCritic,
    Replay,
    TabularCritic,
    cost,
)
from pyro_bpq.critics.replay_buffer import OffPolicyPlan, off_policy_plan
from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.step.learning import Learning
from pyro_bpq.testing import exact_gradient, exact_loss

OLD = {"q1": real(0.4), "q2": real(-0.5, 0.8), "q3": real(0.3, -0.7, 1.0, -0.2).reshape(2, 2)}
NEW = {"q1": real(-1.5), "q2": real(1.7, -1.2), "q3": real(-1.4, 1.9, -0.8, 1.3).reshape(2, 2)}
TABLE = real(1.0, -2.0, 0.5, 3.0, -1.0, 2.5, 0.0, -1.5).reshape(2, 2, 2)


def box(*values: Tensor) -> Any:
    """The table by numpy: nothing can be seen through it."""
    return TABLE.numpy()[tuple(v.long().numpy() for v in values)]


def chain() -> None:
    x1 = bit("x1", pyro.param("q1").squeeze())
    x2 = bit("x2", pyro.param("q2")[x1])
    cost("f", box, x1, x2, bit("x3", pyro.param("q3")[x1, x2]))


def exact_q(program: Callable[[], None], *known: int) -> float:
    """Expected cost of the policy in the store given the values of the first sites, by enumeration."""
    values = {f"x{i + 1}": torch.tensor(float(value)) for i, value in enumerate(known)}
    return float(exact_loss(None, poutine.condition(program, values), only_costs=True))


def rolled_out(program: Any = chain, policy: Any = OLD, particles: int = 64, **options: Any) -> ExpectedCost:
    """An objective with a few rollouts of a policy in its buffer."""
    fresh()
    set_policy(policy)
    replay = Replay(capacity=4, batch_size=1, updates_per_step=0, costs="stored")
    options |= {"critic": TabularCritic(), "learner": CriticLearner(lr=0.5, optimizer=torch.optim.SGD, replay=replay)}
    return stepped(8, ExpectedCost(particles, 0, vectorize_particles=particles > 1, **options), None, program)


def values(objective: ExpectedCost, name: str) -> list[tuple[dict[str, int], float]]:
    """Values of the sites of stored rollouts, and of a Q-node there."""
    pairs = []
    for stored in objective.replay_buffer._rollouts:
        staged = objective.trainer.replayer._rerun(objective, stored, stored.values, 0)
        q, _ = critic_targets(staged.signals.again(), Learning(0.0, 1.0))[name]
        sites = {site: value.flatten().long().tolist() for site, value in stored.values[0].items()}
        for m, number in enumerate(q.flatten().tolist()):
            pairs.append(({site: each[m] for site, each in sites.items()}, number))
    return pairs


def largest_error(objective: ExpectedCost) -> float:
    errors = []
    for name, order in (("x3", ("x1", "x2", "x3")), ("x2", ("x1", "x2")), ("x1", ("x1",))):
        found = {tuple(state[site] for site in order): q for state, q in values(objective, name)}
        assert len(found) == 2 ** len(order)
        errors += [abs(q - exact_q(chain, *state)) for state, q in found.items()]
    return max(errors)


# What learns from stored costs


HISTORY = {"x": [], "y": ["x"], "z": ["x", "y"]}, {"f": ["x", "y", "z"], "g": ["y"]}
COLLIDER = {"x": [], "b": []}, {"f": ["x", "b"]}
CHAIN = {"x": [], "y": ["x"], "z": ["y"]}, {"f": ["y"], "g": ["z"]}


@pytest.mark.parametrize(
    ("graph", "immediate", "tabled", "stored", "held", "redrawn"),
    [
        # A history is replayed as it is.
        (HISTORY, "learned", {}, ["f", "g"], "x y z", ""),
        # Co-parents are redrawn, and costs of them are not touched.
        (WORKED["replay"], "learned", {}, ["f1", "f2"], "y1 y2", "x a b1 b2"),
        # The cost is a child of x, and b comes from an older guide: x has to wait for new rollouts.
        (COLLIDER, "learned", {}, ["f"], "", ""),
        # A cost that is computed again is right at what was redrawn.
        (COLLIDER, "learned", {}, [], "", "x b"),
        # Immediate costs of children are in the way unless they have a table.
        (WORKED["bypass"], "exact", {}, ["f"], "", ""),
        (CHAIN, frozenset({"f"}), {"y": ("f",)}, ["g"], "x y z", ""),
    ],
)
def test_what_may_be_replayed(graph: Any, immediate: Any, tabled: Any, stored: Any, held: str, redrawn: str) -> None:
    network = BackpropQNetwork.build(graph_of(*graph), immediate=immediate)
    plan = off_policy_plan(network, network.graph.index, tabled, stored)
    assert plan == OffPolicyPlan(frozenset(held.split()), frozenset(redrawn.split()))


def test_without_an_expectation_what_reads_a_site_draws_it_again() -> None:
    network = BackpropQNetwork.build(graph_of(*HISTORY), immediate="learned")
    plan = off_policy_plan(network, "xy", {}, ["f", "g"])
    # The nodes above trust nothing that does.
    assert "z" in plan.held and plan.redrawn and all(name.startswith(("x", "y")) for name in plan.redrawn)


@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_critics_agree_with_the_exact_q_of_the_current_guide_without_a_call(lam: float) -> None:
    # The rollouts set the scales, which one-step targets of untrained critics would make tiny.
    objective = rolled_out(lam=lambda n: lam if n >= 8 else 0.9)
    set_policy(NEW)
    assert largest_error(objective) > 0.5
    with CostCounter() as counter:
        assert objective.replay(updates=200) == 200
    assert counter.total == 0 and objective.replay_buffer.num_dropped == 0
    assert largest_error(objective) < 1e-4


def collider(has_child: bool = True) -> None:
    x, b = bit("x1", pyro.param("q1").squeeze()), bit("b", pyro.param("qb").squeeze())
    read = bit("x3", pyro.param("q3")[x, b]) if has_child else b
    cost("f", lambda *v: TABLE.numpy()[0][tuple(u.long().numpy() for u in v)], x, read)


def test_coparents_are_redrawn_from_the_current_guide() -> None:
    old, new = {**OLD, "qb": real(2.0)}, {**NEW, "qb": real(-2.0)}
    objective = rolled_out(collider, old, particles=256)
    set_policy(new)
    for stored in objective.replay_buffer._rollouts:
        assert stored.plan == OffPolicyPlan(frozenset({"x3"}), frozenset({"x1", "b"}))
    with CostCounter() as counter:
        objective.replay(["x3"], updates=100)
        objective.replay(["x1"], updates=100)
    assert counter.total == 0
    # Redrawn co-parents leave the noise of 256 draws.
    assert max(abs(q - exact_q(collider, state["x1"])) for state, q in values(objective, "x1")) < 0.25


def test_what_cannot_learn_waits() -> None:
    objective = rolled_out(functools.partial(collider, has_child=False), {"q1": real(0.1), "qb": real(0.2)})
    assert objective.replay() == 0
    assert len(objective.replay_buffer) == 4 and objective.replay_buffer.num_dropped == 0


def steered() -> None:
    x1 = bit("x1", pyro.param("q1").squeeze())
    if x1.item():
        bit("x2", pyro.param("q2")[0])
    x3 = bit("x3", pyro.param("q3")[x1, 0])
    cost("f", lambda a, b: float(a) - 2.0 * float(b), x1, x3)


def test_programs_that_values_steer() -> None:
    objective = rolled_out(steered, particles=1)
    with CostCounter() as counter:
        assert objective.replay(updates=20) == 20
    assert counter.total == 0 and objective.replay_buffer.num_dropped == 0


# Guides that follow their critics


def followed(objective: ExpectedCost, **options: Any) -> dict[str, Tensor]:
    leaves = dict(pyro.get_param_store().named_parameters())
    leaves = {name: leaf for name, leaf in leaves.items() if name in NEW}
    found = torch.autograd.grad(objective.bootstrapped_loss(None, chain, **options), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def test_gradient_along_exact_critics_is_that_of_the_cost() -> None:
    objective = rolled_out()
    set_policy(NEW)
    objective.replay(updates=150)
    state, critics = torch.get_rng_state(), copy.deepcopy(objective.critics.weights())
    with CostCounter() as counter:
        found = [followed(objective) for _ in range(30)]
    assert counter.total == 0 and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, critics[name]) for name, value in objective.critics.weights().items())
    for name, wanted in exact_gradient(None, chain, only_costs=True).items():
        rows = torch.stack([each[name] for each in found])
        # The first site draws nothing that its gradient depends on: no noise there but that of the critics.
        error = rows.std(0) / len(rows) ** 0.5 + 1e-4
        assert float(((rows.mean(0) - wanted) / error).abs().max()) < 4.0


def test_entropy_pulls_to_the_uniform_distribution() -> None:
    objective = rolled_out(lam=0.0)
    plain, pulled = followed(objective)["q1"], followed(objective, entropy=2.0)["q1"]
    p = torch.sigmoid(OLD["q1"])
    # The derivative of -H of a coin with respect to its logit is logit p (1 - p).
    assert torch.allclose(pulled - plain, 2.0 * OLD["q1"] * p * (1.0 - p))


def test_guide_waits_for_the_warm_up() -> None:
    fresh()
    set_policy(OLD)
    replay = Replay(capacity=200, batch_size=2, updates_per_step=0, costs="stored")
    objective = ExpectedCost(critic=MLPCritic((8,)), learner=CriticLearner(lr=0.01, replay=replay))
    svi = ActorCriticSVI(None, chain, Adam({"lr": 0.05}), objective, warm_up=3)
    assert "warm_up=3" in repr(svi)
    repeat(3, svi.step)
    assert all(torch.equal(pyro.param(name), value) for name, value in OLD.items())
    svi.step()
    assert not torch.equal(pyro.param("q1"), OLD["q1"])


def test_actor_critic_needs_a_replay() -> None:
    with pytest.raises(ValueError, match="Replay"):
        ActorCriticSVI(None, chain, Adam({"lr": 0.05}), ExpectedCost())
