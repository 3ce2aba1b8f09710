r"""Values of a recorded run, the operators between them, and what is known of tensors and of their memory."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

_NO_STORAGE = (NotImplementedError, RuntimeError)  # raised for sparse tensors and inside torch.func
_storage = Tensor.untyped_storage
# Most arguments of operators that are no tensors are of these types.
_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class RecordingError(Exception):
    """A run cannot be written down; what stopped it."""


class Value(int):
    """The number of a value."""

    __slots__ = ()


Tensors = Mapping[Value, Tensor]


class Node(NamedTuple):
    """An operator as it was called. Values stand in place of tensors."""

    func: Any
    args: Any
    kwargs: Mapping[str, Any]
    result: Any
    reads: tuple[Value, ...] = ()  # the values among its arguments
    written: tuple[tuple[Value, Value], ...] = ()  # values that it wrote into, before and after, but for its result
    after: tuple[int, ...] = ()  # earlier nodes whose writes into the memory of its arguments it sees


def values_in(item: Any) -> Iterator[Value]:
    """The values among the arguments or results of a node, within lists too."""
    if item.__class__ is Value:
        yield item
    elif item.__class__ is tuple or item.__class__ is list:
        for part in item:
            yield from values_in(part)


def results_of(node: Node) -> list[Value]:
    """The values that a node makes, those that it writes included."""
    own = [node.result] if node.result.__class__ is Value else [*values_in(node.result)]
    return own + [new for _, new in node.written] if node.written else own


class Guard(NamedTuple):
    """What Python read from a value that no source reaches."""

    value: Value
    read: Any  # a number, or shapes


class Stack(NamedTuple):
    """A stack of tensors: ``torch.stack(zs)[t]`` reads ``z_t`` alone."""

    dim: int
    parts: list[int]  # the sources of each part

    def part(self, name: str, rank: int, dim: int = 0, *index: Any) -> Stack | None:
        """What an operator takes out of it; ``None`` if it does so in another dimension."""
        if dim % rank != self.dim:
            return None
        if name == "slice":
            return Stack(self.dim, self.parts[slice(*(*index, None, None)[:3])])
        return Stack(self.dim, [self.parts[i] for i in index] or self.parts)


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


class Known(weakref.ref[Any]):
    """A tensor or a storage that is known. The record vanishes with it, so that a reused address starts clean."""

    key: int
    value: Value  # of a tensor
    mask: int = 0  # of a storage: the sources of all that was ever in it
    source: int = 0  # the bit of the source whose value it holds
    shared: bool = False  # whether Python objects outside of torch see it
    inputs: tuple[Value, ...] = ()  # the inputs in it
    written: int = 0  # the sources of what was written into it
    last_write: int | None = None  # the last node that wrote into it
    # Views of it that a recording makes copies of, with their index, and whether it was parted before.
    rows: tuple[tuple[weakref.ref[Any], Any, bool], ...] = ()
    parted: bool = False  # whether it was written into while there was such a view

    def views(self) -> list[Any]:
        """The views that are left."""
        self.rows = tuple(own for own in self.rows if own[0]() is not None)
        return [view() for view, *_ in self.rows]


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


class Memory(Table):
    """Records of storages."""

    def behind(self, tensor: Tensor) -> list[Known]:
        """The records of the memory of a tensor."""
        return [*map(self.of, memory_of(tensor))]

    def owns(self, tensor: Tensor, source: int) -> bool:
        """Whether a tensor has its memory to itself, so that the memory may become that of a source."""
        memory = self.behind(tensor)
        is_shared = tensor._base is not None or (tensor.is_leaf and tensor.requires_grad)
        if is_shared or tensor.layout is not torch.strided or len(memory) != 1:
            return False
        (known,) = memory
        storage: Any = known()
        is_whole = storage.nbytes() == tensor.numel() * tensor.element_size()
        return is_whole and not (known.shared or known.inputs) and known.source in (0, source)


class Taken(NamedTuple):
    """What an operator takes: values in place of tensors."""

    args: Any
    kwargs: Mapping[str, Any]
    reads: tuple[Value, ...]  # the values among them
    mask: int  # the sources of these values
    after: tuple[int, ...]  # the nodes that have written into their memory


Target = tuple[Tensor, Value]
"""A tensor that is written into, and what it was before."""


class Ledger(Notes):
    """Gives tensors their values.

    Attributes:
        inputs: Tensors that no node has made, by value; ``before`` copies of those that were written into.
        storages: What is known of memory.
        has_writes: Whether memory was written into; else it is looked up in vain.
        paused: Nothing is written down within.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[Value, Tensor] = {}
        self.before: dict[Value, Tensor] = {}
        self.storages, self._tensors = Memory(), Table()
        self.has_writes = False
        self.paused = _Paused()
        # Of the arguments that are being looked at.
        self._reads, self._mask, self._after = list[Value](), 0, tuple[int, ...]()

    def taken(self, args: Any, kwargs: Any = None) -> Taken:
        """What an operator takes that gets these arguments."""
        self._reads, self._mask, self._after = [], 0, ()
        own, named = self._put(args), self._put(kwargs) if kwargs else _NOTHING
        return Taken(own, named, tuple(self._reads), self._mask, self._after)

    def _put(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            known = self._tensors.get(id(item))
            value = self._arrived(item) if known is None else known.value
            for storage in memory_of(item) if self.has_writes else ():
                memory = self.storages.get(id(storage))
                if memory is not None and memory.last_write is not None:
                    if memory.parted and value < min(results_of(self.nodes[memory.last_write]), default=0):
                        value = self.bind(item, self.masks[value])
                        self.opaque[value] = "a write into a row, or into a tensor with a row that is in use"
                    self._mask |= memory.written
                    self._after = (*self._after, memory.last_write)
            self._reads.append(value)
            self._mask |= self.masks[value]
            return value
        kind = item.__class__
        if kind is Value:
            self._reads.append(item)
        if kind is tuple:
            return tuple([self._put(part) for part in item])
        if kind is list:
            return [self._put(part) for part in item]
        return {name: self._put(part) for name, part in item.items()} if kind is dict else item

    def value(self, tensor: Tensor) -> Value:
        """The value of a tensor, but for writes into its memory by way of other tensors."""
        known = self._tensors.get(id(tensor))
        return self._arrived(tensor) if known is None else known.value

    def _arrived(self, tensor: Tensor) -> Value:
        """The value of a tensor that no node has made: an input, or a view that no operator has shown."""
        if (inner := unwrapped(tensor)) is not tensor:
            return self.value(inner)
        memory = self.storages.behind(tensor)
        every = (1 << len(self.bits)) - 1
        mask = functools.reduce(operator.or_, [known.mask for known in memory]) if memory else every
        value = self.bind(tensor, mask)
        if mask:
            self.opaque[value] = "a view that no operator shows"
            return value
        self.inputs[value] = tensor
        for known in memory:
            known.inputs = (*known.inputs, value)
        return value

    def bind(self, tensor: Tensor, mask: int) -> Value:
        """A new value, which a tensor is from now on."""
        value = Value(len(self.masks))
        self.masks.append(mask)
        self.shapes.append(None if tensor.is_nested or is_lazy(tensor) else tensor.shape)
        self.dtypes.append(tensor.dtype)
        self._tensors.of(tensor).value = value
        return value

    def bind_all(self, result: Any, mask: int, own: Sequence[int] = ()) -> Any:
        """New values for what an operator has made, which depends on some sources; or each part on its own ones."""
        if isinstance(result, Tensor):
            for known in self.storages.behind(result) if mask else ():
                known.mask |= mask
            return self.bind(result, mask)
        masks = own or itertools.repeat(mask)
        return tuple(map(self.bind_all, result, masks)) if isinstance(result, (list, tuple)) else None

    def targets(self, items: Any) -> list[Target]:
        """The tensors that an operator will write into."""
        found = [(tensor, self.value(tensor)) for tensor in tensors_in(items)]
        self.keep(tensor for tensor, _ in found)
        return found

    def keep(self, targets: Iterable[Tensor]) -> None:
        """Copies inputs, into whose memory an operator will write for the first time."""
        inputs = {value for target in targets for known in self.storages.behind(target) for value in known.inputs}
        for value in inputs - self.before.keys():
            with self.paused:
                self.before[value] = self.inputs[value].detach().clone()

    @property
    def written(self) -> dict[Value, tuple[Tensor, Tensor]]:
        """Inputs that were written into, and what was in them before."""
        return {value: (self.inputs[value], kept) for value, kept in self.before.items()}


@torch.no_grad()
def put_back(written: dict[Value, tuple[Tensor, Tensor]]) -> None:
    """Gives tensors that were written into what was in them before."""
    # A tensor that was met late may lie in memory that was written into before.
    for tensor, kept in reversed(written.values()):
        tensor.copy_(kept)


class _Paused:
    """Counts how often it is entered."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
