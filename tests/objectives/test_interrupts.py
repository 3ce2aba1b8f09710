"""A step that is interrupted at any call of a program leaves all as it was: taken again it gives the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

from pyro_bpq import (
    AllAction,
    CriticLearner,
    ExpectedCost,
    LinearCritic,
    Replay,
    SlowTracking,
    TraceBackpropQ_ELBO,
    TraceBackpropQ_IWAE,
    cost,
)
from pyro_bpq.estimators import DebiasedStraightThrough, SecondRun
from pyro_bpq.objectives.critic_trainer import CriticTrainer
from pyro_bpq.objectives.replayer import Replayer


class Interrupt(BaseException):
    """As KeyboardInterrupt, which would end the tests."""


class Bell:
    """Raises at a call that was chosen."""

    def __init__(self) -> None:
        self.calls, self.at = 0, -1
        self.error: type[BaseException] = Interrupt

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.error


def chain(bell: Bell) -> tuple[Any, Any]:
    table = torch.tensor([-0.5, 0.8])

    def model() -> None:
        z = torch.tensor(0.0)
        for t in range(2):
            bell()
            z = pyro.sample(f"z{t}", dist.Bernoulli(logits=table[z.long()]))
            pyro.sample(f"x{t}", dist.Normal(z, 1.0), obs=torch.tensor(0.5))

    def guide() -> None:
        q, z = pyro.param("q", torch.zeros(2)), torch.tensor(0.0)
        for t in range(2):
            bell()
            z = pyro.sample(f"z{t}", dist.Bernoulli(logits=q[t] + z))

    return model, guide


def steered(bell: Bell) -> tuple[Any, Any]:
    def model() -> None:
        bell()
        if bool(pyro.sample("a", dist.Bernoulli(0.4))):
            bell()
            pyro.sample("b", dist.Bernoulli(0.4))
        pyro.sample("x", dist.Normal(0.0, 1.0), obs=torch.tensor(0.5))

    def guide() -> None:
        bell()
        if bool(pyro.sample("a", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))))):
            pyro.sample("b", dist.Bernoulli(logits=pyro.param("p", torch.tensor(0.1))))

    return model, guide


def vector(bell: Bell) -> tuple[Any, Any]:
    data = torch.tensor([0.2, 1.0, 2.2])

    def model() -> None:
        bell()
        with pyro.plate("rows", 3):
            z = pyro.sample("z", dist.Bernoulli(torch.full((4,), 0.4)).to_event(1))
            bell()
            pyro.sample("x", dist.Normal(z.sum(-1).square(), 1.0), obs=data)

    def guide() -> None:
        q = pyro.param("q", torch.zeros(3, 4))
        bell()
        with pyro.plate("rows", 3):
            pyro.sample("z", dist.Bernoulli(logits=q).to_event(1))

    return model, guide


def policy(bell: Bell) -> tuple[Any, Any]:
    def program() -> None:
        q, z = pyro.param("q", torch.zeros(2)), torch.tensor(0.0)
        for t in range(2):
            bell()
            z = pyro.sample(f"z{t}", dist.Bernoulli(logits=q[t] + z))
            cost(f"c{t}", (z - 0.3).square())

    return (lambda: None), program


def elbo(**options: Any) -> Callable[[], Any]:
    return lambda: TraceBackpropQ_ELBO(**options)


def replay(**options: Any) -> CriticLearner:
    return CriticLearner(replay=Replay(capacity=3, batch_size=2, updates_per_step=2, **options))


CASES: dict[str, tuple[Callable[[Bell], tuple[Any, Any]], Callable[[], Any]]] = {
    "default": (chain, elbo()),
    "one": (chain, elbo(num_particles=1)),
    "particles": (chain, elbo(num_particles=3, critic=LinearCritic())),
    "steps": (chain, elbo(learner=CriticLearner(steps=3))),
    "replay": (chain, elbo(learner=replay())),
    "replay expected": (chain, elbo(learner=replay(coparents="expected"), num_particles=2)),
    "replay stored": (chain, elbo(learner=replay(costs="stored"))),
    "replay slow": (
        chain,
        elbo(learner=CriticLearner(replay=Replay(batch_size=2), slow=SlowTracking(0.2, guide=True), steps=2)),
    ),
    "replay steered": (steered, elbo(learner=replay())),
    "replay policy": (policy, lambda: ExpectedCost(learner=replay())),
    "steered": (steered, elbo(num_particles=2)),
    "vector": (vector, elbo()),
    "vector of one": (vector, elbo(num_particles=1)),
    "second run": (vector, elbo(estimator=SecondRun(), num_particles=1)),
    "straight through": (vector, elbo(estimator=DebiasedStraightThrough(), num_particles=1)),
    "all actions": (vector, elbo(estimator=AllAction(exact=True), num_particles=1)),
    "bound": (chain, lambda: TraceBackpropQ_IWAE(num_particles=3)),
}


def tensors(value: Any, path: str = "") -> dict[str, Any]:
    """All of a state, by place."""
    if isinstance(value, dict):
        return {k: v for name, part in value.items() for k, v in tensors(part, f"{path}.{name}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, part in enumerate(value) for k, v in tensors(part, f"{path}.{i}").items()}
    return {path: value}


def run(name: str, taken: int, at: int, error: type[BaseException] = Interrupt) -> tuple[dict[str, Any], bool]:
    """Three steps after some that were taken, the first of which is interrupted at a call, and then taken again."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    bell = Bell()
    make_programs, make = CASES[name]
    objective, (model, guide) = make(), make_programs(bell)
    svi = SVI(model, guide, Adam({"lr": 0.02}), objective)
    losses = [svi.step() for _ in range(taken)]
    state = torch.get_rng_state()
    bell.calls, bell.at, bell.error = 0, at, error
    interrupted = False
    try:
        losses.append(svi.step())
    except error:
        interrupted = True
        gradients = [p.grad for p in pyro.get_param_store()._params.values()]
        assert all(gradient is None or not gradient.any() for gradient in gradients)
        torch.set_rng_state(state)
        bell.at = -1
        losses.append(svi.step())
    bell.at = -1
    losses += [svi.step() for _ in range(2)]
    found = {"losses": losses, "params": dict(pyro.get_param_store()._params), "state": objective.state_dict()}
    buffer = getattr(objective, "replay_buffer", None)
    if buffer is not None:
        found |= {"dropped": buffer.num_dropped, "stored": [rollout.values for rollout in buffer._rollouts]}
    return copy.deepcopy(tensors(found)), interrupted


def differing(name: str, taken: int, error: type[BaseException] = Interrupt, stride: int = 1) -> dict[int, list[str]]:
    """What differs from a run without interruption, by call: at each ``stride``-th call."""
    expected, _ = run(name, taken, -1)
    found: dict[int, list[str]] = {}
    at, interrupted = 1, True
    while interrupted:
        result, interrupted = run(name, taken, at, error)
        found[at] = [key for key in expected.keys() | result.keys() if not same(expected.get(key), result.get(key))]
        at += stride
    assert at > 3
    return {at: keys for at, keys in found.items() if keys}


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else bool(one == other)


# Each stored rollout that is run again has calls of its own to be interrupted at.
LONG = ("replay expected", "replay stored", "replay slow", "replay policy")


@pytest.mark.parametrize(
    ("taken", "stride"),
    [pytest.param(0, 1, marks=pytest.mark.slow), pytest.param(3, 1, marks=pytest.mark.slow), (3, 3)],
)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in CASES])
def test_an_interrupted_step_can_be_taken_again(name: str, taken: int, stride: int) -> None:
    assert not differing(name, taken, stride=stride)


# With an open number of particles, such a step is taken with one.
@pytest.mark.parametrize("name", ["one", "particles", "steered", "vector of one", "bound"])
def test_a_step_whose_program_fails_can_be_taken_again(name: str) -> None:
    assert not differing(name, 2, LookupError)


@pytest.mark.slow
def test_replay_that_goes_on_where_it_was_interrupted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replayer, "restore", lambda *_: None)
    assert differing("replay", 3)


def test_critics_that_keep_half_a_step_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CriticTrainer, "_keep_changed", lambda *_: None)
    assert differing("replay", 3)


def test_replay_by_hand_is_done_or_not() -> None:
    def run(at: int) -> tuple[dict[str, Any], bool]:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        bell = Bell()
        model, guide = chain(bell)
        objective = TraceBackpropQ_ELBO(learner=CriticLearner(replay=Replay(batch_size=2, updates_per_step=0)))
        svi = SVI(model, guide, Adam({"lr": 0.02}), objective)
        for _ in range(4):
            svi.step()
        bell.calls, bell.at = 0, at
        interrupted, done = False, 0
        while done < 3:
            try:
                done += objective.replay()
            except Interrupt:
                interrupted = True
        bell.at = -1
        svi.step()
        return copy.deepcopy(tensors({"state": objective.state_dict()})), interrupted

    expected, _ = run(-1)
    at, interrupted = 1, True
    while interrupted:
        found, interrupted = run(at)
        assert found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
        at += 3
    assert at > 10


def test_critics_that_cannot_be_registered_learn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(fails: bool) -> tuple[list[float], Any]:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model, guide = chain(Bell())
        objective = TraceBackpropQ_ELBO(1, learner=None)
        svi = SVI(model, guide, Adam({"lr": 0.02}), objective)
        svi.step(), svi.step()
        draws = torch.get_rng_state()
        if fails:
            with monkeypatch.context() as patch, pytest.raises(Interrupt):
                bell = Bell()
                bell.at = 1
                patch.setattr(objective.trainer, "register", bell)
                svi.step()
            torch.set_rng_state(draws)
        return [svi.step() for _ in range(3)], copy.deepcopy(tensors({"state": objective.state_dict()}))

    (one, before), (other, after) = losses(False), losses(True)
    assert one == other and all(same(after[key], before[key]) for key in before)
