"""Short texts for option objects: what has its default value is left out."""

from __future__ import annotations

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
