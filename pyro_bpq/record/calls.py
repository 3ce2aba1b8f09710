"""Sees what no operator reports: calls of torch's functions, and the function of the program that makes them.

That function may catch an error, and learn something; a library may only check an argument.
"""

from __future__ import annotations

import abc
import contextlib
import dis
import linecache
import sys
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from functools import cache, lru_cache
from types import CodeType, FrameType, FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pyro_bpq.record.operators import is_position, one_hot, put, remade, selected

if TYPE_CHECKING:
    from pyro_bpq.record.tape import Tape

_LIFT = torch.ops.aten.lift_fresh.default  # seen for torch.from_numpy
_ALIASES = frozenset((torch.as_tensor, torch.asarray))
# Number of leading arguments that Python does not read: operators follow them.
_NOT_READ = MappingProxyType({"tensor_split": 1, "tensordot": 2, "ctc_loss": 2})

# Libraries whose functions and classes are taken to be constant.
_CORE = frozenset({"torch", "pyro", "numpy", "math", "functools", "itertools", "pyro_bpq", "builtins", "opt_einsum"})
# Classes of libraries whose code reads nothing of what classes of the user's add to them.
_BARE = frozenset((object, nn.Module, PyroModule, abc.ABC, Generic, Protocol))
# Names in code that reads attributes without naming them, or in another thread.
LOOKUPS = frozenset(
    "getattr vars dir __dict__ __getattribute__ attrgetter methodcaller asdict astuple getmembers eval exec format "
    "format_map MATCH_CLASS submit Thread".split()
)
# Number of changes after which a number counts the steps, and switches nothing; and an attribute is a log.
MOST_CHANGES = 4

OWN = ("pyro_bpq.record.",)
"""Modules that call on behalf of the program. They look at memory only to follow it."""

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Calls(TorchFunctionMode):
    """The function mode of a tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self._find = handlers().get

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        if (name := self._find(func)) is not None:
            return getattr(self, name)(func, args, kwargs or {})
        # This mode is off in the body of a user's function that torch dispatches to: it may read any source.
        if func.__class__ is FunctionType and not (func.__module__ or "").startswith("torch"):
            self.tape.steer((1 << len(self.tape.bits)) - 1)
        return func(*args, **kwargs) if kwargs else func(*args)

    def leave(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Handles calls that give the values of their arguments to Python."""
        skip = _NOT_READ.get(func.__name__, 0)
        leaves = [leaf for leaf in tree_leaves((args[skip:], kwargs)) if isinstance(leaf, Tensor)]
        result = func(*args, **kwargs)
        self.tape.read(leaves, _told(result), check=all(leaf.dtype is torch.bool for leaf in leaves))
        return result

    def scalar(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Handles reads of a number; ``torch.Tensor([z])`` reads it without an operator."""
        try:
            with self.tape.paused:
                result = func(*args)
        except Exception:  # of several elements
            self.tape.steer(self.tape.mask_of(args[0]))
            raise
        self.tape.read(args[0], result, check=args[0].dtype is torch.bool)
        return result

    def expose(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Handles calls that give the memory of their argument to Python."""
        if (sys._getframe(2).f_globals.get("__name__") or "").startswith(OWN):  # the tape looks up a storage
            return func(*args, **kwargs)
        return self.exposed(func, args, kwargs)

    def exposed(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Handles those of the program."""
        self.tape.expose(args[0])  # whatever is written into it later is read at once
        return self.leave(func, args, kwargs)

    def copy(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Handles calls that make a tensor without an operator, or from memory outside torch."""
        first = 1 if func.__name__ in ("new", "new_tensor", "__set__") else 0
        data = args[first] if len(args) > first else kwargs.get("data", kwargs.get("obj"))
        tape = self.tape
        with tape.paused:
            result = func(*args, **kwargs)
        target = args[0] if result is None else result  # x.data = y
        if func is _LIFT or (func in _ALIASES and not isinstance(data, (Tensor, list, tuple, int, float))):
            tape.expose(target)
        leaves = tree_leaves(data)
        if all(isinstance(leaf, (bool, int, float)) for leaf in leaves):
            tape.constants.add(tape.value_of(target))
        elif target is not data and any(isinstance(leaf, Tensor) for leaf in leaves):
            tape.made(remade, (data, target.dtype, target.device), target)
            if torch._C._functorch.is_functorch_wrapped_tensor(target):
                tape.hide(target, func.__name__)
        return result

    def defer(self, func: Any, args: Args, kwargs: Kwargs, again: Any, positions: Any) -> Any:
        """Runs a call that reads some scalars only as positions; its result depends on them."""
        tape, mask, written = self.tape, self.tape.mask_of(positions), args[:1] if again is put else ()
        tape.compute(mask)
        tape.keep(written)
        try:
            with tape.paused:
                result = func(*args, **kwargs)
        except IndexError:
            tape.steer(tape.mask_of(args))
            raise
        tape.positions |= mask
        memory = tape.storages.behind(args[0])
        back = [tape.puts_back(known, *args[1:]) for known in memory] if again is put else []
        for known in memory if any(back) else ():
            known.parted = False
        tape.made(again, (*args, *kwargs.values()), result, targets=written)
        for known in memory if any(back) else ():
            # x[i] += y puts the row back that it has taken, so that nothing of it is lost; other rows are older.
            known.parted = len(known.views()) > 1
        for known in memory if again is selected else ():
            known.rows = (*known.rows, (weakref.ref(result), args[1], known.parted))
        if torch._C._functorch.maybe_current_level() is not None and result is not None:
            tape.hide(result, func.__name__)
        return result

    def one_hot(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Handles ``one_hot``: without ``num_classes`` its argument decides a shape, else it is only checked."""
        num_classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        return func(*args, **kwargs) if num_classes == -1 else self.defer(func, args, kwargs, one_hot, args[0])

    def cond(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Handles ``torch.cond`` as the ``if`` that it stands for: without a compiler it has no gradient."""
        holds, first, second, operands = args
        with self:
            return first(*operands) if holds else second(*operands)

    def index(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Handles ``x[index]`` and ``x[index] = y``, which read the scalars in the index to make a view."""
        is_write = func is Tensor.__setitem__
        # Forward differentiation takes positions as numbers.
        if not is_position(args[1], masks=is_write) or forward_ad._current_level >= 0:
            return func(*args, **kwargs)
        index = args[1]
        if not any(isinstance(leaf, Tensor) and leaf.dim() == 0 for leaf in tree_leaves(index)):
            return func(*args, **kwargs)
        return self.defer(func, args, kwargs, put if is_write else selected, index)


def _told(result: Any) -> Any:
    """What Python has got, as long as it is small."""
    return result if isinstance(result, (bool, int, float, str)) else None


@cache
def handlers() -> Mapping[Any, str]:
    """The methods of :class:`Calls` that handle functions, by function."""
    cls: Any = Tensor  # several of these names are missing from torch's stubs
    calls: dict[str, tuple[Any, ...]] = {
        "leave": (
            *(cls.tolist, cls.apply_, cls.map_, cls.map2_, cls.storage_offset, cls.__repr__, cls.__format__),
            *(cls.__reduce_ex__, cls.tensor_split, torch.tensor_split, torch.functional.tensordot),
            *(torch.ctc_loss, torch.nn.functional.ctc_loss),
        ),
        "scalar": (cls.item, cls.__bool__, cls.__int__, cls.__float__, cls.__index__, cls.__complex__),
        "expose": (
            *(cls.numpy, cls.__array__, cls.__dlpack__, cls.data_ptr, cls.untyped_storage, cls.storage),
            *(cls._typed_storage, cls.__cuda_array_interface__.__get__, cls.share_memory_),
        ),
        "copy": (
            *(torch.tensor, torch.as_tensor, torch.asarray, cls.new_tensor, cls.new, cls.__deepcopy__),
            *(cls.data.__set__, _LIFT),
        ),
        "one_hot": (torch.nn.functional.one_hot,),
        "cond": (torch.ops.higher_order.cond,),
        "index": (cls.__getitem__, cls.__setitem__),
    }
    return MappingProxyType({call: name for name, group in calls.items() for call in group})


# Modules that read booleans and shapes only to check arguments; the caller sees no effect of it.
_LIBRARIES = ("torch.distributions.", "pyro.distributions.", "pyro.poutine.", "pyro.util", "pyro.primitives")


def catcher(outer: FrameType | None) -> FrameType | None:
    """The function of the user's within ``outer`` that would catch an error raised now; ``None`` if none would.

    A ``with`` counts where the function names ``suppress``. Other context managers are taken to let errors through, and
    so are libraries.
    """
    for frame, module in frames(outer):
        if not is_library(module) and any(start <= frame.f_lasti < end for start, end in _caught(frame.f_code)):
            return frame
    return None


def entering() -> FrameType:
    """The function with the ``with`` statement that is entered."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") == "contextlib" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def frames(outer: FrameType | None = None) -> Iterator[tuple[FrameType, str]]:
    """The functions that run, from the one that called the caller to one that is ``outer``, and their modules."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame is not outer:
        yield frame, frame.f_globals.get("__name__") or ""
        frame = frame.f_back


@lru_cache(maxsize=4096)
def _caught(code: CodeType) -> tuple[tuple[int, int], ...]:
    """The instructions of a function whose errors it catches, as ranges of offsets."""
    lines, suppresses = dis.Bytecode(code), "suppress" in code.co_names
    names, entries = {line.offset: line.opname for line in lines}, getattr(lines, "exception_entries", None)
    if entries is None:  # Python 3.10: an instruction begins a block, and names its handler
        begins = ("SETUP_FINALLY", "SETUP_WITH")[: 1 + suppresses]
        return tuple((line.offset, line.argval) for line in lines if line.opname in begins)
    ends = {"PUSH_EXC_INFO": None if suppresses else "WITH_EXCEPT_START"}
    return tuple(
        (entry.start, entry.end)
        for entry in entries
        if (name := names[entry.target]) in ends and names[entry.target + 2] != ends[name]
    )


def is_library_check() -> bool:
    """Whether the nearest caller outside of torch's internals and of this package is one of the libraries."""
    for frame, module in frames():
        if module.startswith(_LIBRARIES):
            return frame.f_code.co_name != "__eq__"  # the caller of == gets the answer
        # Statements call functions that the program has handed over.
        if module == "pyro_bpq.record.statements" or not f"{module}.".startswith(("torch.", "pyro_bpq.")):
            return False
    return False


def line_of_the_program() -> str:
    """The line of the program that runs."""
    for frame, module in frames():
        if not module.startswith(("torch", "pyro.", *OWN)) and not frame.f_code.co_filename.startswith("<"):
            return f"{text_of(frame)!r} in {frame.f_code.co_name}, line {frame.f_lineno}"
    return "a library"


def text_of(frame: FrameType) -> str:
    """The line of a function that runs."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


class Logs:
    """Attributes that change from call to call, and that no code has named which has run in recorded runs since then.

    Attributes:
        left_out: Their classes and names. They are no part of a call.
    """

    def __init__(self) -> None:
        self.left_out: frozenset[tuple[type, str]] = frozenset()
        self._last: Mapping[tuple[type, str], list[Hashable]] = {}
        self._changes, self._read = Counter[tuple[type, str]](), set[str]()

    def note(self, found: Mapping[tuple[type, str], list[Hashable]], looks_up: bool) -> None:
        """Notes what attributes look like in a call, and whether something in it reads any of them by name."""
        self._read.update(LOOKUPS if looks_up else ())
        self._changes.update(place for place, spec in found.items() if self._last.get(place, spec) != spec)
        self._last = found

    @contextlib.contextmanager
    def watched(self, is_recorded: bool) -> Iterator[None]:
        """Notes the names in code that runs in a recorded run, once attributes have changed in several calls."""
        often = [place for place, number in self._changes.items() if number > MOST_CHANGES]
        if not (is_recorded and often) or sys.gettrace() is not None:
            self.left_out = frozenset() if is_recorded else self.left_out  # a debugger watches
            yield
            return
        ran = dict[CodeType, Mapping[str, Any]]()
        sys.settrace(lambda frame, *_: ran.update({frame.f_code: frame.f_globals}))
        try:
            yield
        finally:
            sys.settrace(None)
        self._read.update(*(names_of(code) for code, space in ran.items() if not _is_core(str(space.get("__name__")))))
        self.left_out = frozenset(place for place in often if self._read.isdisjoint((place[1], *LOOKUPS)))


@lru_cache(maxsize=1024)
def names_of(code: CodeType) -> tuple[str, ...]:
    """The names in a function and in the functions that it makes, and that of the operator which looks names up."""
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in names_of(part)]
    matches = ("MATCH_CLASS",) * (dis.opmap["MATCH_CLASS"] in code.co_code[::2])
    return tuple(dict.fromkeys((*code.co_names, *matches, *inner)))


@lru_cache(maxsize=1024)
def is_own(kind: type) -> bool:
    """Whether no library's code reads what objects of a class have besides."""
    return not is_of_library(kind) and all(base in _BARE or not is_of_library(base) for base in kind.__mro__)


def is_of_library(item: Any) -> bool:
    """Whether a function or class belongs to a library, or to Python."""
    module = getattr(item, "__module__", None)
    return isinstance(module, str) and is_library(module)


@lru_cache(maxsize=1024)
def is_library(module: str) -> bool:
    """Whether a module belongs to a library, or to Python."""
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None) or ""
    return _is_core(module) or "site-packages" in file or "dist-packages" in file


def _is_core(module: str) -> bool:
    head = module.partition(".")[0]
    return head in _CORE or head in sys.stdlib_module_names
