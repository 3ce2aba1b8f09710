"""Temperatures: numbers, or functions of the step."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from pyro_bpq.errors import OptionError
from pyro_bpq.rollout.schedule import at

# A positive number, or a function from the number of steps taken to a positive number; a tensor in recorded steps.
Temperature = float | Tensor | Callable[[int], float]


def check_temperature(name: str, temperature: Temperature) -> None:
    """Checks that ``temperature`` is a function or a positive number.

    Raises:
        OptionError: If it is a number that is not positive.
    """
    if isinstance(temperature, Tensor) or callable(temperature):
        return
    if not temperature > 0.0:
        raise OptionError(f"{name}(temperature={temperature!r}): write a positive number or a function of the step.")


def temperature_at(temperature: Temperature, step: int) -> float | Tensor:
    """The temperature at a step; a tensor while a step is recorded, if it is a function.

    Raises:
        OptionError: If it is not positive.
    """
    return at(functools.partial(_checked, temperature) if callable(temperature) else temperature, step)


def _checked(temperature: Callable[[int], float], step: int) -> float:
    value = float(temperature(step))
    if not value > 0.0:
        raise OptionError(f"The temperature at step {step} is {value!r}; it must be positive at every step.")
    return value
