"""The buffer of rollouts: what it keeps, drops and draws."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch

from pyro_bpq.critics.replay_buffer import ReplayBuffer, StoredRollout
from pyro_bpq.short import restore, snapshot


def stored(number: int) -> StoredRollout:
    network: Any = None
    return StoredRollout(number, network, ({"z": torch.zeros(number, dtype=torch.float64)},), ())


def test_the_most_recent_ones_are_kept() -> None:
    buffer = ReplayBuffer(2)
    assert buffer.draw(3, torch.Generator()) == []
    for number in (1, 2, 3):
        buffer.add(stored(number))
    assert len(buffer) == 2 and buffer.num_dropped == 0
    assert {rollout.key for rollout in buffer.draw(50, torch.Generator().manual_seed(0))} == {2, 3}


def test_what_is_dropped_is_counted_and_can_be_undone() -> None:
    buffer, kept, gone = ReplayBuffer(4), stored(1), stored(2)
    buffer.add(kept)
    buffer.add(gone)
    mark = snapshot(buffer)
    buffer.drop(gone)
    buffer.drop(gone)  # it is no longer there
    assert len(buffer) == 1 and buffer.num_dropped == 1
    restore(buffer, mark)
    assert len(buffer) == 2 and buffer.num_dropped == 0


def test_copies_are_empty() -> None:
    buffer = ReplayBuffer(4)
    buffer.add(stored(1))
    for twin in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        assert len(twin) == 0 and twin.capacity == 4
