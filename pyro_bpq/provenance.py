"""Which tensors depend on which named sources, through everything a program can do to a tensor.

A *source* is the value of a sample site. What is computed from it depends on it, and so does the
memory it is written into; provenance is therefore a property of storages, not of Python objects, and is
followed below autograd, where views, in-place writes, ``out=``, :func:`torch.func.vmap` and
scripted functions are all plain operator calls. A value can also *escape*: once Python has looked at it
(``if z``, ``int(z)``, ``z.tolist()``, the length of ``x[mask]``) no bookkeeping on tensors
can tell what depends on it, and everything later has to be taken as dependent.

The answers are supersets of the true dependencies. What they cannot see is listed at
:class:`DependencyTracker`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from types import FunctionType, MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LIBRARIES", "DependencyTracker"]

LIBRARIES = (
    "torch.distributions.",
    "pyro.distributions.",
    "pyro.poutine.",
    "pyro.util",
    "pyro.primitives",
    "pyro.infer.util",
)
"""Modules whose looks at booleans and shapes are argument checks and steer nothing the caller sees."""

_storage = Tensor.untyped_storage


class DependencyTracker:
    """Follows named sources through the tensors of a program run inside ``with tracker:``.

    Values are followed through operators, views, writes, transforms of :mod:`torch.func`, scripted functions and
    autograd. A value that leaves torch is added to :attr:`escaped`. A boolean or a shape that the modules in
    ``libraries`` look at (distributions checking their arguments) is no escape; a number they read is.

    Provenance is kept per storage: an element of a tensor depends on whatever any element depends on. Sources
    already in a tensor are never removed, not even when it is overwritten.

    Not seen, because nothing in torch reports it: work in other threads; ``tolist`` *inside* a scripted function;
    ``torch.utils.dlpack.to_dlpack``; a Python object that shared memory with a tensor before the tracker was
    entered; an exception that depends on a value and is caught; what a function wrapped by
    :func:`torch.compile` does where it is not run eagerly.

    Args:
        libraries: Prefixes of module names whose argument checks are not escapes.

    Example:
        >>> with DependencyTracker() as tracker:
        ...     z = tracker.source("z", torch.tensor(1.0))
        ...     buffer = torch.zeros(2)
        ...     buffer[0] = z
        >>> sorted(tracker.sources_of(buffer)), sorted(tracker.escaped)
        (['z'], [])
    """

    def __init__(self, libraries: tuple[str, ...] = LIBRARIES) -> None:
        self._ledger = _Ledger(libraries)
        self._stack: ExitStack | None = None

    def __enter__(self) -> DependencyTracker:
        if self._stack is not None:
            raise RuntimeError("This DependencyTracker is active. Nest a second one instead: DependencyTracker().")
        with ExitStack() as stack:
            stack.enter_context(_Operators(self._ledger))
            stack.enter_context(_Calls(self._ledger))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.__exit__(kind, error, trace)

    @property
    def escaped(self) -> frozenset[str]:
        """Sources whose value has left torch so far: all that is sampled or scored later depends on them."""
        return self._ledger.names(self._ledger.escaped)

    def source(self, name: str, value: Any) -> Any:  # noqa: ANN401
        """Returns a copy of ``value`` that depends on the source ``name`` and on nothing else.

        A name may be used again, for a value that is handed out twice. Gradients flow through the copy.

        Args:
            name: Name of the source.
            value: A tensor of any shape and type. Anything else is returned as it is and counts as escaped.

        Returns:
            Tensor of the same shape in memory of its own.

        Raises:
            RuntimeError: If the tracker is not active.
        """
        if self._stack is None:
            raise RuntimeError("The tracker is not active. Write: with tracker: tracker.source(name, value)")
        bit = self._ledger.bit(name)
        if not isinstance(value, Tensor):
            self._ledger.escaped |= bit
            return value
        copy = value.clone()
        self._ledger.reset(copy, bit)
        return copy

    def sources_of(self, value: object) -> frozenset[str]:
        """Names of the sources that the tensors in ``value`` depend on.

        Args:
            value: A tensor or a pytree of tensors; leaves of other types have no sources.

        Returns:
            The union over the tensors; escaped sources are not added.
        """
        if isinstance(value, Tensor):
            return self._ledger.names(self._ledger.mask(value))
        return self._ledger.names(self._ledger.mask(tree_leaves(value)))

    @contextmanager
    def ignoring_reads(self) -> Iterator[None]:
        """Inside, looking at values is no escape; for code that inspects a run and does not steer it."""
        before, self._ledger.muted = self._ledger.muted, True
        try:
            yield
        finally:
            self._ledger.muted = before

    def forget(self) -> None:
        """Drops all sources, dependencies and escapes."""
        self._ledger.clear()


class _Entry(weakref.ref[torch.UntypedStorage]):
    """What is known about one storage; it vanishes with the storage, so that reused addresses start clean.

    ``views`` is filled once a latent position has chosen a view (``table[z]``): that view depends on ``z``
    while the memory under it does not. Views that were not seen to be made count with all of ``chosen``.
    """

    __slots__ = ("chosen", "key", "mask", "shared", "views")

    key: int
    mask: int
    shared: bool
    chosen: int
    views: dict[int, tuple[weakref.ref[Tensor], int]] | None

    def choice(self, view: Tensor) -> int:
        if self.views is None:
            return 0
        known = self.views.get(id(view))
        return known[1] if known is not None and known[0]() is view else self.chosen

    def register(self, view: Tensor, mask: int) -> None:
        if self.views is None:
            self.views = {}
        known = self.views.get(id(view))
        if known is not None and known[0]() is view:
            mask |= known[1]
        self.views[id(view)] = (weakref.ref(view), mask)
        self.chosen |= mask


class _Ledger:
    """All that a tracker knows: a bit for each source, a mask of bits for each storage."""

    def __init__(self, libraries: tuple[str, ...]) -> None:
        self.libraries = libraries
        self.entries: dict[int, _Entry] = {}
        self.bits: dict[str, int] = {}
        self.escaped = 0
        self.muted = False
        self.has_views = False
        self.deferred: int | None = None  # not None: collects scalars read for an index instead of escaping them
        entries = self.entries
        self._expire: Callable[[Any], Any] = lambda entry: entries.pop(entry.key, None)

    def clear(self) -> None:
        self.entries.clear()
        self.bits.clear()
        self.escaped = 0
        self.has_views = False

    def bit(self, name: str) -> int:
        return self.bits.setdefault(name, 1 << len(self.bits))

    def names(self, mask: int) -> frozenset[str]:
        return frozenset(name for name, bit in self.bits.items() if mask & bit)

    def entry(self, storage: torch.UntypedStorage) -> _Entry:
        key = id(storage)
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = _Entry(storage, self._expire)
            entry.key, entry.mask, entry.chosen, entry.shared, entry.views = key, 0, 0, False, None
        return entry

    def mask(self, value: object) -> int:
        """Sources of a tensor, or of all tensors in nested lists and tuples."""
        if isinstance(value, Tensor):
            try:
                entry = self.entries.get(id(_storage(value)))
            except (NotImplementedError, RuntimeError):
                parts = _parts(value)
                return self.mask(parts) if parts else (1 << len(self.bits)) - 1
            return 0 if entry is None else entry.mask | entry.choice(value)
        mask = 0
        if isinstance(value, (list, tuple)):
            for item in value:
                mask |= self.mask(item)
        elif isinstance(value, slice):
            mask = self.mask([value.start, value.stop, value.step])
        return mask

    def taint(self, value: object, mask: int, *, written: bool = False) -> None:
        """Adds sources to the tensors in a result; ``written`` if they are arguments that were written into."""
        if isinstance(value, Tensor):
            try:
                storage = _storage(value)
            except (NotImplementedError, RuntimeError):
                return self.taint(_parts(value), mask, written=True)
            entry = self.entries.get(id(storage))
            if entry is None:
                if mask:
                    self.entry(storage).mask = mask
            elif entry.views is not None and not written:
                entry.register(value, mask)
            else:
                entry.mask |= mask
                if entry.shared:
                    self.read(mask, check=False)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.taint(item, mask, written=written)

    def reset(self, value: Tensor, mask: int) -> None:
        try:
            self.entry(_storage(value)).mask = mask
        except (NotImplementedError, RuntimeError):
            for part in _parts(value):
                self.reset(part, mask)

    def choose(self, base: Tensor, view: Tensor, mask: int) -> None:
        """Notes that ``view`` was taken from ``base`` at a position that depends on ``mask``."""
        try:
            storage = _storage(view)
            is_view = storage is _storage(base)
        except (NotImplementedError, RuntimeError):
            is_view = False
        if not is_view:
            return self.taint(view, mask, written=True)
        entry, self.has_views = self.entry(storage), True
        before = entry.choice(base)
        entry.register(base, before)
        entry.register(view, before | mask)

    def share(self, value: object) -> None:
        """Notes that memory is visible outside torch: whatever is written into it later escapes at once."""
        if isinstance(value, Tensor):
            try:
                self.entry(_storage(value)).shared = True
            except (NotImplementedError, RuntimeError):
                self.share(_parts(value))
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.share(item)

    def read(self, mask: int, *, check: bool) -> None:
        """Notes that a value left torch; ``check`` if it is a boolean or a shape, which libraries may look at."""
        if mask & ~self.escaped and not self.muted and not (check and _is_library_check(self.libraries)):
            self.escaped |= mask

    @contextmanager
    def deferring(self) -> Iterator[None]:
        before, self.deferred = self.deferred, 0
        try:
            yield
        finally:
            self.deferred = before


def _parts(value: Tensor) -> list[Tensor]:
    """Tensors that hold the data of a tensor without storage; empty if it cannot be opened."""
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return [torch._C._functorch.get_unwrapped(value)]
    if value.layout is torch.sparse_coo:
        return [value._indices(), value._values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    return []


def _is_library_check(libraries: tuple[str, ...]) -> bool:
    """Whether the nearest caller outside of torch's internals is one of the libraries."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.startswith(libraries):
            return frame.f_code.co_name != "__eq__"  # its answer is handed on to whoever compares
        if module != __name__ and module != "torch" and not module.startswith("torch."):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Plan(NamedTuple):
    """What an operator does besides computing new tensors from its arguments."""

    reads: bool = False
    shape_from: slice | None = None
    writes: tuple[int | str, ...] = ()


_PLAIN = _Plan()
_METADATA = frozenset(
    "_batch_norm_impl_index _debug_has_internal_overlap _dimI _dimV _fused_sdp_choice _has_compatible_shallow_copy_type "
    "_has_same_storage_numel _is_zerotensor _nested_get_ragged_idx _use_cudnn_ctc_loss _use_miopen_ctc_loss _version "
    "cudnn_is_acceptable dense_dim dim element_size get_device is_coalesced is_complex is_conj is_contiguous "
    "is_distributed is_floating_point is_inference is_leaf is_neg is_non_overlapping_and_dense is_pinned is_same_size "
    "is_set_to is_signed is_strides_like_format numel output_nr q_per_channel_axis qscheme result_type retains_grad "
    "size sparse_dim stride sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride".split()
)
_SHAPE_FROM = MappingProxyType(
    {"masked_select": slice(1, 2), "repeat_interleave": slice(0, 2), "index": slice(1, 2), "bincount": slice(0, 1)}
)
_UNTAGGED_SHAPES = frozenset(
    "_coalesce _nested_tensor_from_mask _pack_padded_sequence _pad_packed_sequence _to_sparse nonzero_numpy "
    "repeat_interleave sparse_mask tensor_split to_sparse unique_dim".split()
)


@cache
def _plan(func: Any) -> _Plan:  # noqa: ANN401
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator: it may choose between its branches, its outputs tell no more
        return _PLAIN
    name = schema.name.split("::")[-1]
    opaque = any("Tensor" not in str(result.type) for result in schema.returns)
    reads = torch.Tag.data_dependent_output in func.tags or (
        opaque and name not in _METADATA and "attention" not in name
    )
    sized = torch.Tag.dynamic_output_shape in func.tags or name in _UNTAGGED_SHAPES
    if name == "repeat_interleave" and schema.overload_name == "self_int":
        sized = False
    sized = sized or (name == "where" and not schema.overload_name)
    writes: list[int | str] = []
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        # Training-mode batch norm updates its running statistics without saying so in its schema.
        if (alias is not None and alias.is_write) or ("batch_norm" in name and "running" in argument.name):
            writes.append(argument.name if argument.kwarg_only else position)
    plan = _Plan(reads, _SHAPE_FROM.get(name, slice(None)) if sized else None, tuple(writes))
    return _PLAIN if plan == _PLAIN else plan


class _Operators(TorchDispatchMode):
    """Follows sources through operators, below autograd and :mod:`torch.func`."""

    supports_higher_order_operators = True

    def __init__(self, ledger: _Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._find = ledger.entries.get

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        mask, find = 0, self._find
        try:
            for arg in args:
                if isinstance(arg, Tensor):
                    entry = find(id(_storage(arg)))
                    if entry is not None:
                        mask |= entry.mask if entry.views is None else entry.mask | entry.choice(arg)
                elif isinstance(arg, (list, tuple)):
                    mask |= self._ledger.mask(arg)
        except (NotImplementedError, RuntimeError):
            mask = self._ledger.mask(args)
        if not kwargs:
            result = func(*args)
        else:
            mask |= self._ledger.mask([*kwargs.values()])
            result = func(*args, **kwargs)
        if mask or self._ledger.has_views:
            plan = _plan(func)
            if plan is _PLAIN:
                self._ledger.taint(result, mask)
            else:
                self._settle(plan, args, kwargs or {}, result, mask)
        return result

    def _settle(
        self, plan: _Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object, mask: int
    ) -> None:
        ledger = self._ledger
        if plan.reads:
            if ledger.deferred is not None and not isinstance(result, Tensor):
                ledger.deferred |= mask
            else:
                ledger.read(mask, check=isinstance(result, bool))
        if plan.shape_from is not None:
            ledger.read(ledger.mask(_shape_sources(args[plan.shape_from])) if not kwargs else mask, check=True)
        ledger.taint(result, mask, written=bool(plan.writes))
        for key in plan.writes:
            target = kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None
            ledger.taint(target, mask, written=True)


def _shape_sources(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Drops the integer positions among the indices of a tensor: only masks decide the size of the result."""
    if len(args) == 1 and isinstance(args[0], (list, tuple)):
        return tuple(
            index for index in args[0] if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        )
    return args


_Handler = Callable[[_Ledger, Any, tuple[Any, ...], dict[str, Any]], Any]


class _Calls(TorchFunctionMode):
    """Sees the calls that no operator reports, and those whose operators tell less than the call."""

    def __init__(self, ledger: _Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._find = _handlers().get

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        handler = self._find(func)
        if handler is not None:
            return handler(self._ledger, func, args, kwargs or {})
        if func.__class__ is FunctionType and not func.__module__.startswith("torch"):
            # Its body runs where this mode is off, so nothing is known about what it does.
            self._ledger.escaped |= (1 << len(self._ledger.bits)) - 1
        return func(*args, **kwargs) if kwargs else func(*args)


def _leave(ledger: _Ledger, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """The values of the arguments are handed to Python."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ledger.read(ledger.mask(leaves), check=all(leaf.dtype is torch.bool for leaf in leaves))
    return func(*args, **kwargs)


def _expose(ledger: _Ledger, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """The memory of the argument is handed to Python."""
    if sys._getframe(2).f_globals is globals():  # the ledger looks up a storage
        return func(*args, **kwargs)
    ledger.share(args[:1])
    return _leave(ledger, func, args, kwargs)


def _copy(ledger: _Ledger, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """A tensor is made of tensors, numbers or foreign memory, out of sight of the operators."""
    mask = ledger.mask(tree_leaves((args, kwargs)))
    with ledger.deferring():
        result = func(*args, **kwargs)
    data = kwargs.get("data", kwargs.get("obj", args[0] if args else None))
    if func in (torch.as_tensor, torch.asarray) and not isinstance(data, (Tensor, list, tuple, int, float, complex)):
        ledger.share(result)
    ledger.taint(result, mask, written=True)
    return result


def _adopt(ledger: _Ledger, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """A tensor is made of memory that a Python object may own (``torch.from_numpy``)."""
    result = func(*args, **kwargs)
    ledger.share(result)
    return result


def _get(ledger: _Ledger, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """``x[index]``: a scalar tensor in the index is read by torch to make a view, which is no escape."""
    x, index = args[0], args[1]
    if not _has_tensor(index) or not _is_position(index, masks=False):
        return func(*args, **kwargs)
    with ledger.deferring():
        result = func(*args, **kwargs)
        chosen = (ledger.deferred or 0) | _listed(ledger, index)
    if chosen:
        ledger.choose(x, result, chosen)
    return result


def _set(ledger: _Ledger, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """``x[index] = value``, see :func:`_get`."""
    x, index = args[0], args[1]
    if not _has_tensor(index) or not _is_position(index, masks=True):
        return func(*args, **kwargs)
    with ledger.deferring():
        result = func(*args, **kwargs)
        chosen = (ledger.deferred or 0) | _listed(ledger, index)
    ledger.taint(x, chosen | (ledger.mask(x) if ledger.has_views else 0), written=True)
    return result


def _one_hot(ledger: _Ledger, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """Checks its argument's range by reading it; only without ``num_classes`` does that decide anything."""
    if (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1:
        return func(*args, **kwargs)
    with ledger.deferring():
        return func(*args, **kwargs)


def _assign_data(ledger: _Ledger, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """``x.data = y``: ``x`` may be known as a view of the same memory, with other sources."""
    mask = ledger.mask(args[1]) if ledger.has_views else 0
    result = func(*args, **kwargs)
    if mask:
        ledger.taint(args[0], mask, written=True)
    return result


def _has_tensor(index: object) -> bool:
    if isinstance(index, (list, tuple)):
        return any(_has_tensor(item) for item in index)
    if isinstance(index, slice):
        return any(isinstance(bound, Tensor) for bound in (index.start, index.stop, index.step))
    return isinstance(index, Tensor)


def _is_position(index: object, *, masks: bool) -> bool:
    """Whether an index reads tensors only as positions: no bounds of slices, scalar masks only if allowed."""
    if isinstance(index, (list, tuple)):
        return all(_is_position(item, masks=masks) for item in index)
    if isinstance(index, Tensor):
        return masks or index.dim() > 0 or index.dtype not in (torch.bool, torch.uint8)
    if isinstance(index, slice):
        return all(bound is None or type(bound) is int for bound in (index.start, index.stop, index.step))
    return index is None or index is Ellipsis or type(index) in (int, bool)


def _listed(ledger: _Ledger, index: object) -> int:
    """Sources of the tensors in lists inside an index, which torch converts out of sight."""
    if isinstance(index, list):
        return ledger.mask(index)
    return ledger.mask([item for item in index if isinstance(item, list)]) if isinstance(index, tuple) else 0


@cache
def _handlers() -> Mapping[Any, _Handler]:
    cls: Any = Tensor  # several of these names are missing from torch's stubs
    calls: dict[_Handler, tuple[Any, ...]] = {
        _leave: (
            *(cls.tolist, cls.apply_, cls.map_, cls.map2_, cls.storage_offset, cls.__repr__, cls.__format__),
            *(cls.__reduce_ex__, cls.tensor_split, torch.tensor_split, torch.tensordot, torch.ctc_loss),
            *(torch.nn.functional.ctc_loss, torch.functional.tensordot),
        ),
        _expose: (
            *(cls.numpy, cls.__array__, cls.__dlpack__, cls.data_ptr, cls.untyped_storage, cls.storage),
            *(cls._typed_storage, cls.__cuda_array_interface__.__get__, cls.share_memory_),
        ),
        _copy: (torch.tensor, torch.as_tensor, torch.asarray, cls.new_tensor, cls.__deepcopy__),
        _adopt: (torch.ops.aten.lift_fresh.default,),
        _get: (cls.__getitem__,),
        _set: (cls.__setitem__,),
        _one_hot: (torch.nn.functional.one_hot,),
        _assign_data: (cls.data.__set__,),
    }
    return MappingProxyType({call: handler for handler, group in calls.items() for call in group})
