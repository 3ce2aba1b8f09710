r"""Records a step as a graph of tensor operators.

Critics and statistics learn within the recording: their tensors are written in place. A step whose loss is not finite
leaves them as they were. A step is recorded twice, and counts if both runs are alike.
"""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.poutine.runtime import am_i_wrapped, effectful
from torch import Tensor, fx

from pyro_bpq.compiled.subject import (
    Subject,
    Updates,
    all_hold,
    apply_all,
    distinct,
    numbers_of,
    tensors_of,
    untraced,
)
from pyro_bpq.compiled.watch import NotYet, StepTape, first_line
from pyro_bpq.errors import Unrecordable
from pyro_bpq.record.key import Call, kind_of
from pyro_bpq.record.values import Node, RecordingError, Value, results_of
from pyro_bpq.record.watch import gradients_of, inputs_of, leaf_of
from pyro_bpq.rollout.runs import RecordedStep, scheduled

# Number of shapes that are shown.
_SHOWN = 6
# Longest time between two comparisons, in steps.
_LONGEST = 1000

Info = dict[str, dict[str, Any]]


class LastInfo(UserDict[str, dict[str, Any]]):
    """What a compiled step found out about each site; it is computed when it is first read."""

    def __init__(self, build: Callable[[], Mapping[str, dict[str, Any]]]) -> None:
        self._build = build

    @cached_property
    def data(self) -> dict[str, dict[str, Any]]:  # type: ignore[override]
        """By site."""
        return dict(self._build())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.data,)

    def __copy__(self) -> LastInfo:
        return LastInfo(lambda: self.data)


class Outcome(NamedTuple):
    """The results of a compiled step."""

    loss: Tensor  # the loss in nats
    leaves: Sequence[Tensor]  # the tensors that collect gradients
    gradients: Sequence[Tensor]  # their gradients
    info: LastInfo  # what is known of each site

    def differentiable_loss(self) -> Tensor:
        """The loss, whose ``backward`` gives the gradients."""
        if not self.leaves:
            return self.loss
        return _Known.apply(self.loss, self.gradients, *self.leaves)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Adds the gradients to ``.grad``, as ``backward`` does."""
        given = set[int]()
        for leaf, gradient in zip(self.leaves, self.gradients, strict=True):
            if leaf.grad is not None:
                leaf.grad.add_(gradient)
                continue
            # Two leaves may not share a gradient, which optimisers write into.
            is_own = gradient.is_contiguous() and gradient.data_ptr() not in given
            leaf.grad = gradient if is_own else gradient.clone(memory_format=torch.contiguous_format)
            given.add(leaf.grad.data_ptr())


class _Known(torch.autograd.Function):
    """A value with known gradients to some leaves."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        # The scalar may be on another device than the gradient.
        return None, None, *(gradient * outer.to(gradient.device) for gradient in ctx.gradients)


class Cut(NamedTuple):
    """A tensor that a result of the graph is, or that is cut out of it."""

    base: Value  # the result
    path: tuple[tuple[int, int], ...]  # dimension and index of each selection


class Recording:
    """A recorded step, and its use.

    Attributes:
        updater: The optimiser that is part of the step; ``None`` if there is none.
        first: Number of steps before the programs are first compared with what is recorded.
        steps: Number of steps it has taken.
        checked: This number when the programs were last seen to do what is recorded.
        seconds: Seconds to record, and to compile.
        note: What went wrong when it was compiled.
        thread: Compiles it, if that goes on in the background.
    """

    first: int = 1
    steps: int = 0
    checked: int = 0
    note: str = ""
    thread: threading.Thread | None = None

    def __init__(self, subject: Subject, program: Any, call: Call, number: int, updates: Updates | None = None) -> None:
        """Takes a step that leaves no trace, and writes it down."""
        noise, self.updater, self.seconds = subject.noise, updates, [0.0, 0.0]
        # What its call looked like, and what it has done.
        self.call, self.tape = call, (tape := StepTape(noise.seed_of(noise.number + 1), call))
        # Critics, statistics and the state of their optimiser, and the tensors among these.
        self.places = subject.places()
        self.state = tensors_of(self.places)
        messages = poutine.trace(param_only=True)
        torch.clear_autocast_cache()  # what an earlier run has cast is no operator of this one
        with untraced(subject):
            before_step = noise.number
            # With a handler around, as in SVI, Pyro constrains parameters in another way than without.
            with messages, torch.backends.mkldnn.flags(enabled=False), tape:
                with torch.no_grad():
                    before = [tensor.clone() for tensor in self.state]
                result, surrogate = subject.recorded_step(program, RecordedStep.of(number, tape.option))
                loss = result.loss.detach()
                leaves = inputs_of(surrogate)
                graded = gradients_of(surrogate, leaves)
                subject.learn()
                with torch.no_grad():
                    is_finite = torch.isfinite(loss)
                    for tensor, old in zip(self.state, before, strict=True):
                        tensor.copy_(torch.where(is_finite, tensor, old))
                # The values of the parameters that the programs announce to handlers, by name.
                announced = ((name, site) for name, site in messages.trace.nodes.items() if site["type"] == "param")
                self.messages = {name: site["value"] for name, site in announced}
                parameters = distinct(map(leaf_of, self.messages.values()))
                # The updates of parameters by an optimiser; none if the step ends with gradients.
                self.updates = () if updates is None else updates.of(parameters, leaves)
                moved = {id(update.parameter) for update in self.updates}
                known = {} if updates is None else updates.optim.optim_objs
                self.idle = [each for each in parameters if each in known and id(each) not in moved]
                with tape.paused:
                    numbers = numbers_of(self.updates)
                apply_all(self.updates, graded, numbers)
            self.num_generators = noise.number - before_step  # that the objective makes for itself
            now = subject.places()
        if len(now) != len(self.places) or any(a.value is not b.value for a, b in zip(now, self.places, strict=True)):
            raise NotYet("its critics are not built yet")
        for update in self.updates:
            graded.pop(update.parameter, None)
        store = dict(pyro.get_param_store().named_parameters())
        # The tensors that are found in each call, and their shapes and types.
        self.params = [name for name in self.messages if name in store]
        found = distinct(call.tensors, [store[name] for name in self.params], self.state)
        self.kinds = [*map(kind_of, found)]
        # The loss, and the gradients of leaves that no optimiser in the graph uses.
        self.results = [tape.value_of(tensor) for tensor in (loss, *graded.values())]
        # What is known of each site: its name, a key and a value.
        made = {value: node for node in tape.nodes for value in results_of(node)}
        self.info = [
            (site, key, _cut(tape.value_of(value), made) if isinstance(value, Tensor) else value)
            for site, entry in (result.info if result.learns else {}).items()
            for key, value in entry.items()
        ]
        tape.forget()
        # Tensors that the graph takes, but for those that hold Python's numbers.
        self.inputs = [tensor for value, tensor in tape.inputs.items() if value not in tape.constants]
        tensors = [*found, *(own for _, own in tape.own_noise), *(own for _, own in tape.scheduled), numbers]
        everything = distinct(tensors, self.inputs, graded)
        self.constants = everything[len(tensors) :]  # tensors that stay, as the state of the optimiser
        # What the graph takes, as positions: the tensors that are found in each call, each once, in the order of
        # ``call``, ``params`` and ``state``; then the noise, the schedules, the numbers of the optimiser; then the
        # constants.
        place = {id(tensor): i for i, tensor in enumerate(everything)}
        self.reads = [place[id(tensor)] for tensor in self.inputs]
        self.graded = [place[id(leaf)] for leaf in graded]  # positions of these leaves
        # What Python has read of the data of the call.
        self.check = tape.check()
        self.numbers = self.check.numbers(call)
        # What tells the operators of two runs apart: their names, their numbers, and which results they read.
        operators = [str((node[:4], node.reads)) for node in tape.nodes]
        fixed = [tape.inputs[value] for value in tape.constants]
        self.digest = hash((*operators, *(str((own.dtype, own.shape, own.tolist())) for own in fixed)))

    def __str__(self) -> str:
        (record, compile_), updated, handed = self.seconds, len(self.updates), len(self.graded)
        does = [f"it updates {updated} parameters"] if updated else []
        if handed or not updated:
            does.append(f"it gives {handed} gradients to the optimiser")
        recorded = f"Recorded: {self.num_operators} operators, {len(self.reads)} input tensors, in {record:.1f} s"
        parts = [recorded, " and ".join(does)]
        if self.note:
            parts.append(self.note)
        elif not self.is_ready:
            parts.append("being compiled, the recorded operators run as they are meanwhile")
        elif compile_:
            parts.append(f"compiled in {compile_:.1f} s")
        text = "; ".join([*parts, f"{self.steps} steps taken."])
        shapes = [str(tuple(tensor.shape)) for tensor in self.call.tensors]
        shapes[_SHOWN:] = ["..."] * (len(shapes) > _SHOWN)
        return f"{text} It serves tensors of the shapes {', '.join(shapes)}." if shapes else text

    @property
    def is_ready(self) -> bool:
        """Whether it is compiled, or will not be."""
        return self.thread is None or not self.thread.is_alive()

    @property
    def holds(self) -> bool:
        """Whether critics, statistics and the optimiser's state are where they were."""
        return all_hold(self.places) and all(update.holds for update in self.updates)

    def tensors(self, call: Call) -> list[Tensor] | None:
        """The inputs of a call, without noise and schedules; ``None`` if the recording does not serve it."""
        if call.spec != self.call.spec or not self.holds:
            return None
        store = dict(pyro.get_param_store().named_parameters())
        params = [store[name] for name in self.params if name in store]
        # If the store was cleared: an optimiser keeps its state by parameter, not by name.
        updated = {id(update.parameter) for update in self.updates}
        if len(params) < len(self.params) or not updated <= set(map(id, params)):
            return None
        tensors = distinct(call.tensors, params, self.state)
        return tensors if [*map(kind_of, tensors)] == self.kinds else None

    @property
    def is_due(self) -> bool:
        """Whether the programs run once more before the next step, to compare what they do with the recording."""
        return self.is_ready and self.steps >= self.checked + min(max(self.checked, self.first), _LONGEST)

    def take(self, subject: Subject, tensors: list[Tensor], number: int) -> Outcome:
        """A step on the tensors of a call."""
        if self.num_generators:
            generators = [subject.noise() for _ in range(self.num_generators)]
            tensors += [noise.draw(generators[noise.source]) for noise, _ in self.tape.own_noise]
        tensors += [scheduled(schedule, number) for schedule, _ in self.tape.scheduled]
        tensors.append(numbers_of(self.updates))
        if am_i_wrapped():
            # SVI learns from these messages which parameters there are.
            store = pyro.get_param_store()
            for name, value in self.messages.items():
                _announce(store[name] if name in self.params else value, name=name)
        with torch.no_grad():
            tensors += self.constants
            results = self.run(*[tensors[i] for i in self.reads])
        self.steps += 1
        for update in self.updates:
            update.count()
        if self.updater is not None:
            self.updater.decay(self.idle)
        leaves, ahead = [tensors[i] for i in self.graded], 1 + len(self.graded)
        return Outcome(results[0], leaves, results[1:ahead], LastInfo(partial(self.build, results[ahead:])))

    def is_like(self, other: Recording) -> bool:
        """Whether another step would be recorded as the same graph."""
        is_same = self.digest == other.digest and self.reads == other.reads
        # What a recording of the programs holds is made anew with the next one.
        kinds, others = (list(map(kind_of, each.constants)) for each in (self, other))
        pairs = zip(self.constants, other.constants, strict=False)
        return is_same and kinds == others and all(own is given or torch.equal(own, given) for own, given in pairs)

    @property
    def shown(self) -> tuple[Value, ...]:
        """The results that are known of sites, or that this is cut out of."""
        return tuple(dict.fromkeys(value.base for *_, value in self.info if isinstance(value, Cut)))

    @cached_property
    def run(self) -> Callable[..., Sequence[Tensor]]:
        """The compiled function; the recorded operators as they are while there is none."""
        return self.graph

    @cached_property
    def graph(self) -> fx.GraphModule:
        """A function of what it reads: the loss, the gradients, and the tensors that :meth:`build` takes."""
        return self.tape.graph([*self.results, *self.shown])

    def difference(self, call: Call) -> str:
        """Where another call differs from that of the recording, in words; empty where the two are alike."""
        if text := self.call.difference(call):
            return text
        read = zip(self.check.numbers(call), self.numbers, self.tape.guards, strict=True)
        return next((f"Python reads other numbers{guard.read[0]}" for new, old, guard in read if new != old), "")

    def build(self, values: Sequence[Tensor]) -> Info:
        """What is known of each site, from the last results of the graph."""
        built, found = Info(), dict(zip(self.shown, values, strict=True))
        for site, key, value in self.info:
            if isinstance(value, Cut):
                value = reduce(lambda own, at: own.select(*at), value.path, found[value.base])
            built.setdefault(site, {})[key] = value
        return built

    @property
    def num_operators(self) -> int:
        """Number of operators in the graph."""
        return sum(node.op == "call_function" for node in self.graph.graph.nodes)


def record(subject: Subject, program: Any, call: Call, number: int, updates: Updates | None = None) -> Recording:
    """Records a step."""
    try:
        found, again = (Recording(subject, program, call, number, updates) for _ in range(2))
        if not found.is_like(again):
            # The first run may have made functions that the others find.
            found, again = again, Recording(subject, program, call, number, updates)
    except Unrecordable:
        raise
    except (RuntimeError, RecordingError) as error:  # of tensors that no graph can hold
        raise Unrecordable(first_line(error)) from error
    if not found.is_like(again):
        raise Unrecordable(
            f"it computes something else each time that it runs ({found.num_operators} operators, then "
            f"{again.num_operators}): does Python count in it? Hand over what changes as a tensor or a float among the "
            "arguments of step()"
        )
    return found


_announce = effectful(lambda value: value, type="param")


def _cut(value: Value, made: Mapping[Value, Node]) -> Cut:
    """How a tensor is cut out of a result, from what has made each value."""
    path: tuple[tuple[int, int], ...] = ()
    while (node := made.get(value)) is not None and node.func is torch.ops.aten.select.int:
        value, *at = node.args
        path = ((at[0], at[1]), *path)
    return Cut(value, path)
