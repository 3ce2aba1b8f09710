"""Aligned tables and short numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pyro_bpq.short import aligned


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
