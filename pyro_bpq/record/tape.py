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
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_bpq.record.calls import Calls, catcher, entering, is_library_check, line_of_the_program
from pyro_bpq.record.operators import Effects, effects_of, sizing, written_arguments
from pyro_bpq.record.values import (
    Guard,
    Known,
    Ledger,
    Node,
    RecordingError,
    Stack,
    Taken,
    Target,
    Value,
    put_back,
    results_of,
    tensors_in,
)

# Operators that make stacks, and those that take parts out of them.
_OF_STACKS = frozenset(("stack", "select", "slice", "unbind"))


class Tape(Ledger, TorchDispatchMode):
    """Writes down what runs inside ``with tape:``.

    It does not see the following, because nothing in torch reports it:

    - work in other threads;
    - ``to_dlpack``; ``tolist`` and ``numpy`` inside a scripted function or a backward pass;
    - numpy arrays that shared memory with a tensor before the tape was entered;
    - an exception that depends on a value and that a context manager of the user's own swallows;
    - data that a distribution keeps of a draw besides the value (a cached ``flow.inv(z)`` lacks ``z``).

    Attributes:
        origins: What the value of each source depended on before.
        noise: Random numbers that were drawn where no source reaches, by value.
        steering: The sources that Python has read so far, as bits.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        TorchDispatchMode.__init__(self)
        self.origins: dict[str, int] = {}
        self.noise: dict[Value, Tensor] = {}
        self.steering = 0
        self.positions = 0  # sources that have chosen a view
        self.has_ended = False  # whether the program has: what is read from then on steers nothing
        self._calls_open: list[tuple[int, set[int], int, int]] = []
        self._stacks: dict[Value, Stack] = {}
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
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._stack = stack.pop_all()
        self._outer = entering()
        return self

    def __exit__(self, *error: Any) -> None:
        stack, self._stack, self._outer = self._stack or ExitStack(), None, None
        stack.__exit__(*error)
        if any(error):  # the program may run again, in another way
            put_back(self.written)

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
        with torch._C.DisableTorchFunction():
            return self.taken([*tensors_in(item)]).mask

    def sources_of(self, item: object) -> frozenset[str]:
        """The names of these sources."""
        return self.names(self.mask_of(item))

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor was met."""
        return id(tensor) in self._tensors

    def value_of(self, tensor: Tensor) -> Value:
        """The value that a tensor is now."""
        with torch._C.DisableTorchFunction():
            taken = self.taken((tensor,))
            if not taken.after:
                return taken.args[0]
            value: Value = self.bind(tensor, taken.mask)
            self.note(same, taken, value, taken.mask)
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
                value = value if self.storages.owns(value, bit) else value.clone()
            self.bind(value, bit)
            for known in self.storages.behind(value):
                known.mask = known.source = bit
                known.written, known.last_write = 0, None
        return value

    def drawn(self, tensor: Tensor, func: Any, law: Sequence[Tensor | Value]) -> Value:
        """Writes down how the value of a source was drawn, from the tensors of its law; returns the value."""
        with torch._C.DisableTorchFunction():
            value, taken = self.value(tensor), self.taken(tuple(law))
            self.note(func, taken, value, taken.mask)
            return value

    # Reads.

    def read(self, items: Any, found: Any = None, check: bool = False) -> None:
        """Notes that Python has read tensors, and what it found; a library that only checks an argument does not."""
        mask = self.mask_of(items)
        is_check = check and is_library_check()
        if mask:
            # A check is an error that is not raised.
            if not (self.has_ended or (is_check and not catcher(self._outer))):
                self.told.append((mask, found))
                self.steer(mask)
        elif not is_check:
            self.guards.extend([Guard(self.value(tensor), found) for tensor in tensors_in(items)])

    def compute(self, mask: int, reads: Iterable[Value] = ()) -> None:
        """Notes that an operator reads sources, or values: a program that would catch its error learns from it."""
        if (mask & ~self.steering or not mask) and catcher(self._outer):
            self.steer(mask)
            self.guards.extend([] if mask else [Guard(value, None) for value in reads])

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
        self.steering, self._outer = mask, entering()
        try:
            yield
        finally:
            self.steering |= before
            self._outer = outer

    # Operators.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused.depth:
            return func(*args, **kwargs)
        kind = effects_of(func)
        try:
            taken = self.taken(args, kwargs)
            if not kind.is_total:
                self.compute(taken.mask, taken.reads)
            targets = self.targets(written_arguments(kind, args, kwargs)) if kind.writes else []
        except Exception as error:
            raise RecordingError(kind.name) from error
        try:
            result = func(*args, **kwargs)
        except Exception:
            # A context manager may swallow it.
            self.steer(taken.mask)
            raise
        try:
            if kind.reads and not isinstance(result, Tensor):
                self.read((args, kwargs), result, check=isinstance(result, bool))
            else:
                self._noted(kind, func, taken, args, result, targets)
        except Exception as error:
            raise RecordingError(kind.name) from error
        return result

    def _noted(self, kind: Effects, func: Any, taken: Taken, args: Any, result: Any, targets: list[Target]) -> None:
        """Writes down what an operator has done."""
        sizes = 0
        if kind.is_sized:
            found = sizing(kind, args)
            self.read(found, tuple(tuple(tensor.shape) for tensor in tensors_in(result)), check=True)
            sizes = self.mask_of(found)
        # The autograd graph of a view holds the view's position as a plain number.
        positions = self.positions if self.positions and torch._C._current_graph_task_id() != -1 else 0
        mask = self.steering | positions | (0 if kind.is_blank else taken.mask)
        is_of_stack = kind.name in _OF_STACKS and not (kind.writes or positions)
        stack = self._stack_of(kind.name, taken, args) if is_of_stack else None
        own: Sequence[int] = ()
        if stack is not None:
            mask, own = functools.reduce(operator.or_, stack.parts, 0), stack.parts
        elif kind.shape_from is not None:  # maybe (packed data, batch sizes)
            own = [mask, sizes]
        if kind.takes_type and not taken.reads:
            # It may run again under another default type.
            taken = taken._replace(kwargs={**taken.kwargs, "dtype": result.dtype})
        out = self.bind_all(result, mask, own)
        self.note(func, taken, out, mask, targets)
        if stack is not None and kind.name in ("stack", "slice"):
            self._stacks[out] = stack
        if kind.is_random and not mask:
            self.noise.update({self.value(tensor): tensor for tensor in tensors_in(result)})

    def _stack_of(self, name: str, taken: Taken, args: Any) -> Stack | None:
        """The stack that an operator makes, or the part of one that it takes out."""
        stack: Stack | None
        if name == "stack":
            tensors, dim = (*args, 0)[:2]
            stack = Stack(dim % (tensors[0].dim() + 1), [*map(self.mask_of, tensors)])
        else:
            stack = None if taken.after else self._stacks.get(taken.args[0])
            stack = stack and stack.part(name, args[0].dim(), *args[1:])
        return stack and stack._replace(parts=[part | self.steering for part in stack.parts])

    def note(self, func: Any, taken: Taken, out: Any, mask: int, targets: Iterable[Target] = ()) -> None:
        """Adds a node that has made some values, and has written into ``targets``."""
        written: tuple[tuple[Value, Value], ...] = ()
        for target, old in targets:
            self.has_writes = True
            if self.value(target) == old:  # it is no result
                written = (*written, (old, self.bind(target, mask)))
            for known in self.storages.behind(target):
                known.written |= mask
                known.last_write = len(self.nodes)
                known.parted = known.parted or bool(known.rows and known.views())
                if known.shared:
                    self.steer(mask)
                else:
                    known.mask |= mask
        self.nodes.append(Node(func, taken.args, taken.kwargs, out, taken.reads, written, taken.after))

    # Calls of functions that affect the program only by what they return.

    def open_call(self) -> None:
        """Call it right before such a function runs."""
        shared = {key for key, known in self.storages.items() if known.shared}
        self._calls_open.append((self.steering, shared, len(self.guards), len(self.told)))

    @property
    def has_read(self) -> bool:
        """Whether Python has read something since such a function was called."""
        steering, _, *before = self._calls_open[-1]
        return self.steering != steering or [len(self.guards), len(self.told)] != before

    def close_call(self, args: Any, result: Any) -> int:
        """Call it right after: only the result depends on what the function has read, whose sources are returned.

        It has its own memory. It depends on the arguments, too.
        """
        before, shared, guards, told = self._calls_open.pop()
        # What is read within switches nothing.
        del self.guards[guards:], self.told[told:]
        mask = self.mask_of(args) | self.mask_of(result) | (self.steering & ~before)
        self.steering = before
        for key, known in self.storages.items():
            # Memory that only this call saw from outside of torch is no longer shared.
            known.shared = known.shared and key in shared
        return mask

    # For the function mode.

    def hide(self, result: Any, why: str) -> None:
        """Makes results values that no operator can make again."""
        self.opaque.update({self.value(tensor): why for tensor in tensors_in(result)})

    def expose(self, tensor: Tensor) -> None:
        """Whatever is written into the memory of a tensor from now on is read at once."""
        for known in self.storages.behind(tensor):
            known.shared = True

    def puts_back(self, known: Known, index: Any, row: Any) -> bool:
        """Whether a row that was taken at an index, and was written into last, comes back there."""
        taken = any(view() is row and at is index and not before for view, at, before in known.rows)
        return taken and known.last_write is not None and self.value(row) in results_of(self.nodes[known.last_write])

    def made(self, func: Callable[..., Any], args: Any, result: Any, mask: int = 0, targets: Any = ()) -> None:
        """Writes down a call of a function in place of the operators that it ran."""
        taken, before = self.taken(args), self.targets(targets)
        mask |= taken.mask | self.steering
        self.note(func, taken, self.bind_all(result, mask), mask, before)


def same(tensor: Tensor) -> Tensor:
    """The tensor itself."""
    return tensor
