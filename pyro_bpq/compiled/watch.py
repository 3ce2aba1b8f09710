r"""Writes down the operators of a step as a graph, and refuses a step that a graph would not repeat.

The step runs as it is, and tensors are followed by their identity. So the very parameters, buffers, arguments and
tensors of critics become inputs of the graph, also where programs reach them through closures or the parameter store.

Some functions of torch read numbers on the way, which a graph would freeze: ``x[a]`` with an integer tensor ``a``
without dimensions takes the row whose number ``a`` holds, and ``one_hot`` looks whether an index is in range. While a
step is recorded, operators give the same results without reading.
"""

from __future__ import annotations

import linecache
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import takewhile
from types import FrameType
from typing import Any, NamedTuple, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from pyro_bpq.errors import Unrecordable
from pyro_bpq.record import operators
from pyro_bpq.record.frames import catcher
from pyro_bpq.record.indexing import has_scalars, one_hot, put, selected
from pyro_bpq.record.key import is_library, kind_of
from pyro_bpq.record.operators import sizing, written_arguments
from pyro_bpq.record.values import memory_of, tensors_in
from pyro_bpq.rollout.schedule import scheduled

_ATEN = torch.ops.aten
# Numbers of Python become tensors here.
_FRESH = frozenset({_ATEN.lift_fresh.default, _ATEN.lift_fresh_copy.default, _ATEN.lift.default})
# What hands out the memory of a tensor; no operator shows it.
_LEAVES_TORCH = frozenset((Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.untyped_storage))
# Where distributions read numbers of their parameters.
_READERS = ("torch.distributions.", "pyro.", "pyro_bpq.")


class NotYet(Unrecordable):
    """A step cannot be recorded yet: an eager step has to make its parameters or its critics first."""


class Noise(NamedTuple):
    """A tensor that the step draws from a generator of the objective's own."""

    source: int  # which of the generators that the step asks for, counted from 0
    kind: str  # name of the operator
    shape: tuple[int, ...]  # shape of the tensor
    dtype: torch.dtype  # its type

    def draw(self, generator: torch.Generator) -> Tensor:
        """Draws the tensor."""
        drawn: Tensor = getattr(torch, self.kind)(self.shape, generator=generator, dtype=self.dtype, device="cpu")
        return drawn


class StepWatch(TorchDispatchMode):
    """Writes down one run of a step. What the run writes into memory that it did not make is undone at its end.

    Attributes:
        graph: The operators. Those that make tensors of Python's numbers take them from ``numbers``, by name.
        inputs: The tensors that the graph takes.
        noise: The step's own noise, and ``drawn`` its tensors.
        schedules: Options that change from step to step, and ``scheduled`` their tensors.
        guards: What Python has read of the data of the call, what it found, and where.
        refused: Why the step cannot be recorded; ``None`` if it can.
    """

    def __init__(self, first_seed: int, data: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.numbers: dict[str, Tensor] = {}
        self.inputs: list[Tensor] = []
        self.noise: list[Noise] = []
        self.drawn: list[Tensor] = []
        self.schedules: list[Callable[[int], float]] = []
        self.scheduled: list[Tensor] = []
        self.guards: list[tuple[fx.Node, Any, str]] = []
        self.refused: Unrecordable | None = None
        self._first_seed, self._is_paused = first_seed, False
        self._nodes = WeakIdKeyDictionary()
        self._last: fx.Node | None = None  # the last input of the graph
        # Memory that holds nothing but what Python's numbers say, as that of `torch.tensor(5)`. It may be read.
        self._fixed: WeakSet[torch.UntypedStorage] = WeakSet()
        # The same with the data of the call, but for what is written in place: what is read of it guards the recording.
        self._known: WeakSet[torch.UntypedStorage] = WeakSet(_memory(list(data)))
        self._made: WeakSet[torch.UntypedStorage] = WeakSet()
        # Memory that was written into, and what was there before.
        self._before: dict[torch.UntypedStorage, torch.UntypedStorage] = {}
        self._outer: FrameType | None = None

    def __enter__(self) -> StepWatch:
        self._outer = sys._getframe(1)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._outer = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for storage, before in self._before.items():
            storage.copy_(before)
        self._before.clear()
        if self.refused is not None:  # the program, or a library, may have caught it
            raise self.refused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or func.namespace == "profiler":
            return func(*args, **kwargs)
        kind, is_fresh = operators.effects_of(func), func in _FRESH
        taken = set(_memory((args, kwargs)))
        is_fixed, is_known = (
            is_fresh or all(storage in kept for storage in taken) for kept in (self._fixed, self._known)
        )
        if kind.reads or (kind.is_sized and [*tensors_in(sizing(kind, args))]):
            if not (kind.reads and (is_fixed or is_known)):
                self.refuse_read()
            found = func(*args, **kwargs)
            if not is_fixed:
                read = self.graph.call_function(func, self._nodes_of(args), self._nodes_of(kwargs))
                self.guards.append((read, found, _reader()[0]))
            return found
        if not (is_fixed or kind.is_total) and (frame := catcher(self._outer)) is not None:
            self._refuse(
                f"{frame.f_code.co_name} catches errors ({frame.f_code.co_filename}:{frame.f_lineno}), and a recording "
                "would freeze whether one comes: look at the values before, as by torch.linalg.cholesky_ex"
            )
        if kind.is_random and self._is_noise(kind.name, args, kwargs):
            self.drawn.append(func(*args, **kwargs))
            return self.drawn[-1]
        for storage in _memory(written_arguments(kind, args, kwargs)):
            if storage not in self._made and storage not in self._before:
                self._before[storage] = storage.clone()
        if is_fresh:
            made = self.graph.call_function(_ATEN.lift_fresh_copy.default, (self._number(args[0]),))
        elif func is _ATEN.detach.default:
            made = self.node_of(args[0])  # nothing in the graph has a gradient of its own
        else:
            made = self.graph.call_function(func, self._nodes_of(args), self._nodes_of(kwargs))
        result = func(*args, **kwargs)
        self._bind(result, made)
        own = set(_memory(result))
        self._made |= own if is_fresh else own - taken
        gone = own | (taken if kind.writes else set())
        for kept, stays in ((self._fixed, is_fixed), (self._known, is_known and not kind.writes)):
            if stays and not kind.is_random:
                kept |= own
            else:
                kept -= gone
        return result

    def node_of(self, tensor: Tensor) -> fx.Node:
        """What stands for a tensor in the graph; a new input if it is not known."""
        node: fx.Node | None = self._nodes.get(tensor)
        if node is None:
            with self.graph.inserting_after(self._last):
                self._last = node = self.graph.placeholder(f"input_{len(self.inputs)}")
            self.inputs.append(tensor)
            self._bind(tensor, node)
        return node

    def _nodes_of(self, item: Any) -> Any:
        """The arguments of an operator with nodes in place of tensors."""
        return map_aggregate(item, lambda part: self.node_of(part) if isinstance(part, Tensor) else part)

    def _number(self, tensor: Tensor) -> fx.Node:
        name = f"number_{len(self.numbers)}"
        with torch._C.DisableTorchFunction():
            self.numbers[name] = tensor.clone()
        return self.graph.get_attr(name)

    def _bind(self, result: Any, node: fx.Node) -> None:
        if isinstance(result, Tensor):
            self._nodes[result] = node
            node.meta["kind"] = kind_of(result)
        elif isinstance(result, (tuple, list)):
            for i, part in enumerate(result):
                self._bind(part, self.graph.call_function(operator.getitem, (node, i)))

    def is_fixed(self, value: object) -> bool:
        """Whether all tensors within hold nothing but what Python's numbers say."""
        return all(storage in self._fixed for storage in _memory(value))

    def given(self, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that is an input, however it is made."""
        self._is_paused = True
        try:
            return make()
        finally:
            self._is_paused = False

    def value(self, schedule: Callable[[int], float], number: int) -> Tensor:
        """What a schedule gives at this step, as an input."""
        self.schedules.append(schedule)
        self.scheduled.append(self.given(partial(scheduled, schedule, number)))
        return self.scheduled[-1]

    def refuse_read(self) -> NoReturn:
        """Refuses to record a step in which Python reads a number of a tensor."""
        place, is_own = _reader()
        advice = ": write torch.where, tensor indexing or a mask instead" if is_own else ""
        self._refuse(f"Python reads a number of a tensor{place}, which a recording would freeze{advice}")

    def _refuse(self, why: str) -> NoReturn:
        # The first reason counts.
        self.refused = self.refused or Unrecordable(why)
        raise self.refused

    def _is_noise(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether the step draws from a generator of the objective's own, not the program from torch's."""
        generator = kwargs.get("generator")
        if generator is None:
            if any(_is_ours(frame) and frame.f_code.co_name == "independent" for frame in _frames()):
                self._refuse(
                    "the baseline of a site is a second run that draws all sites anew (SecondRun). Several particles "
                    "need no second run: write num_particles=2 or more, and leave SecondRun out"
                )
            if any(_module(frame).startswith("pyro_bpq.reruns.") for frame in _frames()):
                self._refuse(
                    "it draws values that are no sites, and costs that read them are computed again at other values"
                )
            return False
        source = generator.initial_seed() - self._first_seed
        if name not in ("rand", "randn") or not 0 <= source < 1 << 20:
            self._refuse(
                f"it draws by {name} from a generator of its own, which a recording cannot use: leave generator=... out"
            )
        self.noise.append(Noise(source, name, tuple(args[0]), kwargs["dtype"]))
        return True


def _memory(value: object) -> list[torch.UntypedStorage]:
    with torch._C.DisableTorchFunction():
        return [storage for tensor in tensors_in(value) for storage in memory_of(tensor)]


def _reader() -> tuple[str, bool]:
    """Where Python reads a number, in words, and whether that is code of the user's."""
    frames = list(takewhile(lambda frame: _module(frame) != "pyro_bpq.compiled.recorder", _frames()))
    own = [each for each in frames if not (is_library(_module(each)) or each.f_code.co_filename.startswith("<"))]
    readers = [each for each in frames if _module(each).startswith(_READERS) and _module(each) != __name__]
    for frame in (own or readers)[:1]:
        file, code = frame.f_code.co_filename, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        text = f", in {frame.f_code.co_name} of {_module(frame)}: {code!r} ({file}:{frame.f_lineno})"
        return text, bool(own)
    return "", False


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def _is_ours(frame: FrameType) -> bool:
    return _module(frame).startswith("pyro_bpq.")


class RecordedIndexing(TorchFunctionMode):
    """Lets programs use these functions while they are recorded."""

    def __init__(self, watch: StepWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and has_scalars(args[1]):
            return selected(*args)
        if func is Tensor.__setitem__ and has_scalars(args[1]):
            return put(*args)
        if func in _LEAVES_TORCH and not (func is Tensor.tolist and self._watch.is_fixed(args)):
            self._watch.refuse_read()
        if func is torch.randint and any(_is_ours(frame) and frame.f_code.co_name == "_seed" for frame in _frames()):
            # Of a further run that draws nothing, or else the step is not recorded: any seed will do.
            return 0
        if func is torch.nn.functional.one_hot:
            classes = args[1] if len(args) > 1 else (kwargs or {}).get("num_classes", -1)
            return func(args[0]) if classes < 0 else one_hot(args[0], classes)
        return func(*args, **(kwargs or {}))
