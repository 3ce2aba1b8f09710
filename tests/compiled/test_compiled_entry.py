"""When a recording is compared with the programs again; what a step has found out is computed when it is read."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from pyro_bpq.compiled.entry import Entry, LastInfo


def test_recordings_are_compared_after_powers_of_two_and_then_each_thousand_steps() -> None:
    nothing: Any = None
    entry, due = Entry(nothing, lambda: ()), []
    for entry.steps in range(3100):
        if entry.is_due:
            due.append(entry.steps)
            entry.checked = entry.steps
    assert due == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2024, 3024]


def test_what_a_step_has_found_out_is_a_mapping_once_it_is_read() -> None:
    built = []

    def build() -> dict[str, dict[str, int]]:
        built.append(1)
        return {"z": {"ms": 1}}

    info = LastInfo(build)
    assert not built
    assert info == {"z": {"ms": 1}} == copy.copy(LastInfo(build)) == pickle.loads(pickle.dumps(info))
    assert list(info) == ["z"] and len(info) == 1 and repr(info) == "{'z': {'ms': 1}}" and len(built) == 2
