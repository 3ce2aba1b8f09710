"""Keeps track of calls that read values in Python and affect the program only through their result."""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from pyro_bpq.tracing.provenance import DependencyTracker


class ContainedCalls:
    """Makes only the result of a call depend on the values that the call read in Python.

    A function may read a value in Python (``edit_distance(z.tolist())``). The value then leaves torch. If the call
    gives back nothing but its result, later computations need not depend on the value. The result depends on the
    values that the call read, on its arguments, and on the sources of earlier calls of the same object (a bound
    method, a callable with state).
    """

    def __init__(self, tracker: DependencyTracker) -> None:
        self._ledger = tracker._ledger
        self._before: list[tuple[int, frozenset[int]]] = []
        self._states: dict[int, int] = {}

    def open(self) -> None:
        """Call it right before the function runs."""
        self._before.append((self._ledger.escaped, self._shared()))

    def close(self, function: Any, args: tuple[Any, ...], result: Tensor) -> None:
        """Call it right after the function runs; ``result`` must own its memory."""
        ledger, (before, shared) = self._ledger, self._before.pop()
        mask = ledger.escaped & ~before | ledger.mask([arg for arg in args if isinstance(arg, (Tensor, list, tuple))])
        owner = _owner(function)
        if owner is not None:
            mask |= self._states.get(id(owner), 0)
            self._states[id(owner)] = mask
        ledger.escaped = before
        for key in self._shared() - shared:
            # Only this call saw the memory from outside torch.
            ledger.entries[key].shared = False
        ledger.taint(result, mask)

    def _shared(self) -> frozenset[int]:
        return frozenset(key for key, entry in self._ledger.entries.items() if entry.shared)


def _owner(function: Any) -> Any:
    """Returns the object that may keep state between calls, or ``None``."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, ModuleType):
        return None if isinstance(function, (FunctionType, BuiltinFunctionType, type)) else function
    return owner
