r"""A recording in use: how it is compiled, which calls it serves, and a step with it."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import warnings
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import pyro
import torch
from pyro.poutine.runtime import am_i_wrapped, effectful
from torch import Tensor
from torch._prims_common import clone_preserve_strides
from tqdm import tqdm

from pyro_bpq.compiled.backends import compile_graph, missing
from pyro_bpq.compiled.options import Compile
from pyro_bpq.compiled.recorder import Recording, first_line
from pyro_bpq.compiled.subject import Subject, Updates, all_hold, distinct, numbers_of
from pyro_bpq.errors import BPQWarning
from pyro_bpq.record.key import Call, kind_of
from pyro_bpq.record.sandbox import Draws
from pyro_bpq.rollout.schedule import scheduled

LOG = logging.getLogger("pyro_bpq")

# Number of operators above which a step is compiled in the background, where that is left open.
_LONG = 10_000
# Number of shapes that are shown.
_SHOWN = 6
# Longest time between two comparisons, in steps.
_LONGEST = 1000


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


@dataclass(eq=False)
class Entry:
    """A recording and its use."""

    recording: Recording  # the recording
    run: Callable[..., Sequence[Tensor]]  # the compiled function
    updates: Updates | None = None  # the optimiser that is part of the step; ``None`` if there is none
    first: int = 1  # number of steps before the programs are first compared with what is recorded
    steps: int = 0  # number of steps it has taken
    checked: int = 0  # this number when the programs were last seen to do what is recorded
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])  # seconds to record, and to compile
    note: str = ""  # what went wrong when it was compiled
    thread: threading.Thread | None = None  # compiles it, if that goes on in the background

    def __str__(self) -> str:
        recording, (record, compile_) = self.recording, self.seconds
        updated, handed = len(recording.updates), len(recording.graded)
        does = [f"it updates {updated} parameters"] if updated else []
        if handed or not updated:
            does.append(f"it gives {handed} gradients to the optimiser")
        parts = [
            f"Recorded: {recording.num_operators} operators, {len(recording.reads)} input tensors, in {record:.1f} s",
            " and ".join(does),
        ]
        if self.note:
            parts.append(self.note)
        elif not self.is_ready:
            parts.append("being compiled, the recorded operators run as they are meanwhile")
        elif compile_:
            parts.append(f"compiled in {compile_:.1f} s")
        text = "; ".join([*parts, f"{self.steps} steps taken."])
        shapes = [str(tuple(tensor.shape)) for tensor in recording.call.tensors]
        shapes[_SHOWN:] = ["..."] * (len(shapes) > _SHOWN)
        return f"{text} It serves tensors of the shapes {', '.join(shapes)}." if shapes else text

    @property
    def is_ready(self) -> bool:
        """Whether it is compiled, or will not be."""
        return self.thread is None or not self.thread.is_alive()

    @property
    def holds(self) -> bool:
        """Whether critics, statistics and the optimiser's state are where they were."""
        recording = self.recording
        return all_hold(recording.places) and all(update.holds for update in recording.updates)

    def tensors(self, call: Call) -> list[Tensor] | None:
        """The inputs of a call, without noise and schedules; ``None`` if the recording does not serve it."""
        recording = self.recording
        if call.spec != recording.call.spec or not self.holds:
            return None
        store = dict(pyro.get_param_store().named_parameters())
        params = [store[name] for name in recording.params if name in store]
        # If the store was cleared: an optimiser keeps its state by parameter, not by name.
        updated = {id(update.parameter) for update in recording.updates}
        if len(params) < len(recording.params) or not updated <= set(map(id, params)):
            return None
        tensors = distinct(call.tensors, params, recording.state)
        return tensors if [*map(kind_of, tensors)] == recording.kinds else None

    @property
    def is_due(self) -> bool:
        """Whether the programs run once more before the next step, to compare what they do with the recording."""
        return self.is_ready and self.steps >= self.checked + min(max(self.checked, self.first), _LONGEST)

    def take(self, subject: Subject, tensors: list[Tensor], number: int) -> Outcome:
        """A step on the tensors of a call."""
        recording = self.recording
        if recording.num_generators:
            generators = [subject.noise() for _ in range(recording.num_generators)]
            tensors += [noise.draw(generators[noise.source]) for noise, _ in recording.tape.own_noise]
        tensors += [scheduled(schedule, number) for schedule, _ in recording.tape.scheduled]
        tensors.append(numbers_of(recording.updates))
        if am_i_wrapped():
            # SVI learns from these messages which parameters there are.
            store = pyro.get_param_store()
            for name, value in recording.messages.items():
                _announce(store[name] if name in recording.params else value, name=name)
        with torch.no_grad():
            tensors += recording.constants
            results = self.run(*[tensors[i] for i in recording.reads])
        self.steps += 1
        for update in recording.updates:
            update.count()
        ahead = 1 + len(recording.graded)
        leaves = [tensors[i] for i in recording.graded]
        rest = results[ahead:]
        return Outcome(results[0], leaves, results[1:ahead], LastInfo(partial(recording.build, rest)))


@effectful(type="param")
def _announce(value: Tensor) -> Tensor:
    return value


def make(entry: Entry, options: Compile) -> None:
    """Compiles what an entry has recorded, in the background if that is asked for; notes why it could not."""
    backend, recording = options.backend, entry.recording
    examples, background = recording.inputs, options.background
    if background is None:
        background = recording.num_operators > _LONG
    if lack := missing(backend, examples[0].device if examples else torch.device("cpu")):
        entry.note = f"{lack}, so the recorded operators run as they are"
        warnings.warn(f"compile: {entry.note}.", BPQWarning, stacklevel=2)
        return
    if backend == "eager":
        return
    LOG.info("Compiling a step of %d operators.", recording.num_operators)
    line = _line(recording.num_operators, background)
    copies = [clone_preserve_strides(tensor.detach()) for tensor in examples]  # compiled code counts on strides

    def work() -> None:
        start = time.perf_counter()
        # Its first run draws. A thread cannot take that back: the main one draws meanwhile.
        draws = None if background else Draws()
        try:
            with torch.no_grad(), line:
                compiled = compile_graph(recording.graph, backend, copies)
                compiled(*copies)
        except Exception as error:  # A compiler may raise anything.
            entry.note = f"the compiler failed ({first_line(error)})"
            warnings.warn(f"compile: {entry.note}; the recorded operators run as they are.", BPQWarning, stacklevel=2)
        else:
            entry.run = compiled
        finally:
            if draws is not None:
                draws.again()
        entry.seconds[1] = time.perf_counter() - start

    if background:
        entry.thread = threading.Thread(target=work, daemon=True)
        entry.thread.start()
    else:
        work()


def _line(operators: int, background: bool) -> contextlib.AbstractContextManager[Any]:
    """A line that says what is compiled; on a terminal it goes when the wait is over."""
    text = f"Compiling a step of {operators} operators, once for all calls like this one"
    if background:
        tqdm.write(f"{text}; steps go on meanwhile.", file=sys.stderr)
        return contextlib.nullcontext()
    return tqdm(total=1, desc=text, bar_format="{desc} ...", leave=not sys.stderr.isatty())
