"""Temperatures: numbers, or functions of the step."""

from __future__ import annotations

from collections.abc import Callable

from pyro_bpq.errors import OptionError

__all__ = ["Temperature", "check_temperature", "temperature_at"]

# A positive number, or a function from the number of steps taken to a positive number.
Temperature = float | Callable[[int], float]


def check_temperature(name: str, temperature: Temperature) -> None:
    """Checks that ``temperature`` is a function or a positive number.

    Raises:
        OptionError: If it is a number that is not positive.
    """
    if not callable(temperature) and not temperature > 0.0:
        raise OptionError(f"{name}(temperature={temperature!r}): write a positive number or a function of the step.")


def temperature_at(temperature: Temperature, step: int) -> float:
    """The temperature at a step.

    Raises:
        OptionError: If it is not positive.
    """
    value = float(temperature(step)) if callable(temperature) else float(temperature)
    if not value > 0.0:
        raise OptionError(f"The temperature at step {step} is {value!r}; it must be positive at every step.")
    return value
