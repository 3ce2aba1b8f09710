"""A critic trainer, built alone: what a step teaches waits, is applied once, and can be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_runner import PROGRAM, WAYS

from pyro_bpq import CriticLearner, MLPCritic
from pyro_bpq.objectives.critic_trainer import CriticTrainer
from pyro_bpq.objectives.observation import Mode
from pyro_bpq.objectives.runner import StepRunner
from pyro_bpq.plan.planner import Planner
from pyro_bpq.step.surrogate import step
from pyro_bpq.step.values import Learning, Step


class Owner:
    """Owns a trainer and a runner, and nothing else."""

    def __init__(self, has_learner: bool = True) -> None:
        self.trainer = CriticTrainer(CriticLearner() if has_learner else None, 0)
        self.critics = self.trainer.critics
        self.runner = StepRunner(Planner(None, MLPCritic(), "chain"), "auto", self.critics)

    def mark(self) -> Any:
        """The trainer's own."""
        return self.trainer.mark()

    def go_back(self, mark: Any) -> None:
        """Of the trainer alone."""
        self.trainer.go_back(mark)

    def learning(self) -> Learning:
        """With fixed options."""
        return Learning(0.9, num_steps=self.trainer.num_steps)

    def run_program(self, program: Any) -> Any:
        """Nothing is replayed here."""
        raise AssertionError

    def stage(self, traced: Sequence[Any], programs: Sequence[Any]) -> Any:
        """Nothing is replayed here."""
        raise AssertionError

    def step(self, loss: float = 1.0) -> Step:
        """A step on new draws."""
        mode = Mode(learning=True, num_steps=self.trainer.num_steps)
        (item,) = self.runner.observe(PROGRAM, WAYS["one"], mode).items
        return step([item.signals], torch.tensor(loss), self.critics, self.learning(), True)


def state(owner: Owner) -> dict[str, torch.Tensor]:
    found = owner.critics.state_dict()
    return {name: value.clone() for name, value in found.items() if isinstance(value, torch.Tensor)}


def differs(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() != second.keys() or any(not torch.equal(first[name], second[name]) for name in first)


def test_what_a_step_teaches_waits() -> None:
    owner = Owner()
    owner.trainer.prepare(torch.zeros(()), owner.step())
    before = state(owner)
    assert owner.trainer.waiting is not None and owner.trainer.num_steps == 0
    owner.trainer.learn(owner)
    assert owner.trainer.waiting is None and owner.trainer.num_steps == 1 and differs(before, state(owner))
    after = state(owner)
    owner.trainer.learn(owner)
    assert owner.trainer.num_steps == 1 and not differs(after, state(owner))


def test_a_step_that_is_not_finite_teaches_nothing() -> None:
    owner = Owner()
    assert owner.step().learns
    assert not owner.step(float("nan")).learns


def test_where_the_user_trains_critics_their_loss_is_in_the_surrogate() -> None:
    owner = Owner(False)
    result = owner.step()
    assert result.critic_loss is not None
    assert torch.equal(owner.trainer.prepare(torch.zeros(()), result), result.critic_loss)


def test_a_step_is_taken_back() -> None:
    owner = Owner()
    mark = owner.trainer.mark()
    owner.trainer.prepare(torch.zeros(()), owner.step())
    assert owner.critics.blocks
    owner.trainer.go_back(mark)
    assert owner.trainer.waiting is None and not owner.critics.blocks


@pytest.mark.parametrize("steps", [1, 3])
def test_state_continues_in_another_trainer(steps: int) -> None:
    first, second = Owner(), Owner()
    for _ in range(steps):
        first.trainer.prepare(torch.zeros(()), first.step())
        first.trainer.learn(first)
    second.critics.load_state_dict(first.critics.state_dict())
    second.trainer.load_state_dict(first.trainer.state_dict())
    for owner in (first, second):
        torch.manual_seed(1)
        owner.trainer.prepare(torch.zeros(()), owner.step())
        owner.trainer.learn(owner)
    assert second.trainer.num_steps == steps + 1 and not differs(state(first), state(second))
