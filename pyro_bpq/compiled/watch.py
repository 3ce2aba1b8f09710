r"""Writes down the operators of a step, and refuses a step that a graph would not repeat.

The step runs as it is, and tensors are followed by their identity. So the very parameters, buffers, arguments and
tensors of critics become inputs of the graph, also where programs reach them through closures or the parameter store.

Some functions of torch read numbers on the way, which a graph would freeze: ``x[a]`` with an integer tensor ``a``
without dimensions takes the row whose number ``a`` holds, and ``one_hot`` looks whether an index is in range. While a
step is recorded, operators give the same results without reading.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from pyro_bpq.errors import Unrecordable
from pyro_bpq.record.calls import Args, Calls, Kwargs, catcher, frames, handlers, is_library, text_of
from pyro_bpq.record.function import Check, Function
from pyro_bpq.record.key import Call
from pyro_bpq.record.operators import effects_of, has_scalars, one_hot, put, selected, sizing
from pyro_bpq.record.tape import Tape, same
from pyro_bpq.record.values import Guard, Known, Value, put_back, tensors_in
from pyro_bpq.rollout.runs import scheduled

_ATEN = torch.ops.aten
# Numbers of Python become tensors here.
_FRESH = frozenset((_ATEN.lift_fresh.default, _ATEN.lift_fresh_copy.default, _ATEN.lift.default))
# Nothing in the graph has a gradient of its own.
_THE_SAME = frozenset((same, _ATEN.detach.default))
# Where distributions read numbers of their parameters.
_READERS = ("torch.distributions.", "pyro.", "pyro_bpq.")
_WATCHING = (__name__, "pyro_bpq.record.tape", "pyro_bpq.record.calls")


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


@dataclass
class _Row:
    """A copy, where the program has taken a view."""

    memory: Tensor
    view: weakref.ref[Tensor]
    index: Any
    settled: int | None = None  # the last write into it that was put back


class StepTape(Tape):
    """Writes down one run of a step. What the run writes into tensors that it did not make is undone at its end.

    Attributes:
        own_noise: The step's own noise, and its tensors.
        scheduled: Options that change from step to step, and their tensors.
        refused: Why the step cannot be recorded; ``None`` if it can.
    """

    def __init__(self, first_seed: int, call: Call) -> None:
        super().__init__()
        self.own_noise: list[tuple[Noise, Tensor]] = []
        self.scheduled: list[tuple[Callable[[int], float], Tensor]] = []
        self.refused: Unrecordable | None = None
        self.rows: list[_Row] = []
        self.parts: list[Known] = []  # the memory that they were taken from
        self._first_seed, self._calls, self._generators = first_seed, _StepCalls(self), _generators()
        # Where the call has its data, by the identity of tensors.
        self._data = {id(tensor): i for i, tensor in enumerate(call.tensors) if not tensor.requires_grad}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        put_back(self.written)
        self._look_at_generators()
        is_lost = any(self.storages.behind(row.memory)[0].last_write != row.settled for row in self.rows)
        if is_lost or any(known.parted for known in self.parts):
            self._note("it writes into a row whose number a tensor holds, as by x[z].add_(1): write x[z] = x[z] + 1")
        if self.refused is not None:  # the program, or a library, may have caught it
            raise self.refused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, kwargs = effects_of(func), kwargs or {}
        if self.paused.depth or func.namespace == "profiler":
            return func(*args, **kwargs)
        if kind.is_sized and not kind.reads and [*tensors_in(sizing(kind, args))]:
            self.refuse_read(*_reader())
        if not kind.is_total and [*tensors_in((args, kwargs))] and (frame := catcher(self._outer)) is not None:
            self._refuse(
                f"{frame.f_code.co_name} catches errors ({frame.f_code.co_filename}:{frame.f_lineno}), and a recording "
                "would freeze whether one comes: look at the values before, as by torch.linalg.cholesky_ex"
            )
        if kind.is_random and (noise := self._noise_of(kind.name, args, kwargs)) is not None:
            self.own_noise.append((noise, func(*args, **kwargs)))
            return self.own_noise[-1][1]
        if func in _FRESH:
            self.constants.add(self.value_of(args[0]))
        if kind.is_random:
            self._look_at_generators()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._generators = _generators() if kind.is_random else self._generators
        return result

    def forget(self) -> None:
        """Lets go of tensors that are looked at only until all values are known."""
        for kept in (self.before, self.noise):
            kept.clear()

    def read(self, items: Any, found: Any = None, check: bool = False) -> None:
        """Notes that Python has read tensors, and where; refuses what is no function of the data of the call."""
        libraries = (module for _, module in frames() if module.startswith(("torch.distributions.", "pyro.")))
        if check and next(libraries, "") == "torch.distributions.distribution":  # one that was made under validation
            return
        for tensor in tensors_in(items):
            value, where = self.value_of(tensor), _reader()
            function = self._cut([value])
            is_known = (v in self.constants or id(self.inputs.get(v)) in self._data for v in function.given)
            if function.draws or not all(is_known):
                self.refuse_read(*where)
            self.guards.append(Guard(value, where))

    def _cut(self, wanted: list[Value]) -> Function:
        return Function(tuple(self.nodes), (), (), self.shapes, self.dtypes).cut(wanted, frozenset())

    def option(self, schedule: Callable[[int], float], number: int) -> Tensor:
        """What a schedule gives at this step, as an input."""
        with self.paused:
            self.scheduled.append((schedule, scheduled(schedule, number)))
        return self.scheduled[-1][1]

    def check(self) -> Check:
        """What Python has read of the data of the call."""
        if not self.guards:
            return Check()
        function = self._cut([guard.value for guard in self.guards])
        taken = {value: self.inputs[value] for value in function.given}
        reached = ((value, self._data[id(own)]) for value, own in taken.items() if id(own) in self._data)
        return Check(reached=tuple(reached), fixed=taken, function=function)

    def graph(self, wanted: Iterable[Value]) -> fx.GraphModule:
        """A function of the inputs that are no numbers of Python."""
        graph, found = fx.Graph(), dict[Value, fx.Node]()
        for value in self.inputs:
            is_number = value in self.constants
            found[value] = graph.get_attr(f"number_{value}") if is_number else graph.placeholder(f"input_{value}")

        def bind(result: Any, made: fx.Node) -> None:
            if result.__class__ is Value:
                found[result] = made
            elif result is not None:
                for i, part in enumerate(result):
                    bind(part, graph.call_function(operator.getitem, (made, i)))

        put = partial(map_aggregate, fn=lambda part: found[part] if part.__class__ is Value else part)
        for node in self.nodes:
            args: Any = put(node.args)
            func = _ATEN.lift_fresh_copy.default if node.func in _FRESH else node.func
            is_same = func in _THE_SAME
            bind(node.result, args[0] if is_same else graph.call_function(func, args, put(dict(node.kwargs))))
            found.update((new, found[old]) for old, new in node.written)
        graph.output([found[value] for value in wanted])
        graph.eliminate_dead_code()
        return fx.GraphModule({f"number_{value}": self.inputs[value].clone() for value in self.constants}, graph)

    def refuse_read(self, place: str, is_own: bool) -> NoReturn:
        """Refuses to record a step in which Python reads a number of a tensor."""
        advice = ": write torch.where, tensor indexing or a mask instead" if is_own else ""
        self._refuse(f"Python reads a number of a tensor{place}, which a recording would freeze{advice}")

    def _note(self, why: str) -> Unrecordable:
        # The first reason counts.
        self.refused = self.refused or Unrecordable(why)
        return self.refused

    def _refuse(self, why: str) -> NoReturn:
        raise self._note(why)

    def _look_at_generators(self) -> None:
        """Notes if somebody has set torch's generators since the last draw."""
        if not all(map(torch.equal, self._generators, _generators())):
            self._note("it seeds torch's generator, or puts it back, as checkpoints of dropout do")

    def _noise_of(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> Noise | None:
        """What the step draws from a generator of the objective's own; ``None`` if the program draws from torch's."""
        generator = kwargs.get("generator")
        if generator is None:
            if _is_called_by("independent"):
                self._refuse(
                    "the baseline of a site is a second run that draws all sites anew (SecondRun). Several particles "
                    "need no second run: write num_particles=2 or more, and leave SecondRun out"
                )
            # Where tables are filled it is the program that draws.
            if any(own.startswith("pyro_bpq.reruns.") and own != "pyro_bpq.reruns.tables" for _, own in frames()):
                self._refuse(
                    "it draws values that are no sites, and costs that read them are computed again at other values"
                )
            return None
        source = generator.initial_seed() - self._first_seed
        if name not in ("rand", "randn") or not 0 <= source < 1 << 20:
            self._refuse(
                f"it draws by {name} from a generator of its own, which a recording cannot use: leave generator=... out"
            )
        return Noise(source, name, tuple(args[0]), kwargs["dtype"])


class _StepCalls(Calls):
    """Lets programs use functions that read numbers while they are recorded."""

    tape: StepTape

    def __init__(self, tape: StepTape) -> None:
        super().__init__(tape)
        self._find = {**handlers(), torch.randint: "seed"}.get

    def seed(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Draws no seed of a further run: it draws nothing itself, or else the step is not recorded."""
        return 0 if _is_called_by("_seed") else func(*args, **kwargs)

    def exposed(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Refuses calls that hand out memory."""
        self.tape.refuse_read(*_reader())

    def copy(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Leaves new tensors to the operators that make them."""
        return func(*args, **kwargs)

    def one_hot(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Does not look whether an index is in range."""
        classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        return func(args[0]) if classes < 0 else one_hot(args[0], classes)

    def index(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Takes a scalar in an index as an index."""
        if not has_scalars(args[1]):
            return func(*args)
        memory, rows = self.tape.storages.behind(args[0]), self.tape.rows
        if func is Tensor.__setitem__:
            lost = [known.parted for known in memory]
            back = [row for row in rows if row.view() is args[2] and row.index is args[1]]
            put(*args)
            for row in back:  # x[i] += 1 puts back the row that it has taken
                row.settled = self.tape.storages.behind(row.memory)[0].last_write
            for known, before in zip(memory, lost, strict=True) if back else ():
                known.parted = before or len(known.views()) > 1
            return None
        found = selected(*args)
        with self.tape.paused:
            rows.append(_Row(found.detach(), weakref.ref(found), args[1]))
        for known in memory:
            known.rows = (*known.rows, (rows[-1].view, args[1], False))
        self.tape.parts += memory
        return found


def _generators() -> list[Tensor]:
    """The states of torch's global generators."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def _reader() -> tuple[str, bool]:
    """Where Python reads a number, in words, and whether that is code of the user's."""
    run = list(takewhile(lambda each: each[1] != "pyro_bpq.compiled.recorder", frames()))
    own = [each for each in run if not (is_library(each[1]) or each[0].f_code.co_filename.startswith("<"))]
    readers = [each for each in run if each[1].startswith(_READERS) and each[1] not in _WATCHING]
    for frame, module in (own or readers)[:1]:
        code, place = frame.f_code, f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return f", in {code.co_name} of {module}: {text_of(frame)!r} ({place})", bool(own)
    return "", False


def _is_called_by(name: str) -> bool:
    """Whether a function of ours of this name runs."""
    return any(each.f_code.co_name == name and module.startswith("pyro_bpq.") for each, module in frames())


def first_line(error: BaseException) -> str:
    """What an error says, without what Pyro adds."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
