"""A step that is interrupted at any call of a program leaves all as it was: taken again it gives the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import pyro
import pytest
import torch
from models import BY_NAME
from pyro.infer import SVI
from pyro.optim import Adam
from pyro.poutine.messenger import Messenger
from steps import assert_equal, some_quick

from pyro_bpq import (
    CriticLearner,
    LinearCritic,
    Replay,
    SlowTracking,
    TraceBackpropQ_ELBO,
    TraceBackpropQ_IWAE,
)

CASE = BY_NAME["factor"]


class Interrupt(BaseException):
    """As KeyboardInterrupt, which would end the tests."""


class Bell(Messenger):
    """Raises at a statement that was chosen."""

    calls, at = 0, -1
    error: type[BaseException] = Interrupt

    def _pyro_sample(self, msg: Any) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.error


def replay(**options: Any) -> CriticLearner:
    return CriticLearner(replay=Replay(capacity=3, batch_size=2, updates_per_step=2, **options))


SLOW = CriticLearner(replay=Replay(batch_size=2), slow=SlowTracking(0.2, guide=True), steps=2)
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "one": {"num_particles": 1},
    "particles": {"num_particles": 3, "critic": LinearCritic()},
    "steps": {"learner": CriticLearner(steps=3)},
    "replay": {"learner": replay()},
    "replay of pairs": {"learner": replay(), "num_particles": 2},
    "replay stored": {"learner": replay(costs="stored")},
    "replay slow": {"learner": SLOW},
    "bound": {"num_particles": 3},
}


def run(name: str, taken: int, at: int, error: type[BaseException] = Interrupt) -> tuple[dict[str, Any], bool]:
    """Three steps after some that were taken, the first of which is interrupted at a call, and then taken again."""
    CASE.params(seed=0)
    bell = Bell()
    objective = (TraceBackpropQ_IWAE if name == "bound" else TraceBackpropQ_ELBO)(**CASES[name])
    svi = SVI(bell(CASE.model), bell(CASE.guide), Adam({"lr": 0.02}), objective)
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
    return copy.deepcopy(found), interrupted


def assert_undone(name: str, taken: int, error: type[BaseException] = Interrupt, stride: int = 1) -> None:
    """Nothing differs from a run without interruption, at each ``stride``-th call."""
    expected, _ = run(name, taken, -1)
    at, interrupted = 1, True
    while interrupted:
        found, interrupted = run(name, taken, at, error)
        assert_equal(found, expected, f"call {at}")
        at += stride
    assert at > 3


# Each stored rollout that is run again has calls of its own to be interrupted at.
LONG = ("replay stored", "replay slow")


SPANS = [pytest.param(0, 1, marks=pytest.mark.slow), pytest.param(3, 1, marks=pytest.mark.slow), (3, 3)]


@pytest.mark.parametrize(("taken", "stride"), SPANS)
@pytest.mark.parametrize("name", some_quick(CASES, CASES.keys() - {*LONG}))
def test_an_interrupted_step_can_be_taken_again(name: str, taken: int, stride: int) -> None:
    assert_undone(name, taken, stride=stride)


# With an open number of particles, such a step is taken with one.
@pytest.mark.parametrize("name", ["one", "particles", "bound"])
def test_a_step_whose_program_fails_can_be_taken_again(name: str) -> None:
    assert_undone(name, 2, LookupError)
