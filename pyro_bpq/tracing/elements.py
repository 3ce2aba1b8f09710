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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_bpq.tracing.ledger import NO_STORAGE, Ledger, memory_of

NONE, MANY = -1, -2
"""``NONE``: depends on no element of the source. ``MANY``: depends on several, or on an unknown one."""

Positions = np.ndarray
# Returns the positions of an argument, or None if they are unknown.
_Find = Callable[[Any], Positions | None]


class ElementTracker(TorchDispatchMode):
    """Follows elements of sources through the operators of a program, in an active ``DependencyTracker``."""

    supports_higher_order_operators = True

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger
        # For each source: its bit and those of sources drawn from it. Rows of plates are keyed by the plates.
        self._followed: dict[Hashable, int] = {}
        self._slots: dict[Hashable, dict[int, _Slots]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @property
    def followed(self) -> tuple[str, ...]:
        """Names of the sources whose elements are followed."""
        return tuple(name for name in self._followed if isinstance(name, str))

    def follow(self, name: str, value: Tensor, positions: Positions) -> None:
        """Follows the elements of a source of the ledger, starting from its value.

        Args:
            name: The source.
            value: Value of the source.
            positions: Number of each element, in the shape of the value.
        """
        self._followed[name] = self._ledger.bits[name]
        self._slots[name] = {}
        self._record(name, value, positions)

    def follow_rows(self, plates: Hashable, name: str, value: Tensor, rows: Positions) -> None:
        """Follows the rows of a source in plates; all sources in the same plates count as one.

        Args:
            plates: The plates, as a key that is not a string.
            name: The source.
            value: Value of the source.
            rows: Row number of each element, in the shape of the value.
        """
        self._followed[plates] = self._followed.get(plates, 0) | self._ledger.bits[name]
        self._slots.setdefault(plates, {})
        self._record(plates, value, rows)

    def inherit(self, name: str, value: Tensor, drawn_from: int, positions: Mapping[str, Positions | None]) -> None:
        """Records the elements that a new source was drawn from; its dependents then depend on them too.

        Args:
            name: The new source.
            value: Value of the new source.
            drawn_from: The sources that its distribution depends on, as bits.
            positions: For each followed source, the element that each element of the value depends on; ``None``
                if unknown.
        """
        for source, found in positions.items():
            if drawn_from & self._followed[source]:
                self._followed[source] |= self._ledger.bits[name]
                if found is not None:
                    self._record(source, value, found)

    def mixes(self, name: str) -> bool:
        """Whether a source, or one drawn from it, has left torch: anything may then depend on any element."""
        return bool(self._ledger.escaped & self._followed[name])

    def positions(self, name: Hashable, tensor: Tensor) -> Positions | None:
        """Returns the element of a source that each element of a tensor depends on.

        Returns:
            Element numbers, ``NONE`` or ``MANY``, in the shape of the tensor; ``None`` if nothing is known.
        """
        if not self._ledger.mask(tensor) & self._followed[name]:
            return np.broadcast_to(np.int32(NONE), tuple(tensor.shape))
        slots = self._find(name, tensor)
        return None if slots is None else slots.view(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mask = self._mask(args, kwargs) if self._followed else 0
        sources = [name for name, bits in self._followed.items() if mask & bits]
        plan = _plan(func) if sources else None
        if plan is None or plan.is_view:
            return func(*args, **kwargs)
        found, named = {}, self._mask((), kwargs)
        for name in sources:
            # Rules see positional arguments only.
            if named & self._followed[name]:
                continue
            with contextlib.suppress(ValueError, IndexError, TypeError, *NO_STORAGE):
                rule = plan.rule if isinstance(name, str) else plan.row_rule
                found[name] = rule(partial(self.positions, name), *args)
        targets = [kwargs.get(key) if isinstance(key, str) else args[key] for key in plan.writes]
        was_clean = {name: self._mask(targets, {}) & self._followed[name] == 0 for name in sources}
        result = func(*args, **kwargs)
        for name in sources:
            self._settle(name, result, targets, found.get(name), was_clean[name])
        return result

    def _settle(
        self, name: Hashable, result: Any, targets: Sequence[Any], found: Positions | None, clean: bool
    ) -> None:
        """Records the positions of a result, in new memory or in memory that the operator wrote into."""
        if not targets:
            # New memory that depends on the source but has no record counts as mixed.
            for part in result if found is not None and isinstance(result, tuple) else (result,):
                if found is not None and isinstance(part, Tensor) and found.shape == part.shape:
                    if self._find(name, part) is None:
                        self._record(name, part, found)
            return
        for target in _tensors(targets):
            slots = self._find(name, target)
            fits = found is not None and found.ndim <= target.dim()
            if not fits:
                self._forget(name, target)
            elif slots is not None:
                slots.view(target)[...] = found
            elif clean:
                assert found is not None
                self._record(name, target, np.broadcast_to(found, tuple(target.shape)))

    def _mask(self, args: Any, kwargs: Mapping[str, Any]) -> int:
        mask = 0
        for tensor in _tensors([*args, *kwargs.values()]):
            mask |= self._ledger.mask(tensor)
        return mask

    def _find(self, name: Hashable, tensor: Tensor) -> _Slots | None:
        memory = memory_of(tensor)
        slots = self._slots[name].get(id(memory[0])) if len(memory) == 1 else None
        return slots if slots is not None and slots.fits(tensor, memory[0]) else None

    def _record(self, name: Hashable, tensor: Tensor, positions: Positions) -> None:
        memory = memory_of(tensor)
        if len(memory) != 1 or tensor.layout is not torch.strided:
            return
        known, key = self._slots[name], id(memory[0])
        slots = _Slots(memory[0], lambda ref: known.pop(ref.key, None))
        slots.key, slots.itemsize = key, tensor.element_size()
        slots.array = np.full(memory[0].nbytes() // slots.itemsize, NONE, dtype=np.int32)
        slots.view(tensor)[...] = positions
        known[key] = slots

    def _forget(self, name: Hashable, tensor: Tensor) -> None:
        for memory in memory_of(tensor):
            self._slots[name].pop(id(memory), None)


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


def _tensors(items: Sequence[Any]) -> Iterator[Tensor]:
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)


# Rules. A rule maps the arguments of an operator to the positions of its result.


def _combine(*parts: Positions | None) -> Positions | None:
    """Returns the positions of a result whose elements depend on all parts, broadcast."""
    total: Positions | None = None
    for part in parts:
        if part is None:
            return None
        if total is None:
            total = part
            continue
        total = np.where(total == NONE, part, np.where((part == NONE) | (part == total), total, MANY))
    return total


def _reduce(positions: Positions | None, dims: Any, keepdim: bool) -> Positions | None:
    """Returns the positions of a reduction over some dimensions."""
    if positions is None:
        return None
    axis = tuple(range(positions.ndim)) if dims is None or dims == [] else tuple(np.atleast_1d(dims).tolist())
    high = positions.max(axis=axis, keepdims=keepdim, initial=MANY)
    there = np.where(positions == NONE, np.iinfo(np.int32).max, positions)
    low = there.min(axis=axis, keepdims=keepdim, initial=np.iinfo(np.int32).max)
    return np.where(high == NONE, np.where(low == MANY, MANY, NONE), np.where(low == high, high, MANY))


def _pointwise(find: _Find, *args: Any) -> Positions | None:
    return _combine(*(find(tensor) for tensor in _tensors(args)))


def _copy(find: _Find, target: Any, source: Any, *rest: Any) -> Positions | None:
    return find(source)


def _cat(find: _Find, tensors: Any, dim: int = 0) -> Positions | None:
    parts = [find(tensor) for tensor in tensors]
    return None if any(part is None for part in parts) else np.concatenate(parts, dim)  # type: ignore[arg-type]


def _stack(find: _Find, tensors: Any, dim: int = 0) -> Positions | None:
    parts = [find(tensor) for tensor in tensors]
    return None if any(part is None for part in parts) else np.stack(parts, dim)  # type: ignore[arg-type]


def _flip(find: _Find, tensor: Any, dims: Any) -> Positions | None:
    found = find(tensor)
    return None if found is None else np.flip(found, tuple(dims))


def _repeat(find: _Find, tensor: Any, repeats: Any) -> Positions | None:
    found = find(tensor)
    return None if found is None else np.tile(found, tuple(repeats))


def _sum(find: _Find, tensor: Any, dims: Any = None, keepdim: Any = False, *rest: Any) -> Positions | None:
    return _reduce(find(tensor), dims, bool(keepdim))


def _softmax(find: _Find, tensor: Any, dim: int, *rest: Any) -> Positions | None:
    found = find(tensor)
    reduced = _reduce(found, dim, True)
    return None if found is None or reduced is None else np.broadcast_to(reduced, found.shape)


def _matmul(find: _Find, left: Any, right: Any) -> Positions | None:
    return _combine(_reduce(find(left), -1, True), _reduce(find(right), -2, True))


def _addmm(find: _Find, bias: Any, left: Any, right: Any, *rest: Any) -> Positions | None:
    return _combine(find(bias), _matmul(find, left, right))


def _embedding(find: _Find, table: Any, index: Any, *rest: Any) -> Positions | None:
    return _index(find, table, [index])


def _index(find: _Find, table: Any, indices: Any) -> Positions | None:
    """Rule for ``table[z]`` if the table does not depend on the source: entries depend on their index."""
    if any(index is None or index.dtype is torch.bool for index in indices):
        return None
    # If the table depends on the source, the next run may read other elements of it.
    found, known = _combine(*(find(index) for index in indices)), find(table)
    if found is None or known is None or (known != NONE).any():
        return None
    rest = tuple(table.shape[len(indices) :])
    return np.broadcast_to(found.reshape(found.shape + (1,) * len(rest)), found.shape + rest)


def _index_now(find: _Find, table: Any, indices: Any) -> Positions | None:
    """Rule for ``table[z]`` in this run only: so the table may depend on the source."""
    known, chosen = find(table), [None if index is None else find(index) for index in indices]
    if known is None or (known == NONE).all() or any(c is not None and (c != NONE).any() for c in chosen):
        return _index(find, table, indices)
    with torch._C.DisableTorchFunction():
        picked = tuple(slice(None) if index is None else index.detach().cpu().numpy() for index in indices)
    return known[picked]


def _gather(find: _Find, tensor: Any, dim: int, index: Any, *rest: Any) -> Positions | None:
    """An entry depends on its index, and on at most all the elements that it may be taken from."""
    source, chosen = _reduce(find(tensor), dim, True), find(index)
    if source is None or chosen is None:
        return None
    axis = dim % chosen.ndim
    kept = tuple(slice(None) if i == axis else slice(0, size) for i, size in enumerate(chosen.shape))
    return np.broadcast_to(_combine(chosen, source[kept]), chosen.shape)  # type: ignore[arg-type]


def _roll(find: _Find, tensor: Any, shifts: Any, dims: Any = ()) -> Positions | None:
    found = find(tensor)
    return None if found is None else np.roll(found, tuple(shifts), tuple(dims) or None)


def _along(find: _Find, tensor: Any, dim: int, *rest: Any) -> Positions | None:
    """Rule for results that depend on a whole dimension and keep it."""
    found = find(tensor)
    return None if found is None else np.broadcast_to(_reduce(found, dim, True), found.shape)  # type: ignore[arg-type]


def _extreme(find: _Find, tensor: Any, dims: Any = None, keepdim: Any = False, *rest: Any) -> Positions | None:
    """Rule for ``max`` and ``min``: reductions, or elementwise operators if a second tensor is given."""
    return _pointwise(find, tensor, dims) if isinstance(dims, Tensor) else _sum(find, tensor, dims, keepdim)


def _layer_norm(find: _Find, tensor: Any, shape: Any, weight: Any, bias: Any, *rest: Any) -> Positions | None:
    found = find(tensor)
    if found is None:
        return None
    reduced = _reduce(found, list(range(found.ndim - len(shape), found.ndim)), True)
    parts = [find(part) for part in (weight, bias) if part is not None]
    return _combine(np.broadcast_to(reduced, found.shape), *parts)  # type: ignore[arg-type]


def _mv(find: _Find, left: Any, right: Any) -> Positions | None:
    return _combine(_reduce(find(left), -1, False), _reduce(find(right), -1, False))


def _unknown(find: _Find, *args: Any) -> None:
    return None


_RULES = MappingProxyType(
    {
        **dict.fromkeys(("_to_copy", "masked_fill", "masked_fill_", "binary_cross_entropy"), _pointwise),
        **dict.fromkeys(("binary_cross_entropy_with_logits", "where", "fill_", "zero_"), _pointwise),
        **dict.fromkeys(("sum", "mean", "logsumexp", "amax", "amin", "prod", "var", "std", "any", "all"), _sum),
        **dict.fromkeys(("argmax", "argmin"), _sum),
        **dict.fromkeys(("max", "min"), _extreme),
        **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), _along),
        **dict.fromkeys(("mv", "dot"), _mv),
        **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
        **dict.fromkeys(("mm", "bmm"), _matmul),
        "copy_": _copy,
        **dict.fromkeys(("addmm", "baddbmm"), _addmm),
        "cat": _cat,
        "stack": _stack,
        "flip": _flip,
        "repeat": _repeat,
        "embedding": _embedding,
        "index": _index,
        "gather": _gather,
        "roll": _roll,
        "native_layer_norm": _layer_norm,
    }
)


class _Plan:
    """Describes what an operator does to positions."""

    def __init__(self, func: Any) -> None:
        schema = getattr(func, "_schema", None)
        name = "" if schema is None else schema.name.removeprefix("aten::")
        returns, arguments = ([], []) if schema is None else (schema.returns, schema.arguments)
        self.is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        self.writes = tuple(
            argument.name if argument.kwarg_only else i
            for i, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        is_pointwise = torch.Tag.pointwise in getattr(func, "tags", ()) and not any(
            isinstance(w, str) for w in self.writes
        )
        self.rule: Callable[..., Positions | None] = _RULES.get(name, _pointwise if is_pointwise else _unknown)
        # For rows, only this run matters: it shows whether rows meet.
        self.row_rule = _index_now if name == "index" else self.rule


@cache
def _plan(func: Any) -> _Plan:
    return _Plan(func)
