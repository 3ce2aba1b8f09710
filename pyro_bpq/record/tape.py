r"""Writes down a run of a program, operator by operator, while it runs.

A *value* is a tensor at one moment of the run; what is written into makes another value. Values are numbered. A *node*
is an operator with the values that it took and gave. Below autograd, where the tape listens, views, writes in place,
``out=``, :func:`torch.func.vmap` and scripted functions are plain operators.

A *source* is the value of a sample site. The tape knows for each value the sources that it depends on, as bits. They
are supersets of the true dependencies. Python may *read* a value (``if z``, ``int(z)``, the length of ``x[mask]``). A
read that depends on a source steers the program: what is computed later depends on that source. A read that does not
is a *guard*.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import BuiltinFunctionType, FrameType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from pyro_bpq.record.calls import Calls
from pyro_bpq.record.frames import catcher, is_library_check, line_of_the_program
from pyro_bpq.record.operators import Effects, effects_of, sizing, written_arguments
from pyro_bpq.record.values import Guard, Node, Notes, RecordingError, Table, Value, memory_of, tensors_in, unwrapped

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Tape(Notes, TorchDispatchMode):
    """Writes down what runs inside ``with tape:``.

    It does not see the following, because nothing in torch reports it:

    - work in other threads; the first use of :func:`torch.compile` in a process (later ones run eagerly);
    - ``to_dlpack``; ``tolist`` and ``numpy`` inside a scripted function or a backward pass;
    - numpy arrays that shared memory with a tensor before the tape was entered;
    - an exception that depends on a value and that a context manager of the user's own swallows;
    - data that a distribution keeps of a draw besides the value (a cached ``flow.inv(z)`` lacks ``z``).

    Attributes:
        origins: What the value of each source depended on before.
        inputs: Tensors that no node has made, by value; ``before`` copies of those that were written into.
        noise: Random numbers that were drawn where no source reaches, by value.
        steering: The sources that Python has read so far, as bits.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        TorchDispatchMode.__init__(self)
        self.origins: dict[str, int] = {}
        self.inputs: dict[Value, Tensor] = {}
        self.before: dict[Value, Tensor] = {}
        self.noise: dict[Value, Tensor] = {}
        self.steering = 0
        self.positions = 0  # sources that have chosen a view
        self.deferred: int | None = None  # not None: a function runs that reads positions only; their sources
        self.paused = _Paused()
        self.has_ended = False  # whether the program has: what is read from then on steers nothing
        self._calls_open: list[tuple[int, set[int]]] = []
        self._states: dict[int, int] = {}  # what objects have been handed, by what is called
        self._tensors, self._storages = Table(), Table()
        self._stacks: dict[Value, tuple[int, list[int]]] = {}  # of a stack: the dimension, the sources of each part
        # Storages that were written into: the sources of what was written, the last write, and the storage.
        self._written: dict[int, tuple[int, int, Any]] = {}
        # Of the arguments that are being looked at.
        self._mask, self._after = 0, tuple[int, ...]()
        self._calls = Calls(self)
        self._stack: ExitStack | None = None
        self._outer: FrameType | None = None  # the function that runs the program

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True wraps every operator call in two more Python frames

    def __enter__(self) -> Tape:
        if self._stack is not None:
            raise RuntimeError("The tape is active. Nest another one: with Tape() as inner:")
        with ExitStack() as stack:
            super().__enter__()  # type: ignore[no-untyped-call]
            stack.push(super().__exit__)
            stack.enter_context(self._calls)
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._stack = stack.pop_all()
        self._outer = _caller()
        return self

    def __exit__(self, *error: Any) -> None:
        stack, self._stack, self._outer = self._stack or ExitStack(), None, None
        stack.__exit__(*error)

    def __repr__(self) -> str:
        return f"Tape({len(self.nodes)} operators, {len(self.bits)} sources, steered by {sorted(self.escaped)})"

    # What is asked of it.

    @property
    def escaped(self) -> frozenset[str]:
        """Sources whose value Python has read so far."""
        return self.names(self.steering)

    def names(self, mask: int) -> frozenset[str]:
        """The names of the sources in a mask."""
        return frozenset(name for name, bit in self.bits.items() if mask & bit) if mask else frozenset()

    def mask_of(self, item: object) -> int:
        """The sources that the tensors in a tensor or a pytree depend on, as bits; what is no tensor has none."""
        mask = 0
        with torch._C.DisableTorchFunction():
            for tensor in tensors_in(item):
                mask |= self.masks[self._value(tensor)]
                for storage in memory_of(tensor) if self._written else ():
                    mask |= self._written.get(id(storage), (0,))[0]
        return mask

    def sources_of(self, item: object) -> frozenset[str]:
        """The names of these sources."""
        return self.names(self.mask_of(item))

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor was met."""
        return id(tensor) in self._tensors

    def value_of(self, tensor: Tensor) -> Value:
        """The value that a tensor is now."""
        with torch._C.DisableTorchFunction():
            self._mask, self._after = 0, ()
            value: Value = self.taken(tensor)
            if self._after:
                self.nodes.append(Node(same, (value,), {}, value := self._bind(tensor, self._mask), (), self._after))
            return value

    def source(self, name: str, value: Any) -> Any:
        """Returns ``value``, which from now on depends on the source ``name`` and on nothing else.

        The result is ``value`` itself, so that caches by identity (flows) still know it. It is a copy if the memory of
        ``value`` may be shared: by a view, a leaf that requires gradients, or another source. Gradients flow through
        the copy. What is no tensor counts as read. Names may recur.
        """
        if self._stack is None:
            raise RuntimeError("The tape is not active. Write: with tape: tape.source(name, value)")
        bit = self.bits.setdefault(name, 1 << len(self.bits))
        if not isinstance(value, Tensor):
            self.steer(bit)
            return value
        with torch._C.DisableTorchFunction():
            self.origins[name] = self.origins.get(name, 0) | self.mask_of(value) & ~bit
            with self.paused:
                value = value if self._owns(value, bit) else value.clone()
            self._bind(value, bit)
            for storage in memory_of(value):
                self._written.pop(id(storage), None)
                known = self._storages.of(storage)
                known.mask = known.source = bit
        return value

    def drawn(self, tensor: Tensor, func: Any, law: Sequence[Tensor | Value]) -> Value:
        """Writes down how the value of a source was drawn, from the tensors of its law; returns the value."""
        with torch._C.DisableTorchFunction():
            value, self._mask, self._after = self._value(tensor), 0, ()
            self.nodes.append(Node(func, self.taken(tuple(law)), _NOTHING, value, (), self._after))
            return value

    # Reads.

    def read(self, items: Any, found: Any = None, check: bool = False) -> None:
        """Notes that Python has read tensors, and what it found; a library that only checks an argument does not."""
        mask = self.mask_of(items)
        if self.deferred is not None:
            self.deferred |= mask
        elif mask:
            # A check is an error that is not raised.
            is_check = self.has_ended or (check and is_library_check() and not catcher(self._outer))
            if not is_check:
                self.told.append((mask, found))
                self.steer(mask)
        elif not (check and is_library_check()):
            self.guards.extend([Guard(self._value(tensor), found) for tensor in tensors_in(items)])

    def compute(self, mask: int) -> None:
        """Notes that an operator reads sources: a program that would catch its error learns from it."""
        if mask & ~self.steering and catcher(self._outer):
            self.steer(mask)

    def steer(self, mask: int) -> None:
        """Notes that Python has learned something of these sources."""
        if mask & ~self.steering:
            self.lines[mask & ~self.steering] = line_of_the_program()
            self.steering |= mask

    @contextlib.contextmanager
    def steered_by(self, mask: int) -> Iterator[None]:
        """What is computed within depends on these sources, and on those that are read within, and on no others.

        Functions outside of it catch nothing.
        """
        before, outer = self.steering, self._outer
        self.steering, self._outer = mask, _caller()
        try:
            yield
        finally:
            self.steering |= before
            self._outer = outer

    # Operators.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = effects_of(func)
        if self.paused.depth:
            if self.deferred is not None and kind.reads:
                self.deferred |= self.mask_of(args)
            return func(*args, **kwargs) if kwargs else func(*args)
        try:
            self._mask, self._after, targets = 0, (), list[Tensor]()
            taken = self.taken(args)
            named = {name: self.taken(value) for name, value in kwargs.items()} if kwargs else _NOTHING
            call = func, taken, named, self._mask, self._after
            if not kind.is_total:
                self.compute(self._mask)
            if kind.writes:
                targets = [*tensors_in(written_arguments(kind, args, kwargs))]
                self._keep(targets)
        except Exception as error:
            raise RecordingError(kind.name) from error
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except Exception:
            # A context manager may swallow it.
            self.steer(call[3])
            raise
        try:
            self._noted(kind, call, args, kwargs, result, targets)
        except Exception as error:
            raise RecordingError(kind.name) from error
        return result

    def _noted(self, kind: Effects, call: tuple[Any, ...], args: Any, kwargs: Any, result: Any, targets: Any) -> None:
        """Writes down what an operator has done."""
        func, taken, named, mask, after = call
        # The autograd graph of a view holds the view's position as a plain number.
        positions = self.positions if self.positions and torch._C._current_graph_task_id() != -1 else 0
        if kind.is_plain and not positions:
            own: Any = mask | self.steering
            if (stack := self._stack_of(kind.name, args, taken, after)) is not None:
                own = [part | self.steering for part in stack[1]]
                own = own if kind.name == "unbind" else functools.reduce(int.__or__, own, 0)
            out = self._bind_all(result, own)
            self.nodes.append(Node(func, taken, named, out, (), after))
            if stack and kind.name in ("stack", "slice"):
                self._stacks[out] = stack
            return
        if kind.reads and not isinstance(result, Tensor):
            self.read((args, kwargs), result, check=isinstance(result, bool))
            return
        sizes = 0
        if kind.is_sized:
            found = sizing(kind, args)
            self.read(found, tuple(tuple(tensor.shape) for tensor in tensors_in(result)), check=True)
            sizes = self.mask_of(found)
        mask = self.steering | positions | (0 if kind.is_blank else mask)
        self.note(func, taken, named, result, targets, mask, after)
        if kind.shape_from is not None and isinstance(result, tuple):  # (packed data, batch sizes)
            self.masks[self._value(result[1])] = self._storages.of(result[1].untyped_storage()).mask = sizes
        if kind.is_random and not mask:
            self.noise.update({self._value(tensor): tensor for tensor in tensors_in(result)})

    def note(
        self, func: Any, taken: Any, named: Any, result: Any, targets: Any, mask: int, after: tuple[int, ...] = ()
    ) -> None:
        """Writes down a call. ``targets`` are the tensors that it has written into."""
        before = [self._value(target) for target in targets]
        out = self._bind_all(result, mask)
        written = []
        for target, old in zip(targets, before, strict=True):
            new = self._value(target)
            if new == old:  # it is no result
                new = self._bind(target, mask)
                written.append((old, new))
            self._wrote(target, mask)
        self.nodes.append(Node(func, taken, named, out, (*written,), after))

    def _stack_of(self, name: str, args: Any, taken: Any, after: Any) -> tuple[int, list[int]] | None:
        """The dimension of a stack, or of one that something is taken out of, and the sources of each part of it."""
        if name == "stack":
            rank = args[0][0].dim() + 1
            return (*args[1:], 0)[0] % rank, [self.mask_of(part) | self.steering for part in args[0]]
        if name not in ("select", "slice", "unbind") or after or taken[0] not in self._stacks:
            return None
        stacked, parts = self._stacks[taken[0]]
        dim, *index = args[1:] or (0,)
        if dim % args[0].dim() != stacked:
            return None
        if name == "slice":
            return stacked, parts[slice(*(*index, None, None)[:3])]
        return stacked, [parts[i] for i in index] or parts

    # Writes.

    def _keep(self, targets: Any) -> None:
        """Copies inputs before they are written into for the first time."""
        for target in targets:
            for storage in memory_of(target):
                known = self._storages.get(id(storage))
                for value in () if known is None else known.inputs:
                    if value not in self.before:
                        with self.paused:
                            self.before[value] = self.inputs[value].detach().clone()

    def _wrote(self, target: Tensor, mask: int) -> None:
        """Notes that the next node writes into the memory of a tensor."""
        for storage in memory_of(target):
            key = id(storage)
            mask_so_far = self._written.get(key, (0,))[0]
            self._written[key] = mask_so_far | mask, len(self.nodes), storage
            known = self._storages.get(key)
            if known is not None and known.shared and mask:
                self.steer(mask)
            elif mask:
                self._storages.of(storage).mask |= mask

    # Values.

    def taken(self, item: Any) -> Any:
        """Puts values in place of tensors, and collects their sources and what was written into their memory."""
        if isinstance(item, Tensor):
            known = self._tensors.get(id(item))
            value = self._arrived(item) if known is None else known.value
            self._mask |= self.masks[value]
            if self._written:
                for storage in memory_of(item):
                    found = self._written.get(id(storage))
                    if found is not None:
                        self._mask |= found[0]
                        self._after = (*self._after, found[1])
            return value
        kind = item.__class__
        if kind is tuple:
            return tuple([self.taken(part) for part in item])
        return [self.taken(part) for part in item] if kind is list else item

    def _value(self, tensor: Tensor) -> Value:
        known = self._tensors.get(id(tensor))
        return self._arrived(tensor) if known is None else known.value

    def _arrived(self, tensor: Tensor) -> Value:
        """The value of a tensor that no node has made: an input, or a view that no operator has shown."""
        if (inner := unwrapped(tensor)) is not tensor:
            return self._value(inner)
        storages = memory_of(tensor)
        mask = 0 if storages else (1 << len(self.bits)) - 1
        for storage in storages:
            known = self._storages.get(id(storage))
            mask |= 0 if known is None else known.mask
        value = self._bind(tensor, mask)
        if mask:
            self.opaque[value] = "a view that no operator shows"
        else:
            self.inputs[value] = tensor
            for storage in storages:
                known = self._storages.of(storage)
                known.inputs = (*known.inputs, value)
        return value

    def _bind(self, tensor: Tensor, mask: int) -> Value:
        """A new value, which a tensor is from now on."""
        value = Value(len(self.masks))
        self.masks.append(mask)
        self.shapes.append(None if tensor.is_nested else tensor.shape)
        self.dtypes.append(tensor.dtype)
        self._tensors.of(tensor).value = value
        return value

    def _bind_all(self, result: Any, mask: Any) -> Any:
        if isinstance(result, Tensor):
            if mask:
                for storage in memory_of(result):
                    self._storages.of(storage).mask |= mask
            return self._bind(result, mask)
        masks = mask if isinstance(mask, list) else itertools.repeat(mask)
        return tuple(map(self._bind_all, result, masks)) if isinstance(result, (list, tuple)) else None

    def _owns(self, value: Tensor, bit: int) -> bool:
        """Whether a tensor has its memory to itself, so that the memory may become a source."""
        storages = memory_of(value)
        if value._base is not None or (value.is_leaf and value.requires_grad) or len(storages) != 1:
            return False
        known = self._storages.get(id(storages[0]))
        if known is not None and (known.shared or known.inputs or known.source not in (0, bit)):
            return False
        return value.layout is torch.strided and storages[0].nbytes() == value.numel() * value.element_size()

    # Calls of functions that affect the program only by what they return.

    def open_call(self) -> None:
        """Call it right before such a function runs."""
        self._calls_open.append((self.steering, {key for key, known in self._storages.items() if known.shared}))

    def close_call(self, owner: Any, args: Any, result: Any) -> int:
        """Call it right after: only the result depends on what the function has read, whose sources are returned.

        It has its own memory. It depends on the arguments, too, and on earlier calls of the same object (a bound
        method, a callable with state).
        """
        before, shared = self._calls_open.pop()
        mask = self.mask_of(args) | self.mask_of(result) | (self.steering & ~before)
        self.steering = before
        if owner is not None:
            mask = self._states[id(owner)] = mask | self._states.get(id(owner), 0)
        for key in [key for key, known in self._storages.items() if known.shared and key not in shared]:
            # Only this call saw the memory from outside of torch.
            self._storages[key].shared = False
        return mask

    # For the function mode.

    def hide(self, result: Any, why: str) -> None:
        """Makes results values that no operator can make again."""
        self.opaque.update({self._value(tensor): why for tensor in tensors_in(result)})

    def expose(self, tensor: Tensor) -> None:
        """Whatever is written into the memory of a tensor from now on is read at once."""
        for storage in memory_of(tensor):
            self._storages.of(storage).shared = True

    def made(self, func: Callable[..., Any], args: Any, result: Any, mask: int = 0, targets: Any = ()) -> None:
        """Writes down a call of a function in place of the operators that it ran."""
        self._mask, self._after = 0, ()
        self.note(func, self.taken(args), {}, result, targets, self._mask | mask | self.steering, self._after)


class _Paused:
    """Nothing is written down within."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


def noted(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Calls a function; a tape that is active writes it down in place of the operators that it runs."""
    tape = next((mode for mode in reversed(_get_current_dispatch_mode_stack()) if isinstance(mode, Tape)), None)
    if tape is None:
        return function(*tensors)
    with tape.paused:
        result = unwrapped(function(*tensors))
    tape.made(function, tuple(tensors), result)
    return result


def same(tensor: Tensor) -> Tensor:
    """The tensor itself."""
    return tensor


def _caller() -> FrameType:
    """The function with the ``with`` statement that is entered."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") == "contextlib" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def owner_of(function: Any) -> Any:
    """The object that may keep state between calls, or ``None``."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, ModuleType):
        return None if isinstance(function, (FunctionType, BuiltinFunctionType, type)) else function
    return owner
