r"""What changes from step to step: options that are functions of the number of steps, and generators of noise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_bpq.errors import OptionError

Schedule = float | Callable[[int], float]


class RecordedStep(int):
    """The number that a step gets while it is recorded: how many steps were taken before it.

    Schedules then give tensors, which are inputs of the recording: a number would be frozen in it.
    """

    value: Callable[[Callable[[int], float], int], Tensor]  # makes such an input

    @staticmethod
    def of(number: int, value: Callable[[Callable[[int], float], int], Tensor]) -> RecordedStep:
        """The number of a step that is recorded."""
        step = RecordedStep(number)
        step.value = value
        return step


def scheduled(schedule: Callable[[int], float], number: int) -> Tensor:
    """What a schedule gives at a step, as a scalar tensor."""
    return torch.tensor(_number(schedule, number), dtype=torch.float64)


def _number(schedule: Callable[[int], float], number: int) -> float:
    found = schedule(number)
    try:
        return float(found)
    except TypeError as error:
        raise OptionError(f"A schedule gave {found!r} at step {number}: {schedule!r} must return a number.") from error


def at(schedule: Schedule | Tensor, number: int) -> float | Tensor:
    """The value of an option at a step.

    Returns:
        A number; a scalar tensor while a step is recorded, if the option is a function.
    """
    if isinstance(schedule, Tensor):
        return schedule
    if not callable(schedule):
        return float(schedule)
    return number.value(schedule, int(number)) if isinstance(number, RecordedStep) else _number(schedule, number)


class NoiseSource:
    """Generators for what an objective draws itself; the global generators are left alone.

    Attributes:
        number: How many there have been.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.number = seed, 0

    def __call__(self) -> torch.Generator:
        """The next generator."""
        self.number += 1
        return torch.Generator().manual_seed(self.seed_of(self.number))

    def seed_of(self, number: int) -> int:
        """Seed of a generator, counted from 1."""
        return (self.seed * 7919 + 1) * 1_000_003 + number
