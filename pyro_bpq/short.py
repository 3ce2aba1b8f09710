"""Short texts, of options, tables and numbers, and snapshots: small things that import nothing."""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, NoReturn, TypeVar

from pyro_bpq.errors import BPQError

T = TypeVar("T")
K = TypeVar("K")


class Pending:
    """Stands for what only a step makes: it is false, prints what to do, and whatever is asked of it raises that.

    Args:
        what: What it stands for.
    """

    def __init__(self, what: str) -> None:
        self._text = f"There is no {what} yet: take a step first, e.g. svi.step(...)."

    def __repr__(self) -> str:
        return self._text

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> NoReturn:
        # Copies, pickles and notebooks ask for names that may be missing.
        raise (AttributeError(name) if name.startswith("_") else BPQError(self._text))


def short(value: Any) -> str:
    """A dataclass with the options that differ from its defaults, ``AllAction(decay=0.9)``; ``repr`` of all else.

    A function is its name.

    Args:
        value: The object.
    """
    if inspect.isfunction(value):
        return value.__name__
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    shown = []
    for field in fields(value):
        own = getattr(value, field.name, MISSING)
        usual = field.default if field.default_factory is MISSING else field.default_factory()
        if field.init and own is not MISSING and not _is_equal(own, usual):
            shown.append(f"{field.name}={short(own)}")
    return f"{type(value).__name__}({', '.join(shown)})"


def changed_options(usual: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, str]:
    """The options that differ from their default values, by name: ``lam=0.5``.

    Args:
        usual: What has the options, with their default values.
        given: The options by name; other names do not count.
    """
    options = inspect.signature(usual).parameters.values()
    return {o.name: f"{o.name}={short(given[o.name])}" for o in options if not _is_equal(given[o.name], o.default)}


def listed(names: Sequence[str]) -> str:
    """Names of sites, of many the first and the last one: ``z0 to z11, 12 sites``."""
    return f"{names[0]} to {names[-1]}, {len(names)} sites" if len(names) > 3 else ", ".join(names)


def alike(pairs: Iterable[tuple[T, K]]) -> dict[K, list[T]]:
    """The things that have the same text, or another mark, together."""
    found: dict[K, list[T]] = {}
    for thing, mark in pairs:
        found.setdefault(mark, []).append(thing)
    return found


def _is_equal(own: Any, usual: Any) -> bool:
    try:
        return bool(own == usual)
    except (RuntimeError, ValueError):  # tensors
        return own is usual


def aligned(rows: Sequence[Sequence[str]], pad: Callable[[str, int], str] = str.ljust) -> list[str]:
    """The lines of a table.

    Args:
        rows: The cells of each row.
        pad: Fills a cell up to the width of its column, in all columns but the first, which is left-aligned.
    """
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return ["  ".join([row[0].ljust(first), *map(pad, row[1:], others)]).rstrip() for row in rows]


def number(value: float) -> str:
    """Formats a number with three significant digits; very small or large ones get an exponent."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        return f"{value:.{digits}f}"
    return f"{value:.2e}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; the first column is left-aligned, the others are right-aligned."""
    rule = ["-" * max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return aligned([head, rule, *rows], str.rjust)


# Snapshots of objects and dictionaries, by which a step that fails is undone.


def snapshot(part: Any) -> dict[Any, Any]:
    """The items of a dictionary; or the attributes of an object, whose collections are copied, not what they hold."""
    own = part if isinstance(part, dict) else vars(part)
    kinds = () if own is part else (dict, list, set, deque)
    return {name: value.copy() if isinstance(value, kinds) else value for name, value in own.items()}


def restore(part: Any, mark: Mapping[Any, Any]) -> None:
    """Takes an object or a dictionary back to a snapshot."""
    own = part if isinstance(part, dict) else vars(part)
    own.clear()
    own.update(mark)
