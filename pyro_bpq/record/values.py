r"""Values of a recorded run, the operators between them, and what is known of tensors and of their memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_NO_STORAGE = (NotImplementedError, RuntimeError)  # raised for sparse tensors and inside torch.func
_storage = Tensor.untyped_storage
# Most arguments of operators that are no tensors are of these types.
_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))


class RecordingError(Exception):
    """A run cannot be written down; what stopped it."""


class Value(int):
    """The number of a value."""

    __slots__ = ()


class Node(NamedTuple):
    """An operator as it was called. Values stand in place of tensors."""

    func: Any
    args: Any
    kwargs: Mapping[str, Any]
    result: Any
    written: tuple[tuple[Value, Value], ...] = ()  # values that it wrote into, before and after, but for its result
    after: tuple[int, ...] = ()  # earlier nodes whose writes into the memory of its arguments it sees


class Guard(NamedTuple):
    """What Python read from a value that no source reaches."""

    value: Value
    read: Any  # a number, or shapes


@dataclass(eq=False)
class Notes:
    """What is written down of a run.

    Args:
        nodes: The operators, in their order.
        masks: For each value the sources that it depends on, as bits.
        shapes: The shape of each value.
        dtypes: Its type.
        bits: The bit of each source, by name.
        opaque: Values that no operator has made, and what has made them.
        constants: Inputs whose numbers stand in the program, as those of ``torch.tensor([1, 2])``.
        guards: What Python read where no source reaches.
        told: What Python read where sources reach: these, as bits, and what it found.
        lines: The first line that read each of these sources.
    """

    nodes: list[Node] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    shapes: list[Any] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    bits: dict[str, int] = field(default_factory=dict)
    opaque: dict[Value, str] = field(default_factory=dict)
    constants: set[Value] = field(default_factory=set)
    guards: list[Guard] = field(default_factory=list)
    told: list[tuple[int, Any]] = field(default_factory=list)
    lines: dict[int, str] = field(default_factory=dict)


class Known(weakref.ref[Any]):
    """A tensor or a storage that is known. The record vanishes with it, so that a reused address starts clean."""

    key: int
    value: Value  # of a tensor
    mask: int = 0  # of a storage: the sources of all that was ever in it
    source: int = 0  # the bit of the source whose value it holds
    shared: bool = False  # whether Python objects outside of torch see it
    inputs: tuple[Value, ...] = ()  # the inputs in it


class Table(dict[int, Known]):
    """Records of objects by their address."""

    def of(self, item: Any) -> Known:
        """The record of an object, a new one if there is none."""
        key = id(item)
        known = self.get(key)
        if known is None:
            known = self[key] = Known(item, self.gone)
            known.key = key
        return known

    def gone(self, known: Any) -> None:
        """Forgets an object that is no more."""
        self.pop(known.key, None)


def tensors_in(item: Any) -> Iterator[Tensor]:
    """The tensors in a tensor or a pytree."""
    kind = item.__class__
    if isinstance(item, Tensor):
        yield item
    elif kind is tuple or kind is list:
        for part in item:
            yield from tensors_in(part)
    elif kind not in _PLAIN:
        yield from (leaf for leaf in tree_leaves(item) if isinstance(leaf, Tensor))


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that operators see within a function transform."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return torch._C._functorch.get_unwrapped(tensor) if is_wrapped else tensor


def memory_of(value: Tensor) -> tuple[torch.UntypedStorage, ...]:
    """The storages that hold the data of a tensor; empty if they cannot be reached."""
    try:
        return (_storage(value),)
    except _NO_STORAGE:
        if (inner := unwrapped(value)) is not value:
            return memory_of(inner)
        if value.layout is torch.sparse_coo:
            return memory_of(value._indices()) + memory_of(value._values())
        return ()
