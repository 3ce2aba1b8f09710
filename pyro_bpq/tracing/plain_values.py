r"""Plain values that a call hands to its programs, or that the programs can reach, such as flags.

Other values may switch parts of a program on, so that its sites depend on each other in another way. So the values
that steps have met are kept.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain, islice
from types import (
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any

import numpy
from pyro.poutine.messenger import Messenger
from torch import nn

from pyro_bpq.rollout.runs import Program

# Libraries whose functions and classes are taken to be constant.
_LIBRARIES = frozenset(
    {"torch", "pyro", "numpy", "math", "functools", "itertools", "pyro_bpq", "builtins", "opt_einsum"}
)
# Number of plain values that are looked at among the arguments of a call, or in a list.
_MOST_PLAIN = 64
# Number of objects that are looked into, and of places that are looked at in each call.
_MOST_OBJECTS, _MOST_PLACES = 2000, 500
# Number of changes of a number or a text. One that changes more often counts something, and switches nothing.
_MOST_CHANGES = 4
# Largest number of values of a kind that are told apart.
_MOST_KNOWN = 32
# Number of calls after which objects may have other attributes.
_EVERY = 64
_FLAGS = ("bool", "NoneType")
_PLAIN = (bool, int, float, str, NoneType, Enum, numpy.bool_, numpy.integer, numpy.ndarray)
_LISTS = (list, tuple, dict, set, frozenset)


def flags_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The truth values and missing values among the arguments of a program.

    They often switch parts of a program on and off, so that other values may mean other dependencies. Numbers and texts
    do so less often, and may differ in every step.
    """
    given = (*enumerate(args), *kwargs.items())
    return tuple((place, value) for place, value in given if value is None or value is True or value is False)


def plain_arguments(arguments: Any) -> tuple[Any, ...]:
    """Whole numbers, truth values, texts, small arrays and the lengths of lists among the arguments, in their order.

    Of numbers with a fraction it tells whether they are zero. Tensors are left out.
    """
    found, pending = list[Any](), [arguments]
    while pending and len(found) < _MOST_PLAIN:
        item = pending.pop()
        with contextlib.suppress(Exception):  # as of a proxy
            if isinstance(item, _LISTS):
                found.append((len(item),))
                parts = chain.from_iterable(item.items()) if isinstance(item, dict) else item
                pending += islice(parts, _MOST_PLAIN)
            elif isinstance(item, _PLAIN):
                found.append(_plain(item))
    return tuple(found)


class ReachedValues:
    """The plain values that programs can reach besides their arguments.

    These are attributes of modules and of plain objects, what functions close over, and globals that they name. Lists
    of them are looked into. Copies and pickles know no programs.
    """

    def __init__(self) -> None:
        self._programs: tuple[Any, ...] = (None, None)
        self._places: list[tuple[Any, str]] = []
        self._last: list[Any] = []
        self._changes: dict[tuple[int, str], int] = {}
        self._calls = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return ReachedValues, ()

    @property
    def has_counters(self) -> bool:
        """Whether some values change so often that they are left out."""
        return any(number > _MOST_CHANGES for number in self._changes.values())

    def of(self, program: Program) -> tuple[Any, ...]:
        """The values at present, in a fixed order."""
        parts = program[:2]
        if self._calls % _EVERY == 0 or not all(map(_is_same, parts, self._programs)):
            self._programs, self._last = parts, []
            self._places = [place for place in places(parts) if not self._is_counter(*place)]
        self._calls += 1
        values = [_value(*place) for place in self._places]
        if self._last and values != self._last:
            for (space, name), before, now in zip(self._places, self._last, values, strict=True):
                if before != now and now[0] not in _FLAGS:
                    self._changes[id(space), name] = self._changes.get((id(space), name), 0) + 1
            self._places = [place for place in self._places if not self._is_counter(*place)]
            values = [_value(*place) for place in self._places]
        self._last = values
        return tuple(values)

    def _is_counter(self, space: Any, name: str) -> bool:
        return self._changes.get((id(space), name), 0) > _MOST_CHANGES


@dataclass(frozen=True)
class MetValues:
    """The plain values of steps, by kind.

    Args:
        known: The values that were read so far.
        counts: Whether numbers differ in many steps. The program is then looked at more often.
        has_switched: Whether values are new since a run was tracked last, so that no step went on with what was known.
    """

    known: Mapping[str, frozenset[tuple[Any, ...]]] = field(default_factory=dict)
    counts: bool = False
    has_switched: bool = False

    def after(self, kind: str, values: tuple[Any, ...], has_counters: bool) -> MetValues:
        """These values and those of one more step; the same object where they are known.

        Where values differ in many steps, only the first of them count as new.
        """
        known = self.known.get(kind, frozenset())
        is_known, is_full = values in known, len(known) >= _MOST_KNOWN
        counts = self.counts or has_counters or (is_full and not is_known)
        if is_known or is_full:
            return self if counts == self.counts else replace(self, counts=counts)
        return replace(self, known={**self.known, kind: known | {values}}, counts=counts, has_switched=bool(known))

    def seen(self) -> MetValues:
        """The same after a tracked run."""
        return replace(self, has_switched=False) if self.has_switched else self


def _is_same(one: Any, other: Any) -> bool:
    # A method is bound anew wherever it is named.
    return one is other or (isinstance(one, MethodType) and one == other)


def _plain(value: Any) -> tuple[Any, ...]:
    """Kind and value. A kind is told by its name: unlike classes, names can always be copied and pickled."""
    kind = type(value).__qualname__
    if isinstance(value, numpy.ndarray):
        return _array(value)
    if isinstance(value, Enum):
        return kind, value.name
    # True == 1 == 1.0, but not for a program.
    return kind, value != 0.0 if isinstance(value, float) else value


def _array(value: numpy.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Kind, shape and numbers of a small array; of numbers with a fraction only whether they are zero."""
    if value.size > _MOST_PLAIN or value.dtype.kind not in "biuf":
        return ("ndarray",)
    numbers = value != 0.0 if value.dtype.kind == "f" else value
    return "ndarray", value.dtype.kind, value.shape, tuple(numbers.reshape(-1).tolist())


def _value(space: Any, name: str) -> tuple[Any, ...]:
    """What stands at a place now."""
    try:
        value = _read(space, name)
        if isinstance(value, _PLAIN):
            return _plain(value)
        kind = type(value)
        return (kind.__qualname__, plain_arguments(value)) if kind in _LISTS else (kind.__qualname__,)
    except Exception:
        return ("missing",)


def _read(space: Any, name: str) -> Any:
    if isinstance(space, CellType):
        return space.cell_contents
    return space[name] if isinstance(space, (dict, MappingProxyType)) else getattr(space, name)


def places(roots: Iterable[Any]) -> list[tuple[Any, str]]:
    """Where plain values stand that can be reached, the nearest first.

    These are names in namespaces, names of slots, and cells of functions. What an object hides is left out.
    """
    roots = [*roots]
    walk = _Walk(frozenset(map(_package_of, roots)))
    walk.pending.extend(roots)
    while walk.pending and len(walk.seen) < _MOST_OBJECTS and len(walk.found) < _MOST_PLACES:
        # Properties, proxies and metaclasses of the user's own may raise anything when they are looked at.
        with contextlib.suppress(Exception):
            walk.visit(walk.pending.popleft())
    return walk.found


class _Walk:
    """Collects places, in packages of the user's own only."""

    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages
        self.found: list[tuple[Any, str]] = []
        self.seen: set[int] = set()
        self.pending: deque[Any] = deque()

    def visit(self, item: Any) -> None:
        """Notes the places of an item, and what is to be visited later."""
        if id(item) in self.seen or isinstance(item, _PLAIN):
            return
        self.seen.add(id(item))
        if isinstance(item, functools.partial):
            self.pending.extend([item.func, *item.args, *item.keywords.values()])
        elif isinstance(item, MethodType):
            self.pending.extend([item.__func__, item.__self__])
        elif isinstance(item, (staticmethod, classmethod)):
            self.pending.append(item.__func__)
        elif isinstance(item, property):
            self.pending.append(item.fget)
        elif isinstance(item, FunctionType):
            self._function(item)
        elif type(item) in _LISTS:
            self.pending.extend(islice(item.values() if isinstance(item, dict) else item, _MOST_PLAIN))
        elif isinstance(item, nn.Module):
            # A scripted module holds neither of them in its `__dict__`.
            self.found.append((item, "training"))
            self.pending.extend(item.children())
            self._attributes(item, of_every_module())
        elif not isinstance(item, (Messenger, ModuleType)):
            self._attributes(item)

    def _function(self, item: FunctionType) -> None:
        for cell in item.__closure__ or ():
            self.found.append((cell, ""))
            with contextlib.suppress(ValueError):  # the variable has no value yet
                self.pending.append(cell.cell_contents)
        if not self._is_own(item):
            return
        names = names_of(item.__code__)
        self._look(item.__globals__, names)
        values: Iterable[Any] = map(item.__globals__.get, names)
        for module in values:
            if issubclass(type(module), ModuleType) and self._is_own_package(module.__name__):
                # The function may name what is in it.
                self._look(vars(module), names)

    def _attributes(self, item: Any, without: Collection[str] = ()) -> None:
        kind = item if isinstance(item, type) else type(item)
        if self._is_own(kind):
            self.pending.extend(kind.__mro__ if kind is item else [kind])
            self._look(item, slots_of(item))
            self._look(vars(item), [name for name in vars(item) if name not in without and not name.startswith("__")])

    def _look(self, space: Any, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(Exception):
                value = _read(space, name)
                self.pending.append(value)
                if not issubclass(type(value), (FunctionType, ModuleType, type, staticmethod, classmethod, property)):
                    self.found.append((space, name))

    def _is_own(self, item: Any) -> bool:
        return self._is_own_package(_module_of(item))

    def _is_own_package(self, name: str) -> bool:
        return name.partition(".")[0] in self.packages or not (is_library(name) or _is_installed(name))


def _package_of(root: Any) -> str:
    """The package of a program, within partials and methods."""
    while isinstance(root, (functools.partial, MethodType)):
        root = root.func if isinstance(root, functools.partial) else root.__self__
    where = root if isinstance(root, (type, FunctionType)) else type(root)
    package = _module_of(where).partition(".")[0]
    return "" if is_library(package) else package


@functools.lru_cache(maxsize=1024)
def _is_installed(module: str) -> bool:
    """Whether a module belongs to an installed package."""
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


@functools.cache
def of_every_module() -> frozenset[str]:
    """Attributes of modules that are handled on their own, or hold nothing that a program reads."""
    return frozenset(vars(nn.Module()))


def slots_of(item: Any) -> tuple[str, ...]:
    """The attributes of an object that lie in slots of its class."""
    return _slots(type(item))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[str, ...]:
    spaces = [vars(part) for part in kind.__mro__ if "__slots__" in vars(part)]
    return tuple(name for space in spaces for name, member in space.items() if isinstance(member, MemberDescriptorType))


@functools.lru_cache(maxsize=1024)
def names_of(code: CodeType) -> tuple[str, ...]:
    """The global names in a function and in the functions that it makes."""
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in names_of(part)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def is_of_library(item: Any) -> bool:
    """Whether a function or class belongs to a library, or to Python."""
    return is_library(_module_of(item))


def _module_of(item: Any) -> str:
    found = getattr(item, "__module__", None)
    return found if isinstance(found, str) else ""


@functools.lru_cache(maxsize=1024)
def is_library(module: str) -> bool:
    """Whether a module belongs to a library, or to Python."""
    head = module.partition(".")[0]
    return head in _LIBRARIES or head in sys.stdlib_module_names
