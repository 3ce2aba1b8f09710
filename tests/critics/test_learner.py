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


def test_step_moves_against_the_gradient() -> None:
    bank = bank_of("k")
    sgd().step(bank, gradients(bank))
    (weight,) = bank.weights().values()
    assert weight.tolist() == [[-0.5] * 3] * 2
    assert weight.grad is None


def test_step_leaves_other_blocks_alone() -> None:
    bank, optimizer = bank_of("k", "l"), sgd()
    first, second = bank.weights()
    optimizer.step(bank, {first: torch.ones(2, 3)})
    assert bank.weights()[first].any() and not bank.weights()[second].any()


def test_step_ignores_blocks_that_are_gone() -> None:
    bank = bank_of("k")
    sgd().step(bank, {"gone.critic.w": torch.ones(1)})
    assert not next(iter(bank.weights().values())).any()


def test_clip_limits_each_critic_on_its_own() -> None:
    bank = bank_of("k")
    name = next(iter(bank.weights()))
    sgd(1.0, clip=1.0).step(bank, {name: torch.tensor([[3.0, 4.0, 0.0], [0.3, 0.0, 0.4]])})
    torch.testing.assert_close(bank.weights()[name], torch.tensor([[-0.6, -0.8, 0.0], [-0.3, 0.0, -0.4]]))


def test_state_dict_continues() -> None:
    bank, optimizer = bank_of("k"), CriticOptimizer(CriticLearner(lr=0.1))
    for value in (1.0, -2.0, 0.5):
        optimizer.step(bank, gradients(bank, value))
    twin, fresh = copy.deepcopy(bank), CriticOptimizer(CriticLearner(lr=0.1))
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.state_dict().keys() == optimizer.state_dict().keys()  # kept until the block is first stepped
    for value in (3.0, 0.2):
        optimizer.step(bank, gradients(bank, value))
        fresh.step(twin, gradients(twin, value))
        assert torch.equal(next(iter(bank.weights().values())), next(iter(twin.weights().values())))


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


def test_step_goes_on_after_a_move_to_another_dtype() -> None:
    bank, optimizer = bank_of("k"), CriticOptimizer(CriticLearner(lr=0.1))
    optimizer.step(bank, gradients(bank))
    bank.to(torch.float32)
    optimizer.step(bank, gradients(bank))
    (weight,) = bank.weights().values()
    assert weight.dtype == torch.float32
    (state,) = optimizer.state_dict().values()
    assert state["state"][0]["n"] == 2 and state["state"][0]["x"].dtype == torch.float32


def test_forget_drops_an_optimiser() -> None:
    bank, optimizer = bank_of("k"), CriticOptimizer(CriticLearner(lr=0.1))
    optimizer.step(bank, gradients(bank))
    optimizer.forget(["unknown", *optimizer.state_dict()])
    assert optimizer.state_dict() == {}


def test_make_gives_averaged_adam() -> None:
    made = CriticLearner(lr=0.3).make([torch.zeros(1, requires_grad=True)])
    assert isinstance(made, AveragedAdam) and made.param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize("lr", [0.0, -1.0])
def test_learner_refuses_a_rate_that_is_not_positive(lr: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        CriticLearner(lr=lr)
