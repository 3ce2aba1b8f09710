"""Replay with stored costs, and guides that follow their critics: exact Q-functions, and no call of a cost."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import pytest
import torch
from models import coin, real
from pyro.optim import Adam
from steps import critic_targets, repeat
from tabular import prob, set_policy
from torch import Tensor

from pyro_bpq import (
    ActorCriticSVI,
    CostCounter,
    CriticLearner,
    ExpectedCost,
    MLPCritic,
    Replay,
    ScoreFunction,
    TabularCritic,
    cost,
)
from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.graph.replay_plan import OffPolicyPlan, off_policy_plan
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.step.values import Learning

OLD = {"q1": real(0.4), "q2": real(-0.5, 0.8), "q3": real(0.3, -0.7, 1.0, -0.2).reshape(2, 2)}
NEW = {"q1": real(-1.5), "q2": real(1.7, -1.2), "q3": real(-1.4, 1.9, -0.8, 1.3).reshape(2, 2)}
TABLE = real(1.0, -2.0, 0.5, 3.0, -1.0, 2.5, 0.0, -1.5).reshape(2, 2, 2)


def box(*values: Tensor) -> Any:
    """The table by numpy: nothing can be seen through it."""
    return TABLE.numpy()[tuple(v.long().numpy() for v in values)]


def bit(name: str, logits: Tensor) -> Tensor:
    return coin(name, logits).long()


def chain() -> None:
    x1 = bit("x1", pyro.param("q1").squeeze())
    x2 = bit("x2", pyro.param("q2")[x1])
    cost("f", box, x1, x2, bit("x3", pyro.param("q3")[x1, x2]))


def exact_q(policy: Mapping[str, Tensor], *known: int) -> float:
    """Expected cost given the first values of the chain, by enumeration."""
    if len(known) == 3:
        return float(TABLE[known])
    logit = policy[f"q{len(known) + 1}"][known] if known else policy["q1"].squeeze()
    return sum(float(prob(logit, v)) * exact_q(policy, *known, v) for v in (0, 1))


def rolled_out(
    program: Callable[[], None] = chain, policy: Mapping[str, Tensor] = OLD, particles: int = 64, **options: Any
) -> ExpectedCost:
    """An objective with a few rollouts of a policy in its buffer."""
    pyro.clear_param_store()
    set_policy(policy)
    pyro.set_rng_seed(0)
    replay = Replay(capacity=4, batch_size=1, updates_per_step=0, costs="stored")
    objective = ExpectedCost(
        num_particles=particles,
        vectorize_particles=particles > 1,
        max_plate_nesting=0,
        critic=TabularCritic(),
        learner=CriticLearner(lr=0.5, optimizer=torch.optim.SGD, replay=replay),
        **options,
    )
    repeat(8, objective.loss_and_grads, None, program)
    return objective


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


def largest_error(objective: ExpectedCost, policy: Mapping[str, Tensor]) -> float:
    errors = []
    for name, order in (("x3", ("x1", "x2", "x3")), ("x2", ("x1", "x2")), ("x1", ("x1",))):
        found = {tuple(state[site] for site in order): q for state, q in values(objective, name)}
        assert len(found) == 2 ** len(order)
        errors += [abs(q - exact_q(policy, *state)) for state, q in found.items()]
    return max(errors)


# What learns from stored costs


def test_a_history_is_replayed_as_it_is() -> None:
    graph = StochasticComputationGraph.from_parents(
        {"x": [], "y": ["x"], "z": ["x", "y"]}, {"f": ["x", "y", "z"], "g": ["y"]}
    )
    network = BackpropQNetwork.build(graph, "chain", immediate="learned")
    names = {node.name for node in network.learned}
    assert off_policy_plan(network, "xyz", {}, ["f", "g"]) == OffPolicyPlan(frozenset(names), frozenset())
    # No expectation over z: what reads it has to draw it again, and the nodes above trust nothing that does.
    plan = off_policy_plan(network, "xy", {}, ["f", "g"])
    assert "z" in plan.held and plan.redrawn and all(name.startswith(("x", "y")) for name in plan.redrawn)


def test_coparents_are_redrawn_and_costs_of_them_are_not_touched() -> None:
    graph = StochasticComputationGraph.from_parents(
        {"a": [], "x": ["a"], "b1": [], "b2": [], "y1": ["x", "b1"], "y2": ["x", "a", "b2"]},
        {"f1": ["y1"], "f2": ["y2"]},
    )
    network = BackpropQNetwork.build(graph, "chain", immediate="learned")
    plan = off_policy_plan(network, network.graph.index, {}, ["f1", "f2"])
    assert plan.held == {"y1", "y2"} and plan.redrawn == {"x", "a", "b1", "b2"}
    # The cost is a child of x, and b comes from an older guide: x has to wait for new rollouts.
    network = BackpropQNetwork.build(
        StochasticComputationGraph.from_parents({"x": [], "b": []}, {"f": ["x", "b"]}), immediate="learned"
    )
    plan = off_policy_plan(network, "xb", {}, ["f"])
    assert plan == OffPolicyPlan(frozenset(), frozenset())
    # A cost that is computed again is right at what was redrawn.
    assert off_policy_plan(network, "xb", {}, []).redrawn == {"x", "b"}


def test_untabled_immediate_costs_of_children_are_in_the_way() -> None:
    graph = StochasticComputationGraph.from_parents({"x": [], "y": ["x"]}, {"f": ["x", "y"]})
    network = BackpropQNetwork.build(graph, immediate="exact")
    assert off_policy_plan(network, "xy", {}, ["f"]) == OffPolicyPlan(frozenset(), frozenset())
    graph = StochasticComputationGraph.from_parents({"x": [], "y": ["x"], "z": ["y"]}, {"f": ["y"], "g": ["z"]})
    network = BackpropQNetwork.build(graph, immediate=frozenset({"f"}))
    assert off_policy_plan(network, "xyz", {"y": ("f",)}, ["g"]).held == {"x", "y", "z"}


@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_critics_agree_with_the_exact_q_of_the_current_guide_without_a_call(lam: float) -> None:
    # The rollouts set the scales, which one-step targets of untrained critics would make tiny.
    objective = rolled_out(lam=lambda n: lam if n >= 8 else 0.9)
    set_policy(NEW)
    assert largest_error(objective, NEW) > 0.5
    with CostCounter() as counter:
        assert objective.replay(updates=200) == 200
        assert largest_error(objective, NEW) < 1e-4
    assert counter.total == 0 and objective.replay_buffer.num_dropped == 0


def collider() -> None:
    x, b = bit("x1", pyro.param("q1").squeeze()), bit("b", pyro.param("qb").squeeze())
    cost("f", lambda *v: TABLE.numpy()[0][tuple(u.long().numpy() for u in v)], x, bit("x3", pyro.param("q3")[x, b]))


def collider_q(policy: Mapping[str, Tensor], x: int) -> float:
    weights = [prob(policy["qb"].squeeze(), b) for b in (0, 1)]
    logits = [policy["q3"][x, b] for b in (0, 1)]
    return sum(weights[b] * prob(logits[b], y) * float(TABLE[0, x, y]) for b, y in itertools.product((0, 1), (0, 1)))


@pytest.mark.parametrize("is_planted", [False, True])
def test_coparents_are_redrawn_from_the_current_guide(is_planted: bool) -> None:
    old, new = {**OLD, "qb": real(2.0)}, {**NEW, "qb": real(-2.0)}
    objective = rolled_out(collider, old, particles=256)
    set_policy(new)
    for stored in objective.replay_buffer._rollouts:
        assert stored.plan == OffPolicyPlan(frozenset({"x3"}), frozenset({"x1", "b"}))
        if is_planted:
            object.__setattr__(stored, "plan", OffPolicyPlan(frozenset({"x1", "b", "x3"}), frozenset()))
    with CostCounter() as counter:
        objective.replay(["x3"], updates=100)
        objective.replay(["x1"], updates=100)
    assert counter.total == 0
    error = max(abs(q - collider_q(new, state["x1"])) for state, q in values(objective, "x1"))
    # Redrawn co-parents leave the noise of 256 draws.
    assert error > 0.5 if is_planted else error < 0.25


def test_what_cannot_learn_waits() -> None:
    def program() -> None:
        x, b = bit("x1", pyro.param("q1").squeeze()), bit("b", pyro.param("qb").squeeze())
        cost("f", lambda *v: TABLE.numpy()[0][tuple(u.long().numpy() for u in v)], x, b)

    objective = rolled_out(program, {"q1": real(0.1), "qb": real(0.2)})
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


# What is stored


@pytest.mark.parametrize("through", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_copies_have_an_empty_buffer_and_go_on(through: Any) -> None:
    objective = rolled_out()
    twin = through(objective)
    assert len(twin.replay_buffer) == 0 and twin.replay() == 0
    fresh = rolled_out()
    fresh.load_state_dict(objective.state_dict())
    assert len(fresh.replay_buffer) == 0
    fresh.loss_and_grads(None, chain)
    assert fresh.replay() == 1


# Guides that follow their critics


def exact_gradient(policy: Mapping[str, Tensor]) -> dict[str, Tensor]:
    leaves = {name: value.clone().requires_grad_() for name, value in policy.items()}
    total = torch.zeros(())
    for state in itertools.product((0, 1), repeat=3):
        weight = torch.ones(())
        for i, value in enumerate(state):
            logit = leaves[f"q{i + 1}"][state[:i]] if i else leaves["q1"].squeeze()
            weight = weight * torch.sigmoid(logit if value else -logit)
        total = total + weight * TABLE[state]
    total.backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def followed(objective: ExpectedCost, **options: Any) -> dict[str, Tensor]:
    leaves = dict(pyro.get_param_store().named_parameters())
    leaves = {name: leaf for name, leaf in leaves.items() if name in NEW}
    found = torch.autograd.grad(objective.bootstrapped_loss(None, chain, **options), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("is_trained", [True, False])
def test_gradient_along_exact_critics_is_that_of_the_cost(is_trained: bool) -> None:
    objective = rolled_out()
    set_policy(NEW)
    if is_trained:
        objective.replay(updates=150)
    state, critics = torch.get_rng_state(), copy.deepcopy(objective.critics.weights())
    with CostCounter() as counter:
        found = [followed(objective) for _ in range(30)]
    assert counter.total == 0 and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, critics[name]) for name, value in objective.critics.weights().items())
    exact, worst = exact_gradient(NEW), 0.0
    for name, wanted in exact.items():
        rows = torch.stack([each[name] for each in found])
        # The first site draws nothing that its gradient depends on: no noise there but that of the critics.
        error = rows.std(0) / len(rows) ** 0.5 + 1e-4
        worst = max(worst, float(((rows.mean(0) - wanted) / error).abs().max()))
    assert worst < 4.0 if is_trained else worst > 10.0


def test_entropy_pulls_to_the_uniform_distribution() -> None:
    objective = rolled_out(lam=0.0)
    plain, pulled = followed(objective)["q1"], followed(objective, entropy=2.0)["q1"]
    p = torch.sigmoid(OLD["q1"])
    # The derivative of -H of a coin with respect to its logit is logit p (1 - p).
    assert torch.allclose(pulled - plain, 2.0 * OLD["q1"] * p * (1.0 - p))


def test_sites_without_a_critic_cannot_follow_one() -> None:
    objective = rolled_out(estimator=ScoreFunction())
    with pytest.raises(ValueError, match="x1"):
        objective.bootstrapped_loss(None, chain)


def learner() -> CriticLearner:
    replay = Replay(capacity=200, batch_size=2, updates_per_step=0, costs="stored")
    return CriticLearner(lr=0.01, optimizer=torch.optim.Adam, replay=replay)


def actor(**options: Any) -> ActorCriticSVI:
    pyro.clear_param_store()
    set_policy(OLD)
    pyro.set_rng_seed(0)
    return ActorCriticSVI(
        None, chain, Adam({"lr": 0.05}), ExpectedCost(critic=MLPCritic((8,)), learner=learner()), **options
    )


def test_guide_waits_for_the_warm_up() -> None:
    svi = actor(warm_up=3)
    assert "warm_up=3" in repr(svi)
    repeat(3, svi.step)
    assert all(torch.equal(pyro.param(name), value) for name, value in OLD.items())
    svi.step()
    assert not torch.equal(pyro.param("q1"), OLD["q1"])


@pytest.mark.parametrize("options", [{"rounds": -1}, {"critic_updates": 0.5}, {"warm_up": -1}, {"entropy": -0.1}])
def test_actor_critic_refuses_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        actor(**options)


def test_actor_critic_needs_replay() -> None:
    with pytest.raises(ValueError, match="Replay"):
        ActorCriticSVI(None, chain, Adam({"lr": 0.05}), ExpectedCost())
