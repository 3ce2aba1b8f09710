"""What critics see, and their regression, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyro_bpq.critics.bank import Block, CriticBank, Selection
from pyro_bpq.step.critic_step import standardised
from pyro_bpq.step.learning import CriticRows, regression

NAMES = {"mean": 0.0, "spread_level": 1.0, "spread_advantage": 1.0, "rows": 1.0}


def selected(bank: CriticBank, **buffers: Tensor) -> Selection:
    """The row of a single critic, whose block has these buffers."""
    found = bank.select("k", ("a",), lambda keys: Block("k", keys, None, buffers).double())
    assert found is not None
    return found


def rows(bank: CriticBank, count: float, unit: float = 1.0) -> CriticRows:
    """One critic that has seen ``count`` steps."""
    buffers = {name: torch.tensor([number]) for name, number in {**NAMES, "count": count}.items()}
    return CriticRows(("a",), selected(bank, **buffers), torch.tensor([unit]).reshape(1, 1, 1))


def test_features_are_in_units_of_their_earlier_spread() -> None:
    bank = CriticBank()
    # Mean 1 and spread 2; the second feature has never varied.
    moments = {"context_mean": torch.tensor([[1.0, 5.0]]), "context_square": torch.tensor([[5.0, 25.0]])}
    selection = selected(bank, **moments, count=torch.ones(1))
    context = torch.tensor([[[3.0, 5.0], [-1.0, 9.0]]])
    found, writes = standardised(context, selection)
    torch.testing.assert_close(found, torch.tensor([[[1.0, 0.0], [-1.0, 6.0]]]))
    bank.commit(writes)
    # This step enters the moments of the next one only.
    mean = selection.read("context_mean")
    assert 1.0 == float(mean[0, 0]) and 5.0 < float(mean[0, 1]) < 7.0


def test_first_step_sets_the_statistics_and_teaches_nothing() -> None:
    bank = CriticBank()
    critic = rows(bank, 0.0)
    target = torch.tensor([[[1.0, 2.0, 6.0]]])
    loss, writes, found = regression(critic, torch.zeros_like(target), target, 1.0)
    bank.commit(writes)
    assert float(loss) == 0.0 and float(found["td_loss"]) > 0.0
    torch.testing.assert_close(critic.selection.read("mean"), torch.tensor([3.0]))
    # The spread around that mean: (4 + 1 + 9) / 3.
    spread = torch.tensor([(14.0 / 3.0) ** 0.5])
    torch.testing.assert_close(critic.selection.read("spread_advantage"), spread)
    torch.testing.assert_close(critic.selection.read("spread_level"), spread)
    assert critic.selection.read("count").tolist() == [1.0]


def test_differences_between_particles_count_beside_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_bpq.step.learning.DECAY", 0.0)
    # Targets 1 and 3 of one row; the critic says 0 and 1. Errors: -1 and -2, their mean -1.5, around it ±0.5.
    target, value = torch.tensor([[[1.0], [3.0]]]), torch.tensor([[[0.0], [1.0]]])
    for weight in (0.0, 0.3):
        critic = rows(CriticBank(), 5.0)
        loss, *_ = regression(critic, value, target, weight)
        # The targets' spread within the row is 1 + 1 = 2 squared; their mean is the running one, and a level moves no
        # less than its differences do.
        inner, level = (0.25 + 0.25) / 2.0, 2.25 / 2.0
        torch.testing.assert_close(loss, torch.tensor(inner + weight * level))


def test_targets_are_in_units_of_the_site() -> None:
    target, value = torch.tensor([[[1.0, 4.0, 5.0]]]), torch.tensor([[[2.0, 0.0, 1.0]]])
    plain, *_ = regression(rows(CriticBank(), 5.0), value, target, 1.0)
    scaled, *_ = regression(rows(CriticBank(), 5.0, unit=10.0), 10.0 * value, 10.0 * target, 1.0)
    torch.testing.assert_close(plain, scaled)


def test_rows_that_are_not_chosen_do_not_learn() -> None:
    target = torch.tensor([[[1.0, 4.0]]])
    loss, *_ = regression(rows(CriticBank(), 5.0), torch.zeros_like(target), target, 1.0, chosen=torch.zeros(1))
    assert float(loss) == 0.0
