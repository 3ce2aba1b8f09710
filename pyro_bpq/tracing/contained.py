"""Calls whose looks at values reach the program through their result only."""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from pyro_bpq.tracing.provenance import DependencyTracker

__all__ = ["ContainedCalls"]


class ContainedCalls:
    """Keeps what such a call read in Python to its result.

    A function that is handed a value and looks at it (``edit_distance(z.tolist())``) lets it leave torch. Where
    nothing but the result comes back, that is no reason to make all that happens later depend on it. The result
    depends on what the call read and was given, and on what earlier calls of the same object (a bound method, a
    callable with state) did.

    Args:
        tracker: The active tracker.
    """

    def __init__(self, tracker: DependencyTracker) -> None:
        self._ledger = tracker._ledger
        self._before: list[tuple[int, frozenset[int]]] = []
        self._states: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"ContainedCalls({len(self._before)} open)"

    def open(self) -> None:
        """To be called right before the call."""
        self._before.append((self._ledger.escaped, self._shared()))

    def close(self, function: Any, args: tuple[Any, ...], result: Tensor) -> None:
        """To be called right after it; ``result`` must own its memory."""
        ledger, (before, shared) = self._ledger, self._before.pop()
        mask = ledger.escaped & ~before | ledger.mask([arg for arg in args if isinstance(arg, (Tensor, list, tuple))])
        owner = _owner(function)
        if owner is not None:
            mask |= self._states.get(id(owner), 0)
            self._states[id(owner)] = mask
        ledger.escaped = before
        for key in self._shared() - shared:
            # Memory that only the call looks at from outside of torch.
            ledger.entries[key].shared = False
        ledger.taint(result, mask)

    def _shared(self) -> frozenset[int]:
        return frozenset(key for key, entry in self._ledger.entries.items() if entry.shared)


def _owner(function: Any) -> Any:
    """The object that may keep something from call to call, or ``None``."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, ModuleType):
        return None if isinstance(function, (FunctionType, BuiltinFunctionType, type)) else function
    return owner
