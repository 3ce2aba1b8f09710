"""Snapshots of an object's attributes, by which a step that fails is undone."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any


def snapshot(part: object) -> dict[str, Any]:
    """The attributes of an object, by name; its collections are copied, not what they hold."""
    own = vars(part).copy()
    for name, value in own.items():
        if isinstance(value, (dict, list, set, deque)):
            own[name] = value.copy()
    return own


def restore(part: object, mark: Mapping[str, Any]) -> None:
    """Takes an object back to a snapshot."""
    vars(part).clear()
    vars(part).update(mark)
