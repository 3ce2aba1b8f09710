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

    def holds(self) -> bool:
        """Whether it is still there."""
        return self.container.get(self.key) is self.value


def tensors_of(places: Iterable[Place]) -> tuple[Tensor, ...]:
    """The tensors at some places."""
    return tuple(place.value for place in places if isinstance(place.value, Tensor))
