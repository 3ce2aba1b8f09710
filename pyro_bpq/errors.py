"""Exceptions and warnings whose text names the site and says what to write instead.

Every exception is also a subclass of what Pyro raises in the same situation, so that code written
against Pyro's ELBOs keeps catching it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from numbers import Integral, Real
from typing import Any

__all__ = [
    "BPQError",
    "BPQWarning",
    "BusyError",
    "CriticShapeError",
    "GraphError",
    "OptionError",
    "PlateError",
    "SiteNotFoundError",
    "StructureChangedError",
    "UnsupportedProgramError",
    "UnsupportedSiteError",
]


class BPQError(Exception):
    """Base class of all errors raised by pyro_bpq."""


class OptionError(BPQError, ValueError):
    """An option has an unknown name or a value outside its range."""


class TooManyOutcomesError(OptionError):
    """A program has more joint outcomes than :mod:`pyro_bpq.testing` may run through."""


class GraphError(BPQError, ValueError):
    """A stochastic computation graph is malformed (a cycle, an unknown parent, a duplicate name)."""


class SiteNotFoundError(BPQError, KeyError):
    """A latent site of the model has no counterpart in the guide, or a queried site does not exist."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which would print "\n" literally.
        return str(self.args[0]) if self.args else ""


class UnsupportedSiteError(BPQError, NotImplementedError, ValueError):
    """An estimator or a critic cannot serve a site."""

    def at(self, *sites: str) -> UnsupportedSiteError:
        """The error with the names of its sites in front, if its text does not name one of them.

        Args:
            *sites: Names of the sites.
        """
        if any(repr(site) in str(self) for site in sites):
            return self
        return type(self)(f"Site {', '.join(map(repr, sites))}: {self}")


class UnsupportedProgramError(BPQError, NotImplementedError):
    """A program uses a feature for which no right gradient can be given."""


class ParticlesDifferError(UnsupportedProgramError):
    """Particles in one call do not cost what each costs on its own."""


class Unrecordable(UnsupportedProgramError):
    """A step cannot be recorded; the text is the end of a sentence that says why."""


class PlateError(BPQError, ValueError):
    """Plates or shapes of a site do not fit together."""


class CriticShapeError(BPQError, ValueError):
    """A critic returned a tensor of the wrong shape."""


class StructureChangedError(BPQError, RuntimeError):
    """A program, or a step, is not deterministic given its draws."""


class BusyError(BPQError, RuntimeError):
    """An objective is in use in another thread."""


class BPQWarning(UserWarning):
    """Base class of all warnings issued by pyro_bpq."""


def warn(text: str) -> None:
    """Warns whoever has called the function that calls this one."""
    warnings.warn(text, BPQWarning, stacklevel=3)


def check_choice(option: str, value: object, allowed: Sequence[str]) -> None:
    """Raises an OptionError if an option has none of its values."""
    if value not in allowed:
        raise OptionError(f"{option}={value!r} is unknown; write one of {', '.join(map(repr, allowed))}.")


def check_option(owner: object, name: str, is_valid: bool, advice: str) -> None:
    """Raises an OptionError that says what to write for the field ``name`` of ``owner``, unless it is valid."""
    if not is_valid:
        raise OptionError(f"{type(owner).__name__}({name}={getattr(owner, name)!r}): write {advice}.")


def option(default: Any, is_valid: Callable[[Any], bool], advice: str) -> Any:
    """A field of a :class:`Checked` dataclass with a condition on its value; ``advice`` says what to write."""
    return field(default=default, metadata={"check": (is_valid, advice)})


def positive(default: float) -> Any:
    """An option: a number above 0."""
    return option(default, lambda number: number > 0, "a positive number")


def whole(default: int, least: int = 1) -> Any:
    """An option: a whole number of at least ``least``."""
    return option(default, lambda number: is_whole(number, least), f"a whole number of at least {least}")


def optional(kind: type, example: str, default: Any = None) -> Any:
    """An option: an object of a kind or ``None``."""
    return option(default, lambda value: value is None or isinstance(value, kind), f"{example} or None")


def one_of(default: str, *others: str) -> Any:
    """An option: one of some words."""
    words = (default, *others)
    return option(default, lambda word: word in words, f"one of {', '.join(map(repr, words))}")


class Checked:
    """Base of dataclasses that raise an OptionError if an :func:`option` of theirs is out of range."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            if "check" in item.metadata:
                is_valid, advice = item.metadata["check"]
                check_option(self, item.name, is_valid(getattr(self, item.name)), advice)


def check_whole(owner: object, name: str, least: int) -> None:
    """Raises an OptionError if the field ``name`` of ``owner`` is not a whole number of at least ``least``."""
    check_option(owner, name, is_whole(getattr(owner, name), least), f"a whole number of at least {least}")


def check_hidden(owner: object, least: int = 0, name: str = "hidden") -> None:
    """Turns a number in a field into a tuple, and checks that it holds at least ``least`` layer sizes."""
    if isinstance(getattr(owner, name), int):
        object.__setattr__(owner, name, (getattr(owner, name),))
    sizes = getattr(owner, name)
    # A list has no hash, which a critic needs.
    is_valid = isinstance(sizes, tuple) and len(sizes) >= least and all(isinstance(h, int) and h > 0 for h in sizes)
    check_option(owner, name, is_valid, "a tuple of positive layer sizes, e.g. (32,)")


def is_real(value: object) -> bool:
    """Whether something is a real number: of Python or of NumPy."""
    return isinstance(value, Real)


def is_whole(value: object, least: float = -math.inf) -> bool:
    """Whether something is a whole number, of Python or of NumPy, of at least ``least``."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
