"""When a recording is compared with the programs again."""

from __future__ import annotations

from typing import Any

from pyro_bpq.compiled.entry import Entry


def entry(steps: int) -> Entry:
    nothing: Any = None
    return Entry(nothing, lambda: (), steps=steps)


def test_recordings_are_compared_after_powers_of_two_and_then_each_thousand_steps() -> None:
    due = [steps for steps in range(3001) if entry(steps).is_due]
    assert due == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 3000]


def test_steps_in_doubt_are_those_since_the_last_comparison() -> None:
    due = [0, *(steps for steps in range(2001) if entry(steps).is_due)]
    for steps in (1, 2, 3, 4, 7, 8, 9, 512, 513, 999, 1000):
        assert entry(steps).steps_in_doubt == steps - max(at for at in due if at < steps)
    assert entry(0).steps_in_doubt == 0
