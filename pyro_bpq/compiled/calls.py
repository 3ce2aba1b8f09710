r"""What a call of an objective hands to its programs, and what the programs can reach besides.

A recorded step holds for calls that look the same: equal values of numbers and strings, tensors of equal shapes. The
tensors themselves may differ, they are inputs. Reached are arguments, what functions close over, the globals that they
name, the arguments of partials, settings of handlers, parameters, buffers and attributes of modules, attributes of
plain objects, and plain attributes of their classes.
"""

from __future__ import annotations

import functools
import weakref
from argparse import Namespace
from collections.abc import Hashable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType, SimpleNamespace
from typing import Any

import numpy
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_bpq.tracing.plain_values import is_of_library, names_of, of_every_module, slots_of

_PLAIN = (bool, int, float, complex, str, bytes, NoneType, torch.dtype, torch.device, torch.Size, range, slice)
# Most of what is reached is of these very types, which is sooner told.
_PLAINEST = frozenset(kind for kind in _PLAIN if kind is not slice)
# What is the same as long as it is the same object.
_OPAQUE = (numpy.ndarray, ModuleType, BuiltinFunctionType, numpy.generic)
# Attributes of handlers that change while they are in use.
_IN_USE = frozenset({"_installed", "_wraps", "trace", "args_kwargs"})
# More things than these belong to a program that reaches a whole library or data set.
_MOST = 20_000
# Largest array of numpy whose numbers are compared. It may be written in place.
_MOST_NUMBERS = 1000
# Number of calls in a row with new arrays from which on they are told of.
_MANY = 4

# Where something is: a name, or a format, the place that it is in, and what tells it apart there. Most are never shown.
Path = str | tuple[Any, ...]
# Shape, strides, type, device, and whether a gradient is asked for.
Kind = tuple[Any, ...]


def kind_of(tensor: Tensor) -> Kind:
    """What a recording depends on in an input."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def in_words(path: Path) -> str:
    """A path as it is shown."""
    if isinstance(path, str):
        return path
    form, parent, *rest = path
    return str(form).format(in_words(parent), *rest)


def reach(roots: Mapping[str, Any]) -> Call:
    """What can be reached from some roots, the handlers around the call, and the modes of torch."""
    call = Call()
    call.note("torch's default dtype", torch.get_default_dtype())
    call.note("inference mode", torch.is_inference_mode_enabled())
    for kind in ("cpu", "cuda"):
        call.note("autocast", torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind))
    for name, root in roots.items():
        call.visit(name, root)
    for handler in _PYRO_STACK:
        if not (isinstance(handler, TraceMessenger) and handler.param_only):
            call.visit(f"the handler {type(handler).__name__}", handler)
    return call


class Call:
    """What a call looks like.

    Attributes:
        spec: Everything but tensors, in the order in which it is reached.
        paths: Where each entry of ``spec`` was found.
        tensors: The tensors, in the order in which they are reached, each once.
        sources: Where each tensor was found.
        arrays: Arrays of numpy, and where each was found.
    """

    def __init__(self) -> None:
        self.spec: list[Hashable] = []
        self.paths: list[Path] = []
        self.tensors: list[Tensor] = []
        self.sources: list[Path] = []
        self.arrays: list[tuple[Path, Any]] = []
        # What ``spec`` tells by its identity, which must not be given again.
        self._kept: list[Any] = []
        self._seen = dict[int, int]()
        self._classes = set[type]()

    def difference(self, other: Call) -> str:
        """Where another call first differs from this one, in words; empty where the two are alike."""
        for path, mine, yours in zip(self.paths, self.spec, other.spec, strict=False):
            if mine != yours:
                if isinstance(mine, bytes) and isinstance(yours, bytes):
                    return f"{in_words(path)} have changed"
                return f"{in_words(path)} was {_short(mine)} and is {_short(yours)}"
        if len(self.spec) != len(other.spec):
            return "the arguments, or what the programs read besides, have another structure"
        for path, own, new in zip(self.sources, self.tensors, other.tensors, strict=True):
            if kind_of(own) != kind_of(new):
                return f"{in_words(path)} was {_told(own)} and is {_told(new)}"
        return ""

    def note(self, path: Path, value: Hashable) -> None:
        """Notes a value that has to stay."""
        self.spec.append(value)
        self.paths.append(path)

    def visit(self, path: Path, item: Any) -> None:
        """Notes an item and what it reaches; an object that cannot be looked into stands for itself."""
        try:
            self._visit(path, item, type(item))
        except Exception:  # of a proxy, a property or a metaclass of the user's
            self._opaque(path, item)

    def _visit(self, path: Path, item: Any, kind: type) -> None:
        if kind in _PLAINEST:
            # True == 1 == 1.0, but not for a program.
            self.note(path, (kind, item))
        elif isinstance(item, Tensor):
            self._tensor(path, item)
        elif isinstance(item, _PLAIN):
            self.note(path, (kind, item if not isinstance(item, slice) else str(item)))
        elif id(item) in self._seen:
            self.note(path, ("again", self._seen[id(item)]))
        elif len(self.spec) < _MOST:
            self._seen[id(item)] = len(self._seen)
            self._kept.append(item)
            self._inside(path, item)
        else:
            self.note(path, "too much")

    def _tensor(self, path: Path, item: Tensor) -> None:
        kind_of(item)  # a tensor that has none, as a sparse one, stands for itself
        known = self._seen.get(id(item))
        self.note(path, ("tensor", known))
        if known is None:
            self._seen[id(item)] = len(self._seen)
            self.tensors.append(item)
            self.sources.append(path)

    def _inside(self, path: Path, item: Any) -> None:
        if isinstance(item, (tuple, list)):
            self.note(path, (type(item), len(item)))
            for i, part in enumerate(item):
                self.visit(("{}[{}]", path, i), part)
        elif isinstance(item, dict):
            self.note(path, (dict, tuple(key if isinstance(key, _PLAIN) else id(key) for key in item)))
            for key, part in item.items():
                self.visit(("{}[{!r}]", path, key), part)
        elif isinstance(item, FunctionType):
            self._function(path, item)
        elif isinstance(item, nn.Module):
            self._module(path, item)
        elif isinstance(item, functools.partial):
            self.note(path, functools.partial)
            self.visit(path, item.func)
            self.visit(("an argument of the partial {}", path), item.args)
            self.visit(("an argument of the partial {}", path), item.keywords)
        elif isinstance(item, MethodType):
            self.note(path, MethodType)
            self.visit(path, item.__func__)
            self.visit(path, item.__self__)
        elif isinstance(item, (Messenger, Namespace, SimpleNamespace)):
            self._attributes(path, item)
        elif isinstance(item, (set, frozenset)) and all(isinstance(part, _PLAIN) for part in item):
            self.note(path, (type(item), frozenset((type(part), part) for part in item)))
        elif isinstance(item, _OPAQUE) or is_of_library(item if isinstance(item, type) else type(item)):
            self._opaque(path, item)
        elif isinstance(item, type):
            self._opaque(path, item)
            self._of_class(path, item)
        elif hasattr(item, "__dict__") or slots_of(item):
            self._attributes(path, item)
        else:
            self._opaque(path, item)

    def _opaque(self, path: Path, item: Any) -> None:
        """Something that is taken to be the same as long as it is the same object."""
        self.note(path, (type(item), id(item)))
        if isinstance(item, numpy.ndarray):
            self.arrays.append((path, item))
            if item.size <= _MOST_NUMBERS:
                self.note(("the numbers of {}", path), item.tobytes())

    def _of_class(self, path: Path, item: type) -> None:
        """Notes the plain values among the attributes of a class, once: its objects read them too."""
        for kind in item.__mro__:
            if kind in self._classes or is_of_library(kind):
                continue
            self._classes.add(kind)
            for name, value in vars(kind).items():
                if type(value) in _PLAINEST and not name.startswith("__"):
                    self.note(("{}.{}", path, name), (type(value), value))

    def _attributes(self, path: Path, item: Any) -> None:
        without = _IN_USE if isinstance(item, Messenger) else ()
        slots = {name: getattr(item, name) for name in slots_of(item) if hasattr(item, name)}
        own = {name: value for name, value in getattr(item, "__dict__", {}).items() if name not in without} | slots
        self.note(path, (type(item), tuple(own)))
        self._of_class(path, type(item))
        for name, value in own.items():
            self.visit(("{}.{}", path, name), value)

    def _function(self, path: Path, item: FunctionType) -> None:
        code, is_foreign, of = item.__code__, is_of_library(item), item.__qualname__
        self.note(path, code)
        if is_foreign and not item.__closure__:
            return
        for name, cell in zip(code.co_freevars, item.__closure__ or (), strict=True):
            try:
                self.visit(("{} of {}", name, of), cell.cell_contents)
            except ValueError:
                self.note(("{} of {}", name, of), "no value yet")
        if item.__defaults__ or item.__kwdefaults__:
            self.visit(("a default of {}", of), (item.__defaults__, item.__kwdefaults__))
        if not is_foreign:
            for name in names_of(code):
                value = item.__globals__.get(name)
                if value is not None and not isinstance(value, ModuleType):
                    self.visit(("the global {}", name), value)

    def _module(self, path: Path, item: nn.Module) -> None:
        own, usual = vars(item), of_every_module()
        self.note(path, (type(item), item.training))
        self._of_class(path, type(item))
        for kind in ("_parameters", "_buffers", "_modules"):
            # A scripted module holds its parts elsewhere.
            for name, part in getattr(item, kind).items():
                self.visit(("{}.{}", path, name), part)
        for name, part in own.items():
            if name not in usual:
                self.visit(("{}.{}", path, name), part)


class Arguments:
    """The arguments of the last call, as far as a recording cannot take them as they are."""

    def __init__(self) -> None:
        # The arrays of numpy of the last call, and the number of calls in a row that had new ones.
        self._arrays: list[weakref.ref[Any]] = []
        self._new_arrays = 0
        # The float arguments of the last call, by position, and those that have changed.
        self._floats: dict[int, float] = {}
        self._varying: set[int] = set()

    def new_arrays(self, call: Call) -> list[int]:
        """The arrays of numpy that were not there in the last call: a recording holds for the very same ones."""
        last, self._arrays = self._arrays, [weakref.ref(array) for _, array in call.arrays]
        known = {id(array) for array in (reference() for reference in last) if array is not None}
        new = [i for i, (_, array) in enumerate(call.arrays) if id(array) not in known]
        self._new_arrays = self._new_arrays + 1 if new else 0
        return new

    @property
    def has_many_new_arrays(self) -> bool:
        """Whether several calls in a row had new arrays."""
        return self._new_arrays >= _MANY

    def with_tensors(self, program: Any) -> Any:
        """The program with tensors in place of float arguments that change from step to step."""
        leaves, tree = tree_flatten((program.args, program.kwargs))
        floats = {i: leaf for i, leaf in enumerate(leaves) if issubclass(type(leaf), float)}
        if not floats:
            return program
        self._varying |= {i for i, value in floats.items() if self._floats.get(i, value) != value}
        self._floats = floats
        for i in self._varying & floats.keys():
            leaves[i] = torch.tensor(floats[i], dtype=torch.get_default_dtype())
        args, kwargs = tree_unflatten(leaves, tree)
        return program._replace(args=args, kwargs=kwargs)


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
        value = value[1]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _told(tensor: Tensor) -> str:
    grad = ", with gradient" if tensor.requires_grad else ""
    return (
        f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} on {tensor.device}{grad}"
    )
