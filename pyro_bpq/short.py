"""Short texts: option objects without what has its default value, aligned tables, and short numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any


def short(value: Any) -> str:
    """A dataclass with the options that differ from its defaults, ``AllAction(decay=0.9)``; ``repr`` of all else.

    Args:
        value: The object.
    """
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    shown = []
    for field in fields(value):
        own = getattr(value, field.name, MISSING)
        usual = field.default if field.default_factory is MISSING else field.default_factory()
        if field.init and own is not MISSING and not _is_equal(own, usual):
            shown.append(f"{field.name}={short(own)}")
    return f"{type(value).__name__}({', '.join(shown)})"


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


def number(value: float | None) -> str:
    """Formats a number with three significant digits; very small or large ones get an exponent.

    ``None`` becomes ``-``.
    """
    if value is None:
        return "-"
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
