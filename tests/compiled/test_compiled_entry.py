"""When a recording is compared with the programs again; what a step has found out is computed when it is read."""

from __future__ import annotations

import copy
import pickle

from pyro_bpq.compiled.recorder import LastInfo, Recording


def test_recordings_are_compared_after_powers_of_two_and_then_each_thousand_steps() -> None:
    entry, due = object.__new__(Recording), list[int]()
    for entry.steps in range(3100):
        if entry.is_due:
            due.append(entry.steps)
            entry.checked = entry.steps
    assert due == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2024, 3024]


def test_what_a_step_has_found_out_is_computed_when_it_is_read() -> None:
    built: list[int] = []
    info = LastInfo(lambda: built.append(1) or {"z": {"ms": 1}})
    assert copy.copy(info) is not info and not built
    assert info == pickle.loads(pickle.dumps(info)) == {"z": {"ms": 1}} and built == [1]
