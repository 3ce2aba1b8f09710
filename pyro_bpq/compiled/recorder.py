r"""Records a step as a graph of tensor operators.

The step runs once under :func:`torch.fx.experimental.proxy_tensor.make_fx`, which follows tensors by identity. So the
very parameters, buffers, arguments and tensors of critics are handed over as inputs, and programs that reach them
through closures or the parameter store are recorded right. Critics and statistics learn within the recording: their
tensors are written in place. A step whose loss is not finite leaves them as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor, fx

from pyro_bpq.compiled.subject import (
    OptimizerUpdate,
    Place,
    Subject,
    Updates,
    apply_all,
    numbers_of,
    tensors_of,
    untraced,
)
from pyro_bpq.compiled.watch import Fingerprint, Noise, NotYet, RecordedIndexing, StepWatch
from pyro_bpq.errors import Unrecordable
from pyro_bpq.record.key import Call, Kind, kind_of
from pyro_bpq.reruns.gradients import inputs_of
from pyro_bpq.rollout.schedule import RecordedStep, scheduled
from pyro_bpq.tracing.sandbox import LentBuffers
from pyro_bpq.tracing.watch import leaf_of

Info = dict[str, dict[str, Any]]

# Stands for a tensor among the results of a graph.
_IN_RESULTS = "in the results"


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a recorded step reads."""

    call: Call  # what its call looked like
    params: tuple[str, ...]  # names in Pyro's parameter store
    places: tuple[Place, ...]  # critics, statistics, and the state of their optimiser
    extras: tuple[Tensor, ...]  # leaves of autograd that are reached in no other way
    noise: tuple[Noise, ...]  # what the step draws from generators of the objective's own
    schedules: tuple[Callable[[int], float], ...]  # options that change from step to step
    messages: tuple[tuple[str, Any], ...]  # names and values of the parameters that the programs announce to handlers
    # The updates of parameters by an optimiser; none if the step ends with gradients.
    updates: tuple[OptimizerUpdate, ...]
    # The tensors at the recording, in this order, each once; then the noise, then the schedules, then the numbers of
    # the optimiser, if it is part of the step.
    tensors: tuple[Tensor, ...]
    leaves: tuple[int, ...]  # positions of those that collect gradients
    num_found: int  # number of those that are found anew in each call: all before the noise
    # Shapes and types of these tensors, but for the optimiser's state, which stays as long as it is in its place.
    kinds: tuple[Kind, ...]
    num_generators: int  # number of generators that the objective makes for itself
    # What the step may write: critics, statistics, buffers of modules, and what the optimiser updates.
    written: tuple[Tensor, ...]

    @cached_property
    def state(self) -> tuple[Tensor, ...]:
        """The tensors among the places."""
        return tensors_of(self.places)

    @cached_property
    def optimizer_state(self) -> tuple[Tensor, ...]:
        """The tensors of the optimiser's state."""
        return tensors_of(place for update in self.updates for place in update.places)


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorded step."""

    inputs: Inputs  # what it reads
    used: tuple[int, ...]  # positions of the inputs that the graph takes
    # Further tensors that it takes, which were found in no other way. They are those of the recording.
    constants: tuple[Tensor, ...]
    # A function of these tensors. Its results are the loss, the gradients of leaves, and tensors of ``info``.
    graph: fx.GraphModule
    # Positions of these leaves: they have a gradient, and no optimiser in the graph updates them.
    graded: tuple[int, ...]
    info: Callable[[Sequence[Tensor]], Info]  # builds what is known of each site from the last results
    print: Fingerprint  # tells this step from others

    @property
    def num_operators(self) -> int:
        """Number of operators in the graph."""
        return sum(node.op == "call_function" for node in self.graph.graph.nodes)


def record(subject: Subject, program: Any, call: Call, number: int, updates: Updates | None = None) -> Recording:
    """Records a step."""
    # It loads a compiler's worth of modules, which most programs never need.
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = _look(subject, program, call, number, updates)
    kept: list[Any] = []

    def body(*tensors: Tensor) -> list[Tensor]:
        results, _, info, graded = _run(subject, program, inputs, tensors, number)
        kept.append((info, graded))
        return results

    with untraced(subject, inputs.written):
        try:
            graph = make_fx(body)(*inputs.tensors)
        except Unrecordable:
            raise
        except RuntimeError as error:
            raise Unrecordable(first_line(error)) from error
    info, graded = kept[0]
    # Under make_fx torch takes some operators apart; two plain runs are compared.
    found, again = (fingerprint(subject, program, inputs, inputs.tensors, number) for _ in range(2))
    if not found.is_like(again):
        raise Unrecordable(
            f"it computes something else each time that it runs ({found.number} operators, then {again.number}): does "
            "Python count in it? Hand over what changes as a tensor or a float among the arguments of step()"
        )
    return _finished(graph, inputs, found, info, graded)


def fingerprint(subject: Subject, program: Any, inputs: Inputs, tensors: Sequence[Tensor], number: int) -> Fingerprint:
    """The fingerprint of a step that leaves no trace."""
    with untraced(subject, inputs.written):
        return _run(subject, program, inputs, tensors, number)[1].fingerprint


def _look(subject: Subject, program: Any, call: Call, number: int, updates: Updates | None) -> Inputs:
    """Finds what a step reads."""
    places = subject.places()
    step = RecordedStep.of(number)
    watch = StepWatch((), subject.first_seed())
    messages = poutine.trace(param_only=True)
    own = tensors_of(places)
    with untraced(subject, own), LentBuffers() as lent:
        made = subject.num_generators()
        with messages, watch, RecordedIndexing(watch):
            result = subject.recorded_step(program, step)
        made = subject.num_generators() - made
        leaves = inputs_of(result.surrogate)
        subject.learn()
    now = subject.places()
    if len(now) != len(places) or any(a.value is not b.value for a, b in zip(now, places, strict=True)):
        raise NotYet("its critics are not built yet")
    store = dict(pyro.get_param_store().named_parameters())
    sites: Any = messages.trace.nodes
    announced = {name: site["value"] for name, site in sites.items() if site["type"] == "param"}
    params = tuple(name for name in announced if name in store)
    updated: tuple[OptimizerUpdate, ...] = ()
    if updates is not None:
        updated = updates.of(distinct(map(leaf_of, announced.values())), leaves)
    of_optimizer = tensors_of(place for update in updated for place in update.places)
    known = distinct(call.tensors, [store[name] for name in params], own)
    checked = distinct(known, leaves)
    tensors = distinct(checked, of_optimizer)
    schedules = tuple(step.read)
    everything = [*tensors, *watch.drawn, *(scheduled(schedule, number) for schedule in schedules)]
    if updated:
        everything.append(torch.tensor(numbers_of(updated), dtype=torch.float64))
    position = {id(tensor): i for i, tensor in enumerate(tensors)}
    return Inputs(
        call=call,
        params=params,
        places=tuple(places),
        extras=tuple(checked[len(known) :]),
        noise=tuple(watch.noise),
        schedules=schedules,
        messages=tuple(announced.items()),
        updates=updated,
        tensors=tuple(everything),
        leaves=tuple(position[id(leaf)] for leaf in leaves),
        num_found=len(tensors),
        kinds=tuple(map(kind_of, checked)),
        num_generators=made,
        written=(*own, *lent.originals, *of_optimizer, *(update.parameter for update in updated)),
    )


def _run(
    subject: Subject, program: Any, inputs: Inputs, tensors: Sequence[Tensor], number: int
) -> tuple[list[Tensor], StepWatch, list[tuple[str, str, Any]], tuple[int, ...]]:
    """Takes a step whose own noise and schedules are inputs; critics, statistics and parameters learn from it."""
    rest = iter(tensors[inputs.num_found :])
    noise, schedules = [next(rest) for _ in inputs.noise], [next(rest) for _ in inputs.schedules]
    leaves = [tensors[i] for i in inputs.leaves]
    watch = StepWatch(tensors, subject.first_seed(), noise)
    torch.clear_autocast_cache()  # what an earlier run has cast is no operator of this one
    # With a handler around, as in SVI, Pyro constrains parameters in another way than without.
    with poutine.trace(param_only=True), watch, RecordedIndexing(watch):
        with torch.no_grad():
            before = [tensor.clone() for tensor in inputs.state]
        result = subject.recorded_step(program, RecordedStep.of(number, schedules))
        found: Sequence[Tensor | None] = ()
        if leaves:
            found = torch.autograd.grad(result.surrogate, leaves, allow_unused=True)
        subject.learn()
        with torch.no_grad():
            is_finite = torch.isfinite(result.loss)
            for tensor, old in zip(inputs.state, before, strict=True):
                tensor.copy_(torch.where(is_finite, tensor, old))
        of_leaves = {id(leaf): gradient for leaf, gradient in zip(leaves, found, strict=True) if gradient is not None}
        apply_all(inputs.updates, of_leaves, rest)
    for update in inputs.updates:
        of_leaves.pop(id(update.parameter), None)
    graded = tuple(i for i in inputs.leaves if id(tensors[i]) in of_leaves)
    info = [(site, key, value) for site, own in result.info.items() for key, value in own.items() if key != "ms"]
    gradients = list(of_leaves.values())
    shown = [value for _, _, value in info if isinstance(value, Tensor)]
    # What is no tensor stays; tensors stand behind the gradients in this order.
    plan = [(site, key, _IN_RESULTS if isinstance(value, Tensor) else value) for site, key, value in info]
    return [result.loss, *gradients, *shown], watch, plan, graded


def distinct(*groups: Iterable[Tensor]) -> list[Tensor]:
    """The tensors of some groups in their order, each once."""
    return list({id(tensor): tensor for group in groups for tensor in group}.values())


def _finished(
    graph: fx.GraphModule,
    inputs: Inputs,
    found: Fingerprint,
    info: list[tuple[str, str, Any]],
    graded: tuple[int, ...],
) -> Recording:
    """Takes constants in as inputs, shows tensors of ``info`` as parts of larger ones, and drops unused inputs."""
    nodes = graph.graph
    (output,) = (node for node in nodes.nodes if node.op == "output")
    for node in [node for node in reversed(nodes.nodes) if str(node.target).startswith("profiler.")]:
        nodes.erase_node(node)
    for node in list(nodes.nodes):
        if node.target is torch.ops.aten.detach.default:
            # Nothing in the graph has a gradient of its own.
            node.replace_all_uses_with(node.args[0])
            nodes.erase_node(node)
    results = list(output.args[0])
    first = 1 + len(graded)
    tensors, picks = [*results[:first]], list[tuple[int, tuple[tuple[int, int], ...]]]()
    for node in results[first:]:
        base, path = _base(node)
        if base not in tensors[first:]:
            tensors.append(base)
        picks.append((tensors.index(base, first) - first, path))
    output.args = (tensors,)
    nodes.eliminate_dead_code()
    constants = _lifted(graph)
    places = [node for node in nodes.nodes if node.op == "placeholder"][: len(inputs.tensors)]
    used = []
    for i, node in enumerate(places):
        if node.users or node in tensors:
            used.append(i)
        else:
            nodes.erase_node(node)
    graph.recompile()

    def build(values: Sequence[Tensor]) -> Info:
        built: Info = {}
        taken = iter(picks)
        for site, key, value in info:
            if value is _IN_RESULTS:
                at, path = next(taken)
                value = values[at]
                for dim, index in path:
                    value = value.select(dim, index)
            built.setdefault(site, {})[key] = value
        return built

    return Recording(inputs, tuple(used), constants, graph, graded, build, found)


def _lifted(graph: fx.GraphModule) -> tuple[Tensor, ...]:
    """Makes inputs of the tensors that a graph holds, so that what is written into them is seen."""
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    last, found = places[-1], dict[str, Any]()
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        if all(str(user.target).startswith("aten.lift") for user in node.users):
            # A number of the program's own, made anew in each run.
            continue
        name = str(node.target)
        if name not in found:
            with graph.graph.inserting_after(last):
                last = found[name] = graph.graph.placeholder(f"constant_{len(found)}")
        node.replace_all_uses_with(found[name])
        graph.graph.erase_node(node)
    return tuple(getattr(graph, name) for name in found)


def _base(node: Any) -> tuple[Any, tuple[tuple[int, int], ...]]:
    """A tensor that a result is cut out of, and how."""
    path: list[tuple[int, int]] = []
    while node.target is torch.ops.aten.select.int:
        node, dim, index = node.args
        path.append((dim, index))
    return node, tuple(reversed(path))


def first_line(error: BaseException) -> str:
    """What an error says, without what Pyro adds."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
