"""The ledger of dependencies: a mask of sources for each storage, the memory behind tensors."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_bpq.tracing.catching import catcher

OWN = tuple(f"pyro_bpq.tracing.{name}" for name in ("ledger", "provenance", "component_costs", "work"))
"""The tracker's own modules. They look at memory only to follow it, and at operators only to count them."""

# Modules that read booleans and shapes only to check arguments; the caller sees no effect of it.
_LIBRARIES = ("torch.distributions.", "pyro.distributions.", "pyro.poutine.", "pyro.util", "pyro.primitives")

NO_STORAGE = (NotImplementedError, RuntimeError)  # raised for sparse tensors and inside torch.func

_storage = Tensor.untyped_storage


class OperatorMode(TorchDispatchMode):
    """Sees every operator that runs, below autograd and :mod:`torch.func`, higher-order ones included."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True wraps every operator call in two more Python frames


@cache
def signature_of(func: Any) -> tuple[str, tuple[int | str, ...], bool]:
    """An operator's name, the positions or names of what it writes into, and whether its result is a view."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator
        return "", (), False
    writes = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    return schema.name.removeprefix("aten::"), writes, is_view


class Entry(weakref.ref[torch.UntypedStorage]):
    """The record of one storage. It vanishes with the storage, so that a reused address starts clean.

    ``views`` holds, for each view that a source has chosen (``table[z]``), these sources. A view that the tracker did
    not see being made depends on all of ``chosen``. A view of the whole storage depends on none of them: nothing was
    chosen.
    """

    key: int
    mask: int
    source: int = 0  # the bit of the source whose value this storage holds
    shared: bool = False  # visible to Python objects outside torch
    chosen: int = 0
    views: dict[int, tuple[weakref.ref[Tensor], int]] | None = None

    def mask_of(self, view: Tensor) -> int:
        """Returns the sources of a view of the storage, as bits."""
        if self.views is None:
            return self.mask
        return self.mask | self._choice(view, 0 if _is_whole(view) else self.chosen)

    def _choice(self, view: Tensor, unseen: int) -> int:
        """The sources that chose a view; ``unseen`` if it is not known."""
        known = (self.views or {}).get(id(view))
        return known[1] if known is not None and known[0]() is view else unseen

    def add(self, view: Tensor, mask: int) -> None:
        """Records that the choice of ``view`` depends on ``mask``."""
        self.views = self.views or {}
        self.views[id(view)] = (weakref.ref(view), mask | self._choice(view, 0))
        self.chosen |= mask


class Ledger:
    """The knowledge of a tracker: a bit for each source, and a mask of bits for each storage."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.bits: dict[str, int] = {}
        self.origins: dict[str, int] = {}
        self.escaped = 0
        self.heard: int | None = None  # the sources that were read while it listens
        self.reads = 0
        self.positions = 0  # sources that have chosen a view
        self.deferred: int | None = None  # not None: collects the sources of scalars read as positions
        self.outer: FrameType | None = None  # the function that runs the program
        entries = self.entries
        self._expire: Callable[[Any], Any] = lambda entry: entries.pop(entry.key, None)

    def listen(self) -> None:
        """Collects the sources that are read from now on."""
        self.heard = 0

    def stop_listening(self) -> int:
        """Returns the sources that were read since :meth:`listen`; all that ever were if nothing listened."""
        found, self.heard = self.escaped if self.heard is None else self.heard, None
        return found

    def escaped_since(self, before: int) -> int:
        """Returns the sources that have escaped since ``before`` was all of them, and takes them back."""
        found, self.escaped = self.escaped & ~before, before
        return found

    @contextlib.contextmanager
    def deferring(self, mask: int) -> Iterator[None]:
        """Adds the sources of scalars that are read to ``deferred``, which starts with those of a mask."""
        before, self.deferred = self.deferred, mask
        self.positions |= mask
        try:
            yield
        finally:
            self.deferred = before

    def defer(self, mask: int) -> None:
        """Adds sources to ``deferred``: they have chosen a view."""
        self.deferred = (self.deferred or 0) | mask
        self.positions |= mask

    def names(self, mask: int) -> frozenset[str]:
        """Returns the names of the sources in a mask."""
        return frozenset(name for name, bit in self.bits.items() if mask & bit) if mask else frozenset()

    def entry(self, storage: torch.UntypedStorage, mask: int = 0) -> Entry:
        """Returns the entry of a storage; for an unknown storage, a new entry with the sources ``mask``."""
        key = id(storage)
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = Entry(storage, self._expire)
            entry.key, entry.mask = key, mask
        return entry

    def mask(self, value: object) -> int:
        """Returns the sources of a tensor, or of all tensors in nested lists and tuples, as bits."""
        mask = 0
        if isinstance(value, Tensor):
            storages = memory_of(value)
            for storage in storages:
                entry = self.entries.get(id(storage))
                if entry is not None:
                    mask |= entry.mask_of(value)
            return mask if storages else (1 << len(self.bits)) - 1
        if isinstance(value, (list, tuple)):
            for item in value:
                mask |= self.mask(item)
        return mask

    def taint(self, value: object, mask: int, *, written: bool = False) -> None:
        """Adds sources to the tensors in a result; ``written`` says that new data went into their memory."""
        if isinstance(value, Tensor):
            for storage in memory_of(value):
                entry = self.entries.get(id(storage))
                if entry is None:
                    if mask:
                        self.entry(storage, mask)
                elif entry.views is not None and not written:
                    entry.add(value, mask)
                else:
                    entry.mask |= mask
                    if entry.shared:
                        self.read(mask, check=False)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.taint(item, mask, written=written)

    def owns(self, value: Tensor, bit: int) -> bool:
        """Whether ``value`` has its memory to itself, so that the memory may become the source ``bit``."""
        storages = memory_of(value)
        if value._base is not None or (value.is_leaf and value.requires_grad) or len(storages) != 1:
            return False
        entry = self.entries.get(id(storages[0]))
        if entry is not None and (entry.shared or entry.views is not None or entry.source not in (0, bit)):
            return False
        return value.layout is torch.strided and storages[0].nbytes() == value.numel() * value.element_size()

    def choose(self, base: object, result: object, mask: int) -> None:
        """Records that ``result`` was taken from ``base`` at a position that depends on ``mask``."""
        storages = memory_of(result) if isinstance(result, Tensor) else ()
        if not isinstance(base, Tensor) or len(storages) != 1 or storages != memory_of(base):
            return self.taint(result, mask, written=True)
        entry = self.entry(storages[0])
        before = entry.mask_of(base) & ~entry.mask
        entry.add(base, before)
        entry.add(result, before | mask)  # type: ignore[arg-type]

    def place(self, base: object, result: object, mask: int) -> None:
        """Records that a program gets ``result``, which may be a view of ``base`` whose choice depends on ``mask``.

        Views that are made before a source chooses one are recorded too: what is chosen later does not move them.
        """
        if not isinstance(base, Tensor) or not isinstance(result, Tensor):
            return
        storages = memory_of(result)
        if len(storages) == 1 and storages == memory_of(base):
            entry = self.entry(storages[0])
            entry.add(result, (entry.mask_of(base) | mask) & ~entry.mask)

    def read(self, mask: int, *, check: bool) -> None:
        """Records that a value left torch, unless ``check`` is set and a library only checks an argument."""
        # A check is an error that is not raised.
        if self._is_new(mask) and not (check and self._is_library_check() and not catcher(self.outer)):
            self.escape(mask)

    def compute(self, mask: int) -> None:
        """Records that an operator reads sources: a program that would catch its error learns from it."""
        if self._is_new(mask) and catcher(self.outer):
            self.escape(mask)

    def _is_new(self, mask: int) -> bool:
        return bool(mask & ~(self.escaped if self.heard is None else self.escaped & self.heard))

    def escape(self, mask: int) -> None:
        """Records that the values of the sources in ``mask`` have left torch."""
        self.escaped |= mask
        if self.heard is not None:
            self.heard |= mask

    def _is_library_check(self) -> bool:
        """Whether the nearest caller outside of torch's internals is one of the libraries."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            module = frame.f_globals.get("__name__") or ""
            if module.startswith(_LIBRARIES):
                return bool(frame.f_code.co_name != "__eq__")  # the caller of == gets the answer
            if module != "torch" and module not in OWN and not module.startswith("torch."):
                return False
            frame = frame.f_back
        return False


def _is_whole(view: Tensor) -> bool:
    """Whether a tensor covers its storage."""
    try:
        return view.is_contiguous() and view.numel() * view.element_size() == _storage(view).nbytes()
    except NO_STORAGE:
        return False


def memory_of(value: Tensor) -> tuple[torch.UntypedStorage, ...]:
    """Returns the storages that hold the data of a tensor; empty if they cannot be reached."""
    try:
        return (_storage(value),)
    except NO_STORAGE:
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            return memory_of(torch._C._functorch.get_unwrapped(value))
        if value.layout is torch.sparse_coo:
            return memory_of(value._indices()) + memory_of(value._values())
        return ()
