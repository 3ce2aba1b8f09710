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
from functools import cache, partial, reduce
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bpq.tracing.ledger import NO_STORAGE, Ledger, OperatorMode, memory_of

NONE, MANY = -1, -2
"""``NONE``: depends on no element of the source. ``MANY``: depends on several, or on an unknown one."""

Positions = np.ndarray
# Returns the positions of an argument, or raises Unknown.
_Find = Callable[[Any], Positions]


class Unknown(Exception):
    """Nothing is known of the elements that a tensor depends on."""


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
        plan = _plan(func) if keys else None
        if plan is None or plan.is_view:
            return func(*args, **kwargs)
        found = {}
        for key in keys:
            # Rules see positional arguments only.
            if named & self._followed[key]:
                continue
            with contextlib.suppress(Unknown, ValueError, IndexError, TypeError, *NO_STORAGE):
                rule = plan.rule if isinstance(key, str) else plan.row_rule
                found[key] = rule(partial(self._known, key), *args)
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
        for target in _tensors(targets):
            slots = self._find(key, target)
            if found is None or found.ndim > target.dim():
                for memory in memory_of(target):
                    self._slots[key].pop(id(memory), None)
            elif slots is not None:
                slots.view(target)[...] = found
            elif is_clean:
                self._record(key, target, np.broadcast_to(found, tuple(target.shape)))

    def _mask(self, args: Sequence[Any]) -> int:
        return reduce(lambda mask, tensor: mask | self._ledger.mask(tensor), _tensors(args), 0)

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


# Rules. A rule maps the arguments of an operator to the positions of its result, or raises Unknown.


def _combine(*parts: Positions) -> Positions:
    """The positions of a result whose elements depend on all parts, broadcast."""
    return reduce(
        lambda a, b: np.where(a == NONE, b, np.where((b == NONE) | (b == a), a, MANY)),  # the same element, or many
        parts,
    )


def _reduce(positions: Positions, dims: Any, keepdim: bool) -> Positions:
    """The positions of a reduction over some dimensions."""
    axis = tuple(range(positions.ndim)) if dims is None or dims == [] else tuple(np.atleast_1d(dims).tolist())
    largest = np.iinfo(np.int32).max
    high = positions.max(axis=axis, keepdims=keepdim, initial=MANY)
    low = np.where(positions == NONE, largest, positions).min(axis=axis, keepdims=keepdim, initial=largest)
    return np.where(high == NONE, np.where(low == MANY, MANY, NONE), np.where(low == high, high, MANY))


def _spread(positions: Positions, dims: Any) -> Positions:
    """The positions of a result that depends on all of some dimensions and keeps them."""
    return np.broadcast_to(_reduce(positions, dims, True), positions.shape)


def _pointwise(find: _Find, *args: Any) -> Positions:
    return _combine(*map(find, _tensors(args)))


def _sum(find: _Find, tensor: Any, dims: Any = None, keepdim: Any = False, *rest: Any) -> Positions:
    return _reduce(find(tensor), dims, bool(keepdim))


def _extreme(find: _Find, tensor: Any, dims: Any = None, keepdim: Any = False, *rest: Any) -> Positions:
    """Rule for ``max`` and ``min``: reductions, or elementwise operators if a second tensor is given."""
    return _pointwise(find, tensor, dims) if isinstance(dims, Tensor) else _sum(find, tensor, dims, keepdim)


def _along(find: _Find, tensor: Any, dim: int, *rest: Any) -> Positions:
    return _spread(find(tensor), dim)


def _matmul(find: _Find, left: Any, right: Any) -> Positions:
    return _combine(_reduce(find(left), -1, True), _reduce(find(right), -2, True))


def _addmm(find: _Find, bias: Any, left: Any, right: Any, *rest: Any) -> Positions:
    return _combine(find(bias), _matmul(find, left, right))


def _mv(find: _Find, left: Any, right: Any) -> Positions:
    return _combine(_reduce(find(left), -1, False), _reduce(find(right), -1, False))


def _index(find: _Find, table: Any, indices: Any) -> Positions:
    """Rule for ``table[z]`` if the table does not depend on the source: entries depend on their index."""
    # If the table depends on the source, the next run may read other elements of it.
    if any(index is None or index.dtype is torch.bool for index in indices) or (find(table) != NONE).any():
        raise Unknown
    found = _combine(*map(find, indices))
    rest = tuple(table.shape[len(indices) :])
    return np.broadcast_to(found.reshape(found.shape + (1,) * len(rest)), found.shape + rest)


def _index_now(find: _Find, table: Any, indices: Any) -> Positions:
    """Rule for ``table[z]`` in this run only: so the table may depend on the source."""
    known = find(table)
    if (known == NONE).all() or any(index is not None and _reads(find, index) for index in indices):
        return _index(find, table, indices)
    with torch._C.DisableTorchFunction():
        picked = tuple(slice(None) if index is None else index.detach().cpu().numpy() for index in indices)
    return known[picked]


def _reads(find: _Find, tensor: Any) -> bool:
    """Whether a tensor is known to depend on the source."""
    with contextlib.suppress(Unknown):
        return bool((find(tensor) != NONE).any())
    return False


def _gather(find: _Find, tensor: Any, dim: int, index: Any, *rest: Any) -> Positions:
    """An entry depends on its index, and on at most all the elements that it may be taken from."""
    source, chosen = _reduce(find(tensor), dim, True), find(index)
    axis = dim % chosen.ndim
    kept = tuple(slice(None) if i == axis else slice(0, size) for i, size in enumerate(chosen.shape))
    return np.broadcast_to(_combine(chosen, source[kept]), chosen.shape)


def _layer_norm(find: _Find, tensor: Any, shape: Any, weight: Any, bias: Any, *rest: Any) -> Positions:
    found = find(tensor)
    spread = _spread(found, list(range(found.ndim - len(shape), found.ndim)))
    return _combine(spread, *(find(part) for part in (weight, bias) if part is not None))


def _unknown(find: _Find, *args: Any) -> Positions:
    raise Unknown


_RULES: Mapping[str, Callable[..., Positions]] = MappingProxyType(
    {
        **dict.fromkeys(("_to_copy", "masked_fill", "masked_fill_", "binary_cross_entropy"), _pointwise),
        **dict.fromkeys(("binary_cross_entropy_with_logits", "where", "fill_", "zero_"), _pointwise),
        **dict.fromkeys(("sum", "mean", "logsumexp", "amax", "amin", "prod", "var", "std", "any", "all"), _sum),
        **dict.fromkeys(("argmax", "argmin"), _sum),
        **dict.fromkeys(("max", "min"), _extreme),
        **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "_softmax", "_log_softmax"), _along),
        **dict.fromkeys(("mv", "dot"), _mv),
        **dict.fromkeys(("mm", "bmm"), _matmul),
        **dict.fromkeys(("addmm", "baddbmm"), _addmm),
        "copy_": lambda find, target, source, *rest: find(source),
        "cat": lambda find, tensors, dim=0: np.concatenate([*map(find, tensors)], dim),
        "stack": lambda find, tensors, dim=0: np.stack([*map(find, tensors)], dim),
        "flip": lambda find, tensor, dims: np.flip(find(tensor), tuple(dims)),
        "repeat": lambda find, tensor, repeats: np.tile(find(tensor), tuple(repeats)),
        "roll": lambda find, tensor, shifts, dims=(): np.roll(find(tensor), tuple(shifts), tuple(dims) or None),
        "embedding": lambda find, table, index, *rest: _index(find, table, [index]),
        "index": _index,
        "gather": _gather,
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
        self.rule = _RULES.get(name, _pointwise if is_pointwise else _unknown)
        # For rows, only this run matters: it shows whether rows meet.
        self.row_rule = _index_now if name == "index" else self.rule


@cache
def _plan(func: Any) -> _Plan:
    return _Plan(func)
