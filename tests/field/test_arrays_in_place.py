"""NumPy arrays that are written in place between compiled steps: no step runs with the old numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from steps import coin_guide, recorded_and_eager, seeing, told

READS: dict[str, Callable[[Any], Any]] = {
    "a number": lambda array: float(array[1]),
    "a mean": lambda array: float(array.mean()),
    "a copy": lambda array: torch.tensor(array)[1],
    "a view": lambda array: torch.from_numpy(array)[1],
}
WRITES: dict[str, Callable[[int], bool]] = {
    "once": lambda step: step == 15,
    "now and then": lambda step: step % 20 == 15,
    "in each step": lambda step: step > 15,
}


def losses(read: str, write: str, is_argument: bool) -> tuple[list[float], list[float], str]:
    array = np.zeros(3)

    def mean(z: Any, given: Any = None) -> Any:
        return z + READS[read](array if given is None else given)

    def calls() -> Iterator[tuple[Any, ...]]:
        array.fill(0.0)
        for step in range(50):
            array[:] += WRITES[write](step)
            yield (array,) * is_argument

    return recorded_and_eager(lambda: (seeing(mean), coin_guide, calls()), num_particles=1)


@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", READS)
def test_all_steps_are_those_of_the_present_numbers(read: str, write: str, is_argument: bool) -> None:
    compiled, eager, said = losses(read, write, is_argument)
    assert "Recorded" in said
    assert compiled == pytest.approx(eager, rel=1e-5)


def test_an_array_that_changes_now_and_then_needs_other_recordings() -> None:
    with told() as texts:
        said = losses("a mean", "now and then", False)[2]
    assert said.count("Recorded") == 3 and not texts, said


def test_an_array_that_changes_in_each_step_is_named() -> None:
    with told() as texts:
        losses("a mean", "in each step", False)
    assert len(texts) == 1 and "the numbers of array" in texts[0], texts
