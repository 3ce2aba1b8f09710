"""Snapshots of objects and dictionaries, by which a step that fails is undone."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any


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
