r"""Finds the single element of a source that each element of a tensor depends on.

Most programs treat the components of a value alike and keep them apart: by elementwise operators, views, ``cat``,
``stack``, products with one-hot rows. This module follows components through such operators. The answer is a superset
of the dependencies. Every operator that is not known to keep elements apart mixes all of them. So does a gather by
positions that may differ in the next run.

The records are kept per slot of memory. So views need no rules, and a write into a view also shows in its base.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bpq.tracing.element_rules import NONE, SHAPING, Positions, Unknown, plan_of, tensors_in
from pyro_bpq.tracing.ledger import NO_STORAGE, Ledger, OperatorMode, memory_of


class ElementTracker(OperatorMode):
    """Follows elements of sources through the operators of a program, in an active ``DependencyTracker``.

    What is followed has a key: the name of a source for its elements, a tuple of plates for their rows.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        # For each key: the bits of its sources and of those drawn from them.
        self._followed: dict[Hashable, int] = {}
        self._slots: dict[Hashable, dict[int, _Slots]] = {}

    @property
    def followed(self) -> tuple[str, ...]:
        """Names of the sources whose elements are followed."""
        return tuple(key for key in self._followed if isinstance(key, str))

    def follow(self, key: Hashable, name: str, value: Tensor, positions: Positions) -> None:
        """Follows a source of the ledger, starting from the element or row number of each element of its value."""
        self._followed[key] = self._followed.get(key, 0) | self._ledger.bits[name]
        self._slots.setdefault(key, {})
        self._record(key, value, positions)

    def inherit(self, name: str, value: Tensor, drawn_from: int, positions: Mapping[str, Positions | None]) -> None:
        """Records the elements that a new source was drawn from; its dependents then depend on them too.

        ``drawn_from`` are the sources, as bits, that its distribution depends on. ``positions`` are, for each followed
        source, the element that each element of the value depends on; ``None`` if unknown.
        """
        for source, found in positions.items():
            if drawn_from & self._followed[source]:
                self._followed[source] |= self._ledger.bits[name]
                if found is not None:
                    self._record(source, value, found)

    def mixes(self, name: str) -> bool:
        """Whether a source, or one drawn from it, has left torch: anything may then depend on any element."""
        return bool(self._ledger.escaped & self._followed[name])

    def positions(self, key: Hashable, tensor: Tensor) -> Positions | None:
        """The element that each element of a tensor depends on (or ``NONE``, or ``MANY``); ``None`` if unknown."""
        if not self._ledger.mask(tensor) & self._followed[key]:
            return np.broadcast_to(np.int32(NONE), tuple(tensor.shape))
        slots = self._find(key, tensor)
        return None if slots is None else slots.view(tensor)

    def _known(self, key: Hashable, tensor: Tensor) -> Positions:
        positions = self.positions(key, tensor)
        if positions is None:
            raise Unknown
        return positions

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = self._mask([*kwargs.values()]) if self._followed else 0
        mask = named | self._mask(args) if self._followed else 0
        keys = [key for key, bits in self._followed.items() if mask & bits]
        plan = plan_of(func) if keys else None
        if plan is None or plan.is_view:
            return func(*args, **kwargs)
        found = {}
        shaping = {name: kwargs[name] for name in SHAPING & kwargs.keys()}
        for key in keys:
            # Rules see no tensors that are given by name.
            if named & self._followed[key]:
                continue
            with contextlib.suppress(Unknown, ValueError, IndexError, TypeError, ArithmeticError, *NO_STORAGE):
                rule = plan.rule if isinstance(key, str) else plan.row_rule
                found[key] = rule(partial(self._known, key), *args, **shaping)
        targets = [kwargs.get(name) if isinstance(name, str) else args[name] for name in plan.writes]
        written = self._mask(targets)
        result = func(*args, **kwargs)
        for key in keys:
            if targets:
                self._write(key, targets, found.get(key), not written & self._followed[key])
            elif key in found:
                self._keep(key, result, found[key])
        return result

    def _keep(self, key: Hashable, result: Any, found: Positions) -> None:
        """Records the positions of a result in new memory. Without a record it counts as mixed."""
        for part in result if isinstance(result, tuple) else (result,):
            if isinstance(part, Tensor) and found.shape == part.shape and self._find(key, part) is None:
                self._record(key, part, found)

    def _write(self, key: Hashable, targets: Sequence[Any], found: Positions | None, is_clean: bool) -> None:
        """Records the positions of what an operator wrote into tensors that were free of the sources if clean."""
        for target in tensors_in(targets):
            slots = self._find(key, target)
            if found is None or not _fits(found.shape, tuple(target.shape)):
                for memory in memory_of(target):
                    self._slots[key].pop(id(memory), None)
            elif slots is not None:
                slots.view(target)[...] = found
            elif is_clean:
                self._record(key, target, np.broadcast_to(found, tuple(target.shape)))

    def _mask(self, args: Sequence[Any]) -> int:
        return reduce(lambda mask, tensor: mask | self._ledger.mask(tensor), tensors_in(args), 0)

    def _find(self, key: Hashable, tensor: Tensor) -> _Slots | None:
        memory = memory_of(tensor)
        slots = self._slots[key].get(id(memory[0])) if len(memory) == 1 else None
        return slots if slots is not None and slots.fits(tensor, memory[0]) else None

    def _record(self, key: Hashable, tensor: Tensor, positions: Positions) -> None:
        memory = memory_of(tensor)
        if len(memory) != 1 or tensor.layout is not torch.strided:
            return
        known = self._slots[key]
        slots = _Slots(memory[0], lambda ref: known.pop(ref.key, None))
        slots.key, slots.itemsize = id(memory[0]), tensor.element_size()
        slots.array = np.full(memory[0].nbytes() // slots.itemsize, NONE, dtype=np.int32)
        slots.view(tensor)[...] = positions
        known[slots.key] = slots


def _fits(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a shape can be broadcast to another one."""
    return len(shape) <= len(target) and all(
        own in (1, size) for own, size in zip(reversed(shape), reversed(target), strict=False)
    )


class _Slots(weakref.ref[torch.UntypedStorage]):
    """Positions of every element of one storage; the record vanishes with the storage."""

    key: int
    itemsize: int
    array: Positions

    def fits(self, tensor: Tensor, memory: torch.UntypedStorage) -> bool:
        """Whether a tensor divides the storage into the same slots as the record."""
        return tensor.element_size() == self.itemsize and memory.nbytes() // self.itemsize == len(self.array)

    def view(self, tensor: Tensor) -> Positions:
        """Returns the slots of a tensor as a writable view."""
        with torch._C.DisableTorchFunction():  # the offset may reveal the value that chose the view
            offset = tensor.storage_offset()
        strides = tuple(stride * self.array.itemsize for stride in tensor.stride())
        return np.lib.stride_tricks.as_strided(self.array[offset:], tuple(tensor.shape), strides)
