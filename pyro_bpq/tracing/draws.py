r"""What a step has drawn from the global generator, and taking it back to run once more with the same draws."""

from __future__ import annotations

from typing import Any

import torch
from pyro.poutine.runtime import effectful

__all__ = ["MARK", "REWIND", "Draws"]

# Types of the messages by which handlers that draw in place of the generator learn of a mark, and of going back to it.
MARK, REWIND = "bpq_mark", "bpq_rewind"


class Draws:
    """Marks where the global generator of the CPU is."""

    def __init__(self) -> None:
        self._state, self._mark = torch.get_rng_state(), _mark()

    def __repr__(self) -> str:
        return f"Draws(mark={self._mark!r})"

    def again(self) -> None:
        """Goes back to the mark: what is drawn from now on is what has been drawn since."""
        torch.set_rng_state(self._state)
        _rewind(self._mark)


@effectful(type=MARK)
def _mark() -> Any:
    return None


@effectful(type=REWIND)
def _rewind(mark: Any) -> Any:
    return None
