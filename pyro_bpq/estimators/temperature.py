"""Temperatures: numbers, or functions of the step; and the estimators that have one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm
from pyro_bpq.estimators.requirements import needs_float_value
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


class Attached(Estimator):
    """Base of the estimators whose value carries the gradient. Biased."""

    is_unbiased: ClassVar[bool] = False
    is_pathwise: ClassVar[bool] = True
    attaches: ClassVar[bool] = True

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs values that can carry a gradient."""
        return needs_float_value(type(self).__name__, site)

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Returns a zero term: the value carries the gradient."""
        return SiteTerm(context.score.new_zeros(()))


class Tempered(Estimator):
    """Base of the estimators with a field ``temperature``."""

    temperature: Temperature

    def __post_init__(self) -> None:
        check_temperature(type(self).__name__, self.temperature)

    def at(self, step: int) -> Any:
        """The estimator with the temperature of a step."""
        return replace(self, temperature=temperature_at(self.temperature, step))  # type: ignore[type-var]
