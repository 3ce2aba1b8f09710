"""Tracks which tensors depend on which named sources, through everything a program can do to a tensor.

A *source* is the value of a sample site. Every tensor that is computed from a source depends on it. So does the memory
that the source is written into. Provenance is therefore a property of storages, not of Python objects. It is followed
below autograd, where views, in-place writes, ``out=``, :func:`torch.func.vmap` and scripted functions are plain
operator calls. A value can also *escape*: once Python has read it (``if z``, ``int(z)``, the length of ``x[mask]``),
everything later counts as dependent on it. The answers are supersets of the true dependencies.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pyro_bpq.tracing.ledger import OWN, Ledger, OperatorMode, memory_of, signature_of

_storage = Tensor.untyped_storage
_LIFT = torch.ops.aten.lift_fresh.default  # seen for torch.from_numpy
# Number of leading arguments that Python does not read: operators follow them.
_NOT_READ = MappingProxyType({"tensor_split": 1, "tensordot": 2, "ctc_loss": 2})
_MASKS = (torch.bool, torch.uint8)  # dtypes of index tensors that are masks, not positions

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


class DependencyTracker:
    """Follows named sources through the tensors of a program that runs inside ``with tracker:``.

    Provenance is kept per storage. Each element of a tensor depends on the sources of all its elements. A source that
    was once written into a tensor stays. Only ``table[z]`` with a scalar ``z`` is finer: that view depends on ``z``,
    and the table does not. It is no escape if torch or Pyro reads booleans or shapes to check arguments. Where the
    program would catch an error, every operator counts as a read: it may raise one.

    The tracker does not see the following, because nothing in torch reports it:

    - work in other threads; the first use of :func:`torch.compile` in a process (later ones run eagerly);
    - ``to_dlpack``; ``tolist`` and ``numpy`` inside a scripted function or a backward pass;
    - numpy arrays that shared memory with a tensor before the tracker was entered;
    - an exception that depends on a value and that a context manager of the user's own swallows;
    - data that a distribution keeps of a draw besides the value (a cached ``flow.inv(z)`` lacks ``z``).

    Example:
        >>> with DependencyTracker() as tracker:
        ...     z = tracker.source("z", torch.tensor(1.0))
        ...     buffer = torch.zeros(2)
        ...     buffer[0] = z
        >>> sorted(tracker.sources_of(buffer)), sorted(tracker.escaped)
        (['z'], [])
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._stack: ExitStack | None = None

    def __enter__(self) -> DependencyTracker:
        if self._stack is not None:
            raise RuntimeError("The tracker is active. Nest another one: with DependencyTracker() as inner:")
        with ExitStack() as stack:
            stack.enter_context(_Operators(self.ledger))
            stack.enter_context(_Calls(self.ledger))
            if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._stack = stack.pop_all()
        outer = sys._getframe(1)
        while outer.f_globals.get("__name__") == "contextlib" and outer.f_back is not None:
            outer = outer.f_back
        self.ledger.outer = outer
        return self

    def __exit__(self, *error: Any) -> None:
        stack, self._stack, self.ledger.outer = self._stack or ExitStack(), None, None
        stack.__exit__(*error)

    def __repr__(self) -> str:
        return f"DependencyTracker({len(self.ledger.bits)} sources, escaped: {sorted(self.escaped)})"

    @property
    def escaped(self) -> frozenset[str]:
        """Sources whose value has left torch so far; everything sampled or scored later depends on them."""
        return self.ledger.names(self.ledger.escaped)

    def source(self, name: str, value: Any) -> Any:
        """Returns ``value``, which from now on depends on the source ``name`` and on nothing else.

        The result is ``value`` itself, so that caches by identity (flows) still know it. It is a copy if the memory of
        ``value`` may be shared: by a view, a leaf that requires gradients, or another source. Gradients flow through
        the copy. The earlier dependencies of ``value`` are kept in ``ledger.origins``. Names may recur.
        A value that is no tensor is returned unchanged and counts as escaped.
        """
        ledger = self.ledger
        if self._stack is None:
            raise RuntimeError("The tracker is not active. Write: with tracker: tracker.source(name, value)")
        bit = ledger.bits.setdefault(name, 1 << len(ledger.bits))
        if not isinstance(value, Tensor):
            ledger.escape(bit)
            return value
        with torch._C.DisableTorchFunction():
            ledger.origins[name] = ledger.origins.get(name, 0) | ledger.mask(value) & ~bit
            value = value if ledger.owns(value, bit) else value.clone()
            for storage in memory_of(value):
                entry = ledger.entry(storage)
                entry.mask = entry.source = bit
        return value

    def sources_of(self, value: object) -> frozenset[str]:
        """Returns the names of the sources that the tensors in ``value``, a tensor or a pytree, depend on.

        Escaped sources are not added. Leaves that are not tensors have no sources.
        """
        return self.ledger.names(self.mask_of(value))

    def mask_of(self, value: object) -> int:
        """Returns the sources of ``value`` as bits: the n-th source of the ledger is the n-th bit."""
        leaves = value if isinstance(value, Tensor) else tree_leaves(value)
        with torch._C.DisableTorchFunction():
            return self.ledger.mask(leaves)


class _Plan(NamedTuple):
    """Describes what an operator does besides computing new tensors from its arguments."""

    reads: bool = False
    is_sized: bool = False  # the shape of the result depends on values
    shape_from: int | None = None  # position of the argument with these values; None: any argument
    writes: tuple[int | str, ...] = ()
    is_blank: bool = False


_PLAIN = _Plan()
_SHAPE_FROM = MappingProxyType({"masked_select": 1, "index": 1, "sparse_mask": 1, "_pack_padded_sequence": 1})
_UNTAGGED_SHAPES = re.compile(
    r"(_coalesce|_?to_sparse|nonzero_numpy|repeat_interleave|tensor_split|unique_dim|_nested_tensor_from_mask)\..*"
    r"|where\."
)
_METADATA = re.compile(
    r"(sym_|_is_|is_(?!nonzero)|_use_|_dim|_nested_get|_debug_|_has_|\w*attention)\w*|_fused_sdp_choice|size|dim"
    r"|numel|stride|(dense|sparse)_dim|result_type|_version|cudnn_is_acceptable|_batch_norm_impl_index"
)


@cache
def _plan(func: Any) -> _Plan:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator
        return _PLAIN
    name, writes, _ = signature_of(func)
    opaque = any("Tensor" not in str(result.type) for result in schema.returns)
    reads = torch.Tag.data_dependent_output in func.tags or (opaque and not _METADATA.fullmatch(name))
    sized = torch.Tag.dynamic_output_shape in func.tags or name in _SHAPE_FROM
    sized = sized or bool(_UNTAGGED_SHAPES.fullmatch(f"{name}.{schema.overload_name}"))
    if "batch_norm" in name:
        # In training mode it updates its running statistics, but its schema does not declare the write.
        writes += tuple(position for position, argument in enumerate(schema.arguments) if "running" in argument.name)
    # The result depends only on the shape of the argument. A value that decided that shape has already escaped.
    tensors = sum("Tensor" in str(argument.type) for argument in schema.arguments)
    is_blank = tensors == 1 and bool(re.fullmatch(r"new_\w+|\w+_like", name))
    plan = _Plan(reads, sized, _SHAPE_FROM.get(name), writes, is_blank)
    return _PLAIN if plan == _PLAIN else plan


class _Operators(OperatorMode):
    """Follows sources through operators."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: _Args = (), kwargs: Any = None) -> Any:
        ledger = self._ledger
        mask = ledger.mask(args)
        if kwargs:
            mask |= ledger.mask([*kwargs.values()])
        ledger.compute(mask)
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except Exception:
            # A context manager may swallow it.
            ledger.escape(mask)
            raise
        if mask or ledger.positions:
            plan = _plan(func)
            # In a backward pass, the autograd graph of a view holds the view's position as a plain number.
            if ledger.positions and torch._C._current_graph_task_id() != -1:
                mask |= ledger.positions
            if plan is _PLAIN and not ledger.deferred:
                ledger.taint(result, mask)
            else:
                self._settle(plan, args, kwargs or {}, result, mask)
        return result

    def _settle(self, plan: _Plan, args: _Args, kwargs: _Kwargs, result: object, mask: int) -> None:
        ledger = self._ledger
        mask = 0 if plan.is_blank else mask
        if ledger.deferred:
            mask |= ledger.deferred
            if plan is _PLAIN:
                return ledger.choose(next(iter(args), None), result, mask)
        if plan.reads:
            ledger.reads += 1
            if ledger.deferred is not None and not isinstance(result, Tensor):
                ledger.defer(mask)
            else:
                ledger.read(mask, check=isinstance(result, bool))
        if plan.is_sized:
            sizing: Any = args if plan.shape_from is None else args[plan.shape_from]
            if isinstance(sizing, list):  # indices of a tensor: only masks decide the shape
                sizing = [index for index in sizing if isinstance(index, Tensor) and index.dtype in _MASKS]
            shape_mask = ledger.mask(sizing)
            ledger.read(shape_mask, check=True)
            if plan.shape_from is not None and isinstance(result, tuple):  # (packed data, batch_sizes)
                ledger.taint(result[1], shape_mask)
                result = result[0]
        ledger.taint(result, mask, written=bool(plan.writes))
        for key in plan.writes:
            target = kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None
            ledger.taint(target, mask, written=True)


class _Calls(TorchFunctionMode):
    """Sees the calls that no operator reports, and the calls whose operators report too little."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._find = _handlers().get

    def __torch_function__(self, func: Any, types: Any, args: _Args = (), kwargs: Any = None) -> Any:
        if (handler := self._find(func)) is not None:
            return handler(self, func, args, kwargs or {})
        # This mode is off in the body of a user's function that torch dispatches to: it may read any source.
        if func.__class__ is FunctionType and not (func.__module__ or "").startswith("torch"):
            self._ledger.escape((1 << len(self._ledger.bits)) - 1)
        return func(*args, **kwargs) if kwargs else func(*args)

    def leave(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """Handles calls that give the values of their arguments to Python."""
        skip = _NOT_READ.get(func.__name__, 0)
        leaves = [leaf for leaf in tree_leaves((args[skip:], kwargs)) if isinstance(leaf, Tensor)]
        self._ledger.read(self._ledger.mask(leaves), check=all(leaf.dtype is torch.bool for leaf in leaves))
        return func(*args, **kwargs)

    def scalar(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """Handles reads of a number; ``torch.Tensor([z])`` reads it without an operator call."""
        before, result = self._ledger.reads, func(*args)
        if self._ledger.reads == before:
            self._ledger.read(self._ledger.mask(args), check=args[0].dtype is torch.bool)
        return result

    def expose(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """Handles calls that give the memory of their argument to Python."""
        if sys._getframe(2).f_globals.get("__name__") in OWN:  # the ledger looks up a storage
            return func(*args, **kwargs)
        for storage in memory_of(args[0]):
            self._ledger.entry(storage).shared = True  # whatever is written into it later escapes at once
        return self.leave(func, args, kwargs)

    def copy(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """Handles calls that make a tensor without an operator call, or from memory outside torch."""
        first = 1 if func.__name__ in ("new", "new_tensor", "__set__") else 0
        data = args[first] if len(args) > first else kwargs.get("data", kwargs.get("obj"))
        result = func(*args, **kwargs)
        target = args[0] if result is None else result  # x.data = y
        is_alias = func in (torch.as_tensor, torch.asarray)
        if func is _LIFT or (is_alias and not isinstance(data, (Tensor, list, tuple, int, float))):
            self._ledger.entry(_storage(target)).shared = True
        self._ledger.taint(target, self._ledger.mask(tree_leaves(data)), written=True)
        return result

    def defer(self, func: Any, args: _Args, kwargs: _Kwargs, mask: int = 0) -> Any:
        """Runs a call that reads scalars only as positions; its result depends on them."""
        self._ledger.compute(mask)
        with self._ledger.deferring(mask):
            try:
                result = func(*args, **kwargs)
            except IndexError:
                self._ledger.escape(self._ledger.deferred or 0)
                raise
            self._ledger.place(next(iter(args), None), result, self._ledger.deferred or 0)
            return result

    def parts(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """Handles calls that take a tensor apart into views."""
        parts = tuple(func(*args, **kwargs))
        for part in parts:
            self._ledger.place(next(iter(args), None), part, 0)
        return iter(parts) if func is Tensor.__iter__ else parts

    def one_hot(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """Handles ``one_hot``: without ``num_classes`` its argument decides a shape, else it is only checked."""
        num_classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        return func(*args, **kwargs) if num_classes == -1 else self.defer(func, args, kwargs)

    def index(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """Handles ``x[index]`` and ``x[index] = y``, which read the scalars in the index to make a view."""
        index = args[1]
        if not _is_position(index, masks=func is Tensor.__setitem__):
            return func(*args, **kwargs)
        # Torch converts tensors inside lists without an operator call.
        listed = [item for item in index if isinstance(item, list)] if isinstance(index, tuple) else index
        return self.defer(func, args, kwargs, self._ledger.mask(listed) if isinstance(listed, list) else 0)


def _is_position(index: object, *, masks: bool) -> bool:
    """Whether tensors in an index are only positions: no slice bounds, and scalar masks only if ``masks``."""
    if isinstance(index, (list, tuple)):
        return all(_is_position(item, masks=masks) for item in index)
    if isinstance(index, Tensor):
        return masks or index.dim() > 0 or index.dtype not in _MASKS
    if isinstance(index, slice):
        return not any(isinstance(bound, Tensor) for bound in (index.start, index.stop, index.step))
    return index is None or index is Ellipsis or isinstance(index, int)


@cache
def _handlers() -> Mapping[Any, Callable[[_Calls, Any, _Args, _Kwargs], Any]]:
    cls: Any = Tensor  # several of these names are missing from torch's stubs
    calls: dict[Callable[..., Any], tuple[Any, ...]] = {
        _Calls.leave: (
            *(cls.tolist, cls.apply_, cls.map_, cls.map2_, cls.storage_offset, cls.__repr__, cls.__format__),
            *(cls.__reduce_ex__, cls.tensor_split, torch.tensor_split, torch.functional.tensordot),
            *(torch.ctc_loss, torch.nn.functional.ctc_loss),
        ),
        _Calls.scalar: (cls.item, cls.__bool__, cls.__int__, cls.__float__, cls.__index__, cls.__complex__),
        _Calls.expose: (
            *(cls.numpy, cls.__array__, cls.__dlpack__, cls.data_ptr, cls.untyped_storage, cls.storage),
            *(cls._typed_storage, cls.__cuda_array_interface__.__get__, cls.share_memory_),
        ),
        _Calls.copy: (
            *(torch.tensor, torch.as_tensor, torch.asarray, cls.new_tensor, cls.new, cls.__deepcopy__),
            *(cls.data.__set__, _LIFT),
        ),
        _Calls.one_hot: (torch.nn.functional.one_hot,),
        _Calls.parts: (*(cls.__iter__, cls.unbind, torch.unbind, cls.split, torch.split, cls.chunk, torch.chunk),),
        _Calls.index: (cls.__getitem__, cls.__setitem__),
    }
    return MappingProxyType({call: handler for handler, group in calls.items() for call in group})


class ContainedCalls:
    """Makes only the result of a call depend on the values that the call read in Python.

    A function may read a value in Python (``edit_distance(z.tolist())``). The value then leaves torch. If the call
    gives back nothing but its result, later computations need not depend on the value. The result depends on the
    values that the call read, on its arguments, and on the sources of earlier calls of the same object (a bound
    method, a callable with state).
    """

    def __init__(self, tracker: DependencyTracker) -> None:
        self._ledger = tracker.ledger
        self._before: list[tuple[int, frozenset[int]]] = []
        self._states: dict[int, int] = {}

    def open(self) -> None:
        """Call it right before the function runs."""
        self._before.append((self._ledger.escaped, self._shared()))

    def close(self, function: Any, args: tuple[Any, ...], result: Tensor) -> None:
        """Call it right after the function runs; ``result`` must own its memory."""
        ledger, (before, shared) = self._ledger, self._before.pop()
        mask = ledger.mask([arg for arg in args if isinstance(arg, (Tensor, list, tuple))])
        mask |= ledger.escaped_since(before)
        owner = _owner(function)
        if owner is not None:
            mask |= self._states.get(id(owner), 0)
            self._states[id(owner)] = mask
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
