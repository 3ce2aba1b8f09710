"""The optimiser of the critics."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pyro_bpq.critics.bank import Block, CriticBank
from pyro_bpq.critics.learner import AveragedAdam, CriticLearner, CriticOptimizer


def bank_of(*kinds: str, rows: int = 2) -> CriticBank:
    bank = CriticBank()
    for kind in kinds:
        bank.select(kind, tuple("ab"[:rows]), lambda keys, kind=kind: Block(kind, keys, _Weight(len(keys))))
    return bank


class _Weight(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(rows, 3))


def gradients(bank: CriticBank, value: float = 1.0) -> dict[str, Tensor]:
    return {name: torch.full_like(weight, value) for name, weight in bank.weights().items()}


def sgd(learner_lr: float = 0.5, **options: float) -> CriticOptimizer:
    return CriticOptimizer(CriticLearner(lr=learner_lr, optimizer=torch.optim.SGD, **options))  # type: ignore[arg-type]


def test_step_leaves_other_blocks_alone() -> None:
    bank, optimizer = bank_of("k", "l"), sgd()
    first, second = bank.weights()
    optimizer.step(bank, {first: torch.ones(2, 3)})
    assert bank.weights()[first].any() and not bank.weights()[second].any()


def test_load_state_dict_shares_no_tensor() -> None:
    bank, optimizer = bank_of("k"), CriticOptimizer(CriticLearner(lr=0.1))
    optimizer.step(bank, gradients(bank))
    before = copy.deepcopy(optimizer.state_dict())
    fresh, twin = CriticOptimizer(CriticLearner(lr=0.1)), copy.deepcopy(bank)
    fresh.load_state_dict(optimizer.state_dict())
    fresh.step(twin, gradients(twin, 5.0))
    after = optimizer.state_dict()
    for key, state in before.items():
        assert torch.equal(state["state"][0]["x"], after[key]["state"][0]["x"])


@pytest.mark.parametrize(("rows", "steps", "speed"), [(100, 0, 1.0), (1, 0, 0.1), (100, 480, 0.25)])
def test_first_step_of_few_samples_or_after_many_steps_is_short(rows: int, steps: int, speed: float) -> None:
    """Adam's first step moves each weight by the rate, whatever its gradient."""
    bank = bank_of("k")
    (block,) = bank.blocks.values()
    block.register_buffer("rows", torch.tensor([float(rows), 0.0]))
    block.register_buffer("count", torch.tensor([0.0, float(steps)]))
    learner = CriticLearner(max_idle=0)
    CriticOptimizer(learner).step(bank, gradients(bank))
    full = learner.make([nn.Parameter(torch.zeros(()))]).param_groups[0]["lr"]
    torch.testing.assert_close(next(iter(bank.weights().values())), torch.full((2, 3), -speed * full))


def test_make_gives_averaged_adam() -> None:
    made = CriticLearner(lr=0.3).make([torch.zeros(1, requires_grad=True)])
    assert isinstance(made, AveragedAdam) and made.param_groups[0]["lr"] == 0.3
