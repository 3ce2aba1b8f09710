r"""What a call hands to its programs, and what the programs can reach besides.

A recording holds for calls that look the same: equal numbers, flags and texts, tensors of equal shapes and types. The
tensors themselves may differ, they are inputs. Reached are arguments, parameters, what functions close over, the
globals that they name, arguments of partials, settings of handlers, attributes of modules, of plain objects and of
their classes, and functions of these classes. What a trainer logs on itself is no part of it.
"""

from __future__ import annotations

import functools
import itertools
from argparse import Namespace
from collections import ChainMap, UserDict
from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from operator import attrgetter, methodcaller
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import numpy
import torch
from pyro.infer import ELBO
from pyro.poutine.messenger import Messenger
from pyro.poutine.replay_messenger import ReplayMessenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor, nn

from pyro_bpq.record.calls import LOOKUPS, MOST_CHANGES, Logs, is_library, is_of_library, is_own, names_of

_PLAIN = (bool, int, float, complex, str, bytes, NoneType, Enum, torch.dtype, torch.device, torch.Size, range)
# Most of what is reached is of these very types, which is sooner told.
_PLAINEST = frozenset((*_PLAIN, Fraction, Decimal, timedelta, date, datetime))
# Attributes of handlers that change while they are in use.
_IN_USE = frozenset({"_installed", "_wraps", "trace", "args_kwargs"})
# Where methods of a class, its properties and the like hold their function.
_WRAPPED = ("__func__", "fget", "func")
# More things than these belong to a program that reaches a whole library or data set; arrays of more numbers are data.
_MOST, _MOST_NUMBERS = 20_000, 1000

# Where something is: a name, or a format, the place that it is in, and what tells it apart there. Most are never shown.
Path = str | tuple[Any, ...]


class Kind(NamedTuple):
    """What a recording depends on in an input."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_graded: bool

    def __repr__(self) -> str:
        shape, more = tuple(self.shape), ", with gradient" if self.is_graded else ""
        return f"a {self.dtype} tensor of shape {shape} and strides {self.strides} on {self.device}{more}"


def kind_of(tensor: Tensor) -> Kind:
    """The kind of a tensor."""
    return Kind(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def in_words(path: Path) -> str:
    """A path as it is shown."""
    if isinstance(path, str):
        return path
    form, parent, *rest = path
    return str(form).format(in_words(parent), *rest)


def reach(
    roots: Mapping[str, Any], logs: Logs | None = None, without: Iterable[tuple[Any, AbstractSet[str]]] = ()
) -> Call:
    """What can be reached from some roots, the handlers around the call, and the modes of torch.

    Some attributes of some objects are left out: the state of a simulator changes in every step.
    """
    call = Call()
    for item, names in without:
        call._states[id(item)] = names
        if not getattr(item, "__dict__", None):  # as a partial: its state is elsewhere
            call._seen[id(item)] = -1
    call.note("torch's default type", (torch.get_default_dtype(), torch.get_default_device()))
    for kind in ("cpu", "cuda"):
        call.note("autocast", torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind))
    for name, root in roots.items():
        call.visit(name, root)
    for handler in _PYRO_STACK:
        # The handler of SVI sees parameters only, and our own ones draw in place of the generator.
        is_of_parameters = isinstance(handler, TraceMessenger) and handler.param_only
        if not (is_of_parameters or type(handler).__module__.startswith("pyro_bpq.")):
            call.visit(f"the handler {type(handler).__name__}", handler)
    call.end(logs or Logs())
    return call


def attributes_of(item: Any) -> dict[str, Any]:
    """What each attribute of an object looks like."""
    found = {}
    for name, value in getattr(item, "__dict__", {}).items():
        call = Call()
        call._seen[id(item)] = -1
        call.visit(name, value)
        call.end(Logs())
        found[name] = call.spec
    return found


class Call:
    """What a call looks like.

    Attributes:
        spec: Everything in the order in which it is reached, tensors by their kinds.
        paths: Where each entry of ``spec`` was found.
        tensors: The tensors, in the order in which they are reached, each once.
        modes: Whether gradients are on, and whether torch infers only.
        modules: Modules with buffers.
        arrays: Arrays of numpy, and where each was found; large ones are told apart by identity.
    """

    def __init__(self) -> None:
        self.spec: list[Hashable] = []
        self.paths: list[Path] = []
        self.tensors: list[Tensor] = []
        self.modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.modules: list[nn.Module] = []
        self.arrays: list[tuple[Path, Any]] = []
        # What ``spec`` tells by its identity, which must not be given again.
        self._kept: list[Any] = []
        self._seen = dict[int, Hashable]()
        # Attributes of objects of the user's own: where they are, the class, the name, the value.
        self._own: list[tuple[Path, type, str, Any]] = []
        # The one that is looked into, and where it starts; whether something reads attributes whose name it holds.
        self._place: Hashable = ""
        self._first, self._looks_up = 0, False
        self._classes = set[type]()
        self._named = dict[int, set[str]]()  # the names that were looked up in each module, by its identity
        self._states = dict[int, AbstractSet[str]]()  # attributes that are left out, by object

    def difference(self, other: Call) -> str:
        """Where another call first differs from this one, in words; empty where the two are alike."""
        for path, mine, yours in zip(self.paths, self.spec, other.spec, strict=False):
            if mine != yours:
                if isinstance(mine, bytes) and isinstance(yours, bytes):
                    return f"{in_words(path)} have changed"
                return f"{in_words(path)} was {_short(mine)} and is {_short(yours)}"
        is_alike = len(self.spec) == len(other.spec)
        return "" if is_alike else "the arguments, or what the programs read besides, have another structure"

    def end(self, logs: Logs) -> None:
        """Visits the attributes of objects of the user's own, but for logs."""
        found = dict[tuple[type, str], list[Hashable]]()
        for path, owner, name, value in self._own:  # grows meanwhile
            if (owner, name) not in logs.left_out:
                self._place, self._first, first = (owner, name), len(self._kept), len(self.spec)
                self.visit(path, value)
                found.setdefault((owner, name), []).extend(self.spec[first:])
        self._own = []
        logs.note(found, self._looks_up)

    def note(self, path: Path, value: Hashable) -> None:
        """Notes a value that has to stay."""
        self.spec.append(value)
        self.paths.append(path)

    def visit(self, path: Path, item: Any) -> None:
        """Notes an item and what it reaches; an object that cannot be looked into stands for itself."""
        kind = type(item)
        try:
            if kind in _PLAINEST or isinstance(item, (Enum, numpy.number)):
                # True == 1 == 1.0, but not for a program.
                self.note(path, (kind, item))
            elif id(item) in self._seen:
                self.note(path, ("again", self._seen[id(item)]))
            elif len(self.spec) >= _MOST and not isinstance(item, Tensor):
                self.note(path, "too much")
            else:
                self._seen[id(item)] = self._place, len(self._kept) - self._first
                self._kept.append(item)
                self._inside(path, item, kind)
        except Exception:  # of a proxy, a property or a metaclass of the user's
            self._opaque(path, item)

    def _inside(self, path: Path, item: Any, kind: type) -> None:
        if isinstance(item, Tensor):
            self.note(path, kind_of(item))  # a tensor that has none, as a sparse one, stands for itself
            self.tensors.append(item)
        elif kind is list and item and set(map(type, item)) == {float}:
            self.note(path, (list, tuple(item)))
        elif isinstance(item, (tuple, list)):
            self._parts(path, (kind, len(item)), "{}[{}]", enumerate(item))
        elif isinstance(item, (dict, MappingProxyType)):
            keys = tuple(key if isinstance(key, _PLAIN) else id(key) for key in item)
            self._parts(path, (dict, keys), "{}[{!r}]", item.items())
        elif isinstance(item, ELBO):  # it changes in every step
            self._opaque(path, item)
        elif isinstance(item, FunctionType):
            self._function(path, item)
        elif isinstance(item, nn.Module):
            self._module(path, item)
        elif isinstance(item, functools.partial):
            parts = enumerate((item.func, item.args, item.keywords))
            self._parts(path, functools.partial, "the partial {}", parts)
        elif isinstance(item, MethodType):
            self._parts(path, MethodType, "{}", enumerate((item.__func__, item.__self__)))
        elif isinstance(item, (set, frozenset)) and all(isinstance(part, _PLAIN) for part in item):
            self.note(path, (kind, frozenset((type(part), part) for part in item)))
        elif isinstance(item, numpy.ndarray) and item.size <= _MOST_NUMBERS and item.dtype.kind in "biufc":
            self.note(path, (kind, item.dtype.str, item.shape))
            self.note(("the numbers of {}", path), item.tobytes())
            self.arrays.append((path, item))
        elif isinstance(item, type):
            self._opaque(path, item)
            self._of_class(path, item)
        elif isinstance(item, (Messenger, Namespace, SimpleNamespace, UserDict, ChainMap)) or not _is_closed(item):
            self._attributes(path, item)
        else:
            self._opaque(path, item)

    def _parts(self, path: Path, told: Hashable, form: str, parts: Iterable[tuple[Any, Any]]) -> None:
        """Notes what is told of an item, and its parts."""
        self.note(path, told)
        for name, part in parts:
            self.visit((form, path, name), part)

    def _opaque(self, path: Path, item: Any) -> None:
        """Something that is taken to be the same as long as it is the same object."""
        self.note(path, (type(item), id(item)))
        is_named = type(item) in (BuiltinFunctionType, type) and item.__name__ in LOOKUPS
        self._looks_up |= is_named or type(item) in (attrgetter, methodcaller)
        if issubclass(type(item), numpy.ndarray):  # a proxy may raise if it is asked for its class
            self.arrays.append((path, item))

    def _of_class(self, path: Path, item: type) -> None:
        """Notes the plain values and the functions of a class, once: its objects read them too."""
        for kind in (*item.__mro__, *type(item).__mro__):  # type: ignore[misc]
            if kind in self._classes or is_of_library(kind):
                continue
            self._classes.add(kind)
            for name, value in vars(kind).items():
                if not (name.startswith("__") or hasattr(type(value), "__get__")):
                    self.visit(("{}.{}", path, name), value)
                for function in (value, *(getattr(value, part, None) for part in _WRAPPED)):
                    if isinstance(function, FunctionType):
                        self.visit(("{}.{}", path, name), function)

    def _attributes(self, path: Path, item: Any) -> None:
        is_module, states = isinstance(item, nn.Module), self._states.get(id(item), ())
        without = of_every_module() if is_module else _IN_USE if isinstance(item, Messenger) else ()
        slots = {name: getattr(item, name) for name in _slots_of(type(item)) if hasattr(item, name)}  # type: ignore[arg-type]
        attributes = {**getattr(item, "__dict__", {}), **slots}
        own = {name: value for name, value in attributes.items() if name not in without and name not in states}
        if isinstance(item, ReplayMessenger) and item.trace is not None:  # what it reads
            sites = ((name, site) for name, site in item.trace.nodes.items() if site["type"] == "sample")
            own["trace"] = {name: (site["value"], site["infer"], site["is_observed"]) for name, site in sites}
        self._of_class(path, type(item))
        kind: Any = type(item)
        self.note(path, (kind, tuple(own)))
        waits = is_own(kind)
        for name, value in own.items():
            if waits and not str(name).startswith("_pyro_"):
                self._own.append((("{}.{}", path, name), kind, name, value))
            else:
                self.visit(("{}.{}", path, name), value)

    def _function(self, path: Path, item: FunctionType) -> None:
        code, is_foreign, of = item.__code__, is_of_library(item), item.__qualname__
        self._parts(path, (code, *vars(item)), "{}.{}", () if is_foreign else vars(item).items())
        for name, cell in zip(code.co_freevars, item.__closure__ or (), strict=True):
            if cell != CellType():  # else it has no value yet
                self.visit(("{} of {}", name, of), cell.cell_contents)
        if is_foreign:
            return
        if item.__defaults__ or item.__kwdefaults__:
            self.visit(("a default of {}", of), (item.__defaults__, item.__kwdefaults__))
        self._globals(item.__globals__, names_of(code))

    def _globals(self, space: Mapping[str, Any], names: tuple[str, ...]) -> None:
        """Notes the globals that a function names, those of modules of the user's own too."""
        for name in names:
            value = space.get(name)
            if isinstance(value, ModuleType):
                own = self._named.setdefault(id(value), set())
                if not is_library(value.__name__) and not own.issuperset(names):
                    own.update(names)
                    self._globals(vars(value), names)
            elif value is not None:
                self.visit(("the global {}", name), value)

    def _module(self, path: Path, item: nn.Module) -> None:
        if item._buffers:
            self.modules.append(item)
        # A scripted module holds its parts elsewhere.
        parts = itertools.chain(item._parameters.items(), item._buffers.items(), item._modules.items())
        self._parts(path, item.training, "{}.{}", parts)
        self._attributes(path, item)


class Keys:
    """Keys of calls. A number that changes in many calls is left out: it counts something, and switches nothing.

    So is a list that numbers are appended to.
    """

    def __init__(self) -> None:
        self._last: list[Hashable] = []
        self._changes: dict[int, int] = {}

    def of(self, call: Call) -> tuple[Any, ...]:
        """The key of a call."""
        spec = call.spec
        if len(spec) != len(self._last):
            self._changes = {}
        for i, (old, new) in enumerate(zip(self._last, spec, strict=False)):
            if old is not new and old != new and ((_is_number(old) and _is_number(new)) or _goes_on(old, new)):
                self._changes[i] = self._changes.get(i, 0) + 1
        self._last = spec
        varying = self.counters
        return tuple(None if i in varying else entry for i, entry in enumerate(spec)) if varying else tuple(spec)

    def left_out(self) -> list[Hashable]:
        """The numbers of the last call that its key leaves out."""
        return [self._last[i] for i in sorted(self.counters)]

    @property
    def counters(self) -> set[int]:
        """Positions of the numbers that are left out."""
        return {i for i, number in self._changes.items() if number > MOST_CHANGES}


def _is_number(entry: Any) -> bool:
    is_told = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], type)
    return is_told and (entry[0] in (int, float, complex) or issubclass(entry[0], numpy.number))


def _goes_on(old: Any, new: Any) -> bool:
    """Whether numbers were appended to a list, as losses are in training."""
    are_lists = isinstance(old, tuple) and isinstance(new, tuple) and old[:1] == new[:1] == (list,)
    return are_lists and isinstance(old[1], tuple) and isinstance(new[1], tuple) and new[1][: len(old[1])] == old[1]


def _is_closed(item: Any) -> bool:
    """Whether nobody looks into an object: it belongs to a library, or has no attributes."""
    is_odd = isinstance(item, (numpy.ndarray, numpy.generic, ModuleType, BuiltinFunctionType))
    return is_odd or is_of_library(type(item)) or not (hasattr(item, "__dict__") or _slots_of(type(item)))  # type: ignore[arg-type]


@functools.cache
def of_every_module() -> frozenset[str]:
    """Attributes of modules that are handled on their own, or hold nothing that a program reads."""
    return frozenset(vars(nn.Module()))


@functools.lru_cache(maxsize=1024)
def _slots_of(kind: type) -> tuple[str, ...]:
    """The attributes of objects that lie in slots of their class."""
    spaces = [vars(part) for part in kind.__mro__ if "__slots__" in vars(part)]
    return tuple(name for space in spaces for name, member in space.items() if isinstance(member, MemberDescriptorType))


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
        value = value[1]
    text = repr(value)
    return text if len(text) <= 60 or isinstance(value, Kind) else f"{text[:57]}..."
