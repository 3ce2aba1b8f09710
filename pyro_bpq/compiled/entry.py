r"""A recording in use: which calls it serves, and a step with it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch
from pyro.poutine.runtime import am_i_wrapped, effectful
from torch import Tensor

from pyro_bpq.compiled.calls import Call
from pyro_bpq.compiled.recorder import Recording, distinct
from pyro_bpq.compiled.subject import Subject, all_hold
from pyro_bpq.compiled.updates import Updates, numbers_of
from pyro_bpq.rollout.schedule import scheduled

# Longest time between two comparisons, in steps.
_LONGEST = 1000


class LastInfo(Mapping[str, dict[str, Any]]):
    """What a compiled step found out about each site; it is computed when it is first read."""

    def __init__(self, build: Callable[[], Mapping[str, dict[str, Any]]]) -> None:
        self._build = build
        self._built: Mapping[str, dict[str, Any]] | None = None

    def _all(self) -> Mapping[str, dict[str, Any]]:
        if self._built is None:
            self._built = self._build()
        return self._built

    def __repr__(self) -> str:
        return repr(dict(self._all()))

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self._all()),)


@dataclass(frozen=True, eq=False)
class Outcome:
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
    steps: int = 0  # number of steps it has taken
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])  # seconds to record, and to compile
    note: str = ""  # what went wrong when it was compiled
    thread: threading.Thread | None = None  # compiles it, if that goes on in the background
    # The optimiser's numbers in the last step, and the same as a tensor.
    numbers: tuple[list[float], Tensor] = field(default_factory=lambda: ([], torch.zeros(0)))

    @property
    def is_ready(self) -> bool:
        """Whether it is compiled, or will not be."""
        return self.thread is None or not self.thread.is_alive()

    def as_tensor(self, numbers: list[float]) -> Tensor:
        """The optimiser's numbers as an input; that of the last step where they are the same."""
        if numbers != self.numbers[0]:
            self.numbers = numbers, torch.tensor(numbers, dtype=torch.float64)
        return self.numbers[1]

    @property
    def holds(self) -> bool:
        """Whether critics, statistics and the optimiser's state are where they were."""
        inputs = self.recording.inputs
        return all_hold(inputs.places) and all(update.holds for update in inputs.updates)

    def tensors(self, call: Call) -> list[Tensor] | None:
        """The inputs of a call, without noise and schedules; ``None`` if the recording does not serve it."""
        inputs = self.recording.inputs
        if call.spec != inputs.call.spec or not self.holds:
            return None
        store = dict(pyro.get_param_store().named_parameters())
        if not all(name in store for name in inputs.params):
            return None
        params = [store[name] for name in inputs.params]
        present = set(map(id, params))
        if not all(id(update.parameter) in present for update in inputs.updates):
            # The store was cleared: an optimiser keeps its state by parameter, not by name.
            return None
        tensors = distinct(call.tensors, params, inputs.state, inputs.optimizer_state, inputs.extras)
        serves = len(tensors) == inputs.num_found and inputs.kinds_of(tensors) == inputs.expected
        return tensors if serves else None

    @property
    def is_due(self) -> bool:
        """Whether the programs run once more before the next step, to compare what they do with the recording."""
        is_due = self.steps & (self.steps - 1) == 0 if self.steps < _LONGEST else self.steps % _LONGEST == 0
        return self.steps > 0 and is_due and self.is_ready

    @property
    def steps_in_doubt(self) -> int:
        """Number of steps since the last comparison."""
        if self.steps <= 1:
            return self.steps
        before = 1 << (self.steps - 1).bit_length() - 1 if self.steps <= _LONGEST else self.steps - _LONGEST
        return self.steps - before

    def take(self, subject: Subject, tensors: list[Tensor], number: int) -> Outcome | None:
        """A step on the tensors of a call; ``None`` while it is being compiled."""
        if not self.is_ready:
            return None
        recording = self.recording
        inputs = recording.inputs
        if inputs.num_generators:
            generators = subject.generators(inputs.num_generators)
            tensors += [noise.draw(generators[noise.source]) for noise in inputs.noise]
        tensors += [scheduled(schedule, number) for schedule in inputs.schedules]
        if inputs.updates:
            tensors.append(self.as_tensor(numbers_of(inputs.updates)))
        if am_i_wrapped():
            # SVI learns from these messages which parameters there are.
            store = pyro.get_param_store()
            for name, value in inputs.messages:
                _announce(store[name] if name in inputs.params else value, name=name)
        with torch.no_grad():
            results = self.run(*[tensors[i] for i in recording.used], *recording.constants)
        self.steps += 1
        for update in inputs.updates:
            update.count()
        ahead = 1 + len(recording.graded)
        leaves = [tensors[i] for i in recording.graded]
        rest = results[ahead:]
        return Outcome(results[0], leaves, results[1:ahead], LastInfo(functools.partial(recording.info, rest)))


@effectful(type="param")
def _announce(value: Tensor) -> Tensor:
    return value
