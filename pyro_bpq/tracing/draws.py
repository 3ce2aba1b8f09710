r"""Rewinds the global generator to a mark, so that a step can run again with the same draws."""

from __future__ import annotations

from typing import Any

import torch
from pyro.poutine.runtime import effectful

# Types of the messages that announce a mark, and a return to it, to handlers that draw in place of the generator.
MARK, REWIND = "bpq_mark", "bpq_rewind"


class Draws:
    """Marks the current state of the global generator of the CPU."""

    def __init__(self) -> None:
        self._state, self._mark = torch.get_rng_state(), _mark()

    def again(self) -> None:
        """Goes back to the mark: the draws since the mark are repeated from now on."""
        torch.set_rng_state(self._state)
        _rewind(self._mark)


@effectful(type=MARK)
def _mark() -> Any:
    return None


@effectful(type=REWIND)
def _rewind(mark: Any) -> Any:
    return None
