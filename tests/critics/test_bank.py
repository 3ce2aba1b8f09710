"""The bank of critics and statistics, rows by site: writes after the step, saving and loading; their optimiser."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from steps import assert_equal, filtered
from torch import Tensor, nn

from pyro_bpq.critics.bank import Block, CriticBank, Selection
from pyro_bpq.critics.learner import CriticLearner, CriticOptimizer
from pyro_bpq.errors import BPQWarning
from pyro_bpq.short import restore, snapshot


class Weight(nn.Module):
    def __init__(self, rows: int, width: int = 3) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(float(rows)).unsqueeze(-1).expand(rows, width).clone())


def make(kind: str = "k", width: int = 3) -> Callable[[tuple[str, ...]], Block]:
    return lambda keys: Block(kind, keys, Weight(len(keys), width), {"mean": torch.zeros(len(keys))})


def select(bank: CriticBank, keys: str, kind: str = "k", width: int = 3) -> Selection:
    return bank.select(kind, tuple(keys), make(kind, width))


def write(bank: CriticBank, selection: Selection, value: list[float]) -> None:
    bank.commit(selection.write("mean", torch.tensor(value)))


@contextlib.contextmanager
def undone(bank: CriticBank) -> Iterator[None]:
    """What happens to a bank within is undone, as after a step that fails."""
    marks = [(part, snapshot(part)) for part in (bank, bank.blocks)]
    yield
    for part, mark in marks:
        restore(part, mark)


def weights(selection: Selection) -> Tensor:
    def read(block: Block, rows: Tensor | None, at: Tensor | None) -> Tensor:
        tensor = block.weights()["w"]
        return tensor if rows is None else tensor[rows]

    return selection.gather(read)


def test_select_builds_only_what_is_missing() -> None:
    bank = CriticBank()
    write(bank, select(bank, "ab"), [1.0, 2.0])
    both = select(bank, "cbad")
    assert len(bank.blocks) == 2
    assert both.read("mean").tolist() == [0.0, 2.0, 1.0, 0.0]
    write(bank, both, [3.0, 4.0, 5.0, 6.0])
    assert select(bank, "abcd").read("mean").tolist() == [5.0, 4.0, 3.0, 6.0]
    # By their rows in the blocks "ab" and "cd".
    assert weights(select(bank, "bda"))[:, 0].tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("kind", [dict.fromkeys, list, set, deque])
def test_snapshots_copy_collections(kind: Any) -> None:
    part = SimpleNamespace(held=kind("ab"))
    mark = snapshot(part)
    part.held.clear()
    restore(part, mark)
    assert part.held == kind("ab")


def test_restore_keeps_rows_that_were_loaded() -> None:
    bank = CriticBank()
    write(bank, select(bank, "ab"), [1.0, 2.0])
    fresh = CriticBank()
    fresh.load_state_dict(bank.state_dict())
    with undone(fresh):
        assert select(fresh, "ab").read("mean").tolist() == [1.0, 2.0]
    assert select(fresh, "ab").read("mean").tolist() == [1.0, 2.0]


def test_rows_of_another_shape_are_not_loaded() -> None:
    bank, fresh = CriticBank(), CriticBank()
    select(bank, "ab", width=3)
    fresh.load_state_dict(bank.state_dict())
    assert weights(select(fresh, "ab", width=4)).shape == (2, 4)


def test_loaded_critics_of_another_kind_are_told() -> None:
    linear, deep = "critic Linear(1, 2) 3 1 4 0", "critic Deep() 3 1 4 0"
    bank, fresh, same = CriticBank(), CriticBank(), CriticBank()
    select(bank, "ab", kind=linear)
    fresh.load_state_dict(bank.state_dict())
    same.load_state_dict(bank.state_dict())
    with filtered("error"):
        # Another number of features, as where a program has grown, other sites, and running statistics.
        select(same, "ab", kind="critic Linear(1, 2) 3 1 5 0")
        select(same, "c", kind=deep)
        select(same, "a", kind="baseline 3")
        select(same, "ab", kind=linear)
    with pytest.warns(BPQWarning, match=r"critics of \['a'\] start anew as Deep\(\): .* has Linear\(1, 2\) there"):
        select(fresh, "a", kind=deep)


def test_names_of_blocks_do_not_depend_on_the_order_of_building() -> None:
    one, other = CriticBank(), CriticBank()
    for bank, kinds in ((one, "xy"), (other, "yx")):
        for kind in kinds:
            select(bank, "ab", kind=kind)
    kinds = [{name: block.kind for name, block in bank.blocks.items()} for bank in (one, other)]
    assert kinds[0] == kinds[1]


def test_runs_of_earlier_versions_can_be_repeated() -> None:
    assert CriticBank(3).generator("k", ("a", "b")).initial_seed() == 141303908929305


def test_selections_stay_bounded() -> None:
    bank = CriticBank()
    for i in range(400):
        bank.select("k", (f"s{i % 20}", f"s{i % 21}"), make())
    assert len(bank._selections) <= 256


# The optimiser of the critics


def bank_of(keys: str) -> CriticBank:
    bank = CriticBank()
    select(bank, keys)
    return bank


def gradients(bank: CriticBank, value: float = 1.0) -> dict[str, Tensor]:
    return {name: torch.full_like(weight, value) for name, weight in bank.weights().items()}


def test_load_state_dict_shares_no_tensor() -> None:
    bank, optimizer = bank_of("ab"), CriticOptimizer(CriticLearner(lr=0.1))
    optimizer.step(bank, gradients(bank))
    before = copy.deepcopy(optimizer.state_dict())
    fresh, twin = CriticOptimizer(CriticLearner(lr=0.1)), copy.deepcopy(bank)
    fresh.load_state_dict(optimizer.state_dict())
    # Neither steps of the saved one nor a step that is undone change what was loaded.
    optimizer.step(bank, gradients(bank))
    mark = snapshot(fresh)
    fresh.step(twin, gradients(twin, 5.0))
    restore(fresh, mark)
    assert_equal(fresh.state_dict(), before)


@pytest.mark.parametrize(("rows", "steps", "speed"), [(100, 0, 1.0), (1, 0, 0.1), (100, 480, 0.25)])
def test_first_step_of_few_samples_or_after_many_steps_is_short(rows: int, steps: int, speed: float) -> None:
    """Adam's first step moves each weight by the rate, whatever its gradient."""
    bank = bank_of("ab")
    (block,) = bank.blocks.values()
    block.register_buffer("rows", torch.tensor([float(rows), 0.0]))
    block.register_buffer("count", torch.tensor([0.0, float(steps)]))
    learner = CriticLearner(max_idle=0)
    (weight,) = bank.weights().values()
    before = weight.detach().clone()
    CriticOptimizer(learner).step(bank, gradients(bank))
    full = learner.make([nn.Parameter(torch.zeros(()))]).param_groups[0]["lr"]
    torch.testing.assert_close(weight.detach(), before - speed * full)
