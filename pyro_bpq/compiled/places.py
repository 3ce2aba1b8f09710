r"""Where a recording found something that has to be there still."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Place:
    """Where a recording found something that has to be there still.

    Args:
        container: What holds it.
        key: Under which key.
        value: What it is.
    """

    container: MutableMapping[Any, Any]
    key: Any
    value: Any


def all_hold(places: Iterable[Place]) -> bool:
    """Whether everything is still at its place."""
    for place in places:
        # Called in every step: neither a generator nor another call.
        if place.container.get(place.key) is not place.value:
            return False
    return True


def tensors_of(places: Iterable[Place]) -> tuple[Tensor, ...]:
    """The tensors at some places."""
    return tuple(place.value for place in places if isinstance(place.value, Tensor))
