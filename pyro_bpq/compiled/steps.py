r"""Decides, call by call, whether a step runs a recording or the programs themselves.

A kind of call runs eagerly until the structure, the number of particles and the critics of its step are settled. Then
it is recorded. A recording serves calls that look alike. After 1, 2, 4, 8, ... steps, and at least every 1,000, the
programs run once more without a trace, and what they do is compared with the recording.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyro
import torch
from pyro.poutine.runtime import am_i_wrapped, effectful
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from tqdm import tqdm

from pyro_bpq.compiled.backends import compile_graph, missing, outdated
from pyro_bpq.compiled.calls import Call, kind_of, reach
from pyro_bpq.compiled.options import Compile
from pyro_bpq.compiled.recorder import Recording, distinct, fingerprint, record
from pyro_bpq.compiled.subject import Subject, all_hold
from pyro_bpq.compiled.updates import Updates, numbers_of
from pyro_bpq.compiled.watch import NotYet
from pyro_bpq.errors import BPQWarning, Unrecordable
from pyro_bpq.rollout.schedule import scheduled
from pyro_bpq.tracing.sandbox import Draws

LOG = logging.getLogger("pyro_bpq")
# Number of eager steps of a kind before it is recorded.
_EAGER_STEPS = 3
# Number of kinds of calls that are counted.
_MOST_KINDS = 256
# Number of kinds of calls whose first step looks at the structure again. Where there are more, numbers change often.
_MOST_LOOKS = 32
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


class CompiledSteps:
    """The recordings of an objective.

    Attributes:
        entries: The recordings, the oldest first.
        reasons: Why kinds of calls run eagerly.
        outside: Why the optimiser's update is no part of the recordings; empty if it is, or if there is none.
    """

    def __init__(self, options: Compile) -> None:
        self.options = options
        self.outside = ""
        self.forget()

    def __repr__(self) -> str:
        return f"CompiledSteps({self.options}, {len(self.entries)} recordings)"

    def __deepcopy__(self, memo: Any) -> CompiledSteps:
        return CompiledSteps(self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledSteps, (self.options,)

    def forget(self) -> None:
        """Forgets all recordings."""
        self.entries: list[Entry] = []
        self.reasons: list[str] = []
        self._told = set[str]()
        # Number of eager steps of each kind of call, and number of attempts to record.
        self._seen: dict[int, int] = {}
        self._made = 0
        # The arrays of numpy of the last call, and the number of calls in a row that had new ones.
        self._arrays: list[weakref.ref[Any]] = []
        self._new_arrays = 0
        # The float arguments of the last call, by position, and those that have changed.
        self._floats: dict[int, float] = {}
        self._varying: set[int] = set()

    def take(self, subject: Subject, program: Any, number: int, updates: Updates | None = None) -> Outcome | None:
        """Takes a compiled step; ``None`` if the step has to run eagerly."""
        if updates is not None:
            self.outside = updates.refuses()
            if self.outside:
                return None
        refusal = outdated(torch.__version__) or subject.refuses()
        if refusal:
            self._tell(refusal)
            return None
        if not subject.is_settled(program):
            return None
        program = self._with_tensors(program)
        model, guide, args, kwargs = program
        roots = {"model": model, "guide": guide, "args": args, "kwargs": kwargs, "the objective": subject.options()}
        call = reach(roots)
        if call.arrays and self._has_new_arrays(call, roots):
            return None
        for entry in self.entries:
            tensors = entry.tensors(call) if entry.updates is updates else None
            if tensors is not None:
                is_due = _is_due(entry.steps) and entry.is_ready
                if is_due and not self._is_still(subject, program, entry, tensors, number):
                    return None
                return self._run(subject, entry, tensors, number)
        made = self._recorded(subject, program, roots, call, number, updates)
        tensors = None if made is None else made.tensors(call)
        return None if made is None or tensors is None else self._run(subject, made, tensors, number)

    def _has_new_arrays(self, call: Call, roots: Any) -> bool:
        """Whether some arrays of numpy were not there in the last call: a recording holds for the very same ones."""
        last, self._arrays = self._arrays, [weakref.ref(array) for _, array in call.arrays]
        known = {id(array) for array in (reference() for reference in last) if array is not None}
        new = [i for i, (_, array) in enumerate(call.arrays) if id(array) not in known]
        self._new_arrays = self._new_arrays + 1 if new else 0
        if self._new_arrays > _EAGER_STEPS:
            where = reach(roots, explains=True).arrays[new[0]][0]
            text = f"{where} is a new array of numpy in each call; hand over torch.as_tensor of it"
            self._tell(text, "arrays")
        return bool(new)

    def _with_tensors(self, program: Any) -> Any:
        """The program with tensors in place of float arguments that change from step to step."""
        leaves, tree = tree_flatten((program.args, program.kwargs))
        floats = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, float)}
        if not floats:
            return program
        self._varying |= {i for i, value in floats.items() if self._floats.get(i, value) != value}
        self._floats = floats
        for i in self._varying & floats.keys():
            leaves[i] = torch.tensor(floats[i], dtype=torch.get_default_dtype())
        args, kwargs = tree_unflatten(leaves, tree)
        return program._replace(args=args, kwargs=kwargs)

    def _recorded(
        self, subject: Subject, program: Any, roots: Any, call: Call, number: int, updates: Updates | None
    ) -> Entry | None:
        """A new recording, if it is time for one."""
        kind = hash((tuple(call.spec), *map(kind_of, call.tensors), id(updates)))
        if len(self._seen) >= _MOST_KINDS:
            self._seen.clear()
        self._seen[kind] = self._seen.get(kind, 0) + 1
        if self._seen[kind] == 1 and 1 < len(self._seen) <= _MOST_LOOKS:
            # A number among the arguments may switch a part of a program on.
            subject.look_again()
        if self._seen[kind] <= (1 if self.entries else _EAGER_STEPS):
            return None
        if self._made >= self.options.max_recordings:
            self._tell(*self._too_many(roots))
            return None
        start = time.perf_counter()
        try:
            recording = record(subject, program, reach(roots, explains=True), number, updates)
        except NotYet:
            self._seen[kind] = 0
            return None
        except Unrecordable as error:
            self._made += 1
            self._seen[kind] = -(1 << min(2 * self._made, 20))
            self._tell(str(error))
            return None
        self._made += 1
        self.entries = [entry for entry in self.entries if entry.holds]
        entry = Entry(recording, recording.graph, updates)
        entry.seconds[0] = time.perf_counter() - start
        self._compile(entry)
        self.entries.append(entry)
        return entry

    def _too_many(self, roots: Any) -> tuple[str, str]:
        """Why no more is recorded, and what to write; and the kind of that reason."""
        changed = ""
        if self.entries:
            changed = self.entries[-1].recording.inputs.call.difference(reach(roots))
        why = f", the last time because {changed}" if changed else ""
        text = f"it was recorded {self._made} times{why}; further kinds of calls run eagerly"
        return f"{text}. Batches of one size need one recording; or write Compile(max_recordings=...)", "many kinds"

    def _compile(self, entry: Entry) -> None:
        examples = [entry.recording.inputs.tensors[i] for i in entry.recording.used]
        examples += entry.recording.constants
        backend, recording = self.options.backend, entry.recording
        lack = missing(backend, examples[0].device if examples else torch.device("cpu"))
        if lack:
            entry.note = f"{lack}, so the recorded operators run as they are"
            warnings.warn(f"compile: {entry.note}.", BPQWarning, stacklevel=2)
            return
        if backend == "eager":
            return
        LOG.info("Compiling a step of %d operators.", recording.num_operators)
        copies = [_copy(tensor) for tensor in examples]

        def work() -> None:
            start = time.perf_counter()
            # Its first run draws. A thread cannot take that back: the main one draws meanwhile.
            draws = None if self.options.background else Draws()
            try:
                with torch.no_grad(), self._line(recording.num_operators):
                    compiled = compile_graph(recording.graph, backend, copies)
                    compiled(*copies)
            except Exception as error:  # A compiler may raise anything.
                text = str(error).strip().splitlines()
                entry.note = f"the compiler failed ({text[0] if text else type(error).__name__})"
                warnings.warn(
                    f"compile: {entry.note}; the recorded operators run as they are.", BPQWarning, stacklevel=2
                )
            else:
                entry.run = compiled
            finally:
                if draws is not None:
                    draws.again()
            entry.seconds[1] = time.perf_counter() - start

        if self.options.background:
            entry.thread = threading.Thread(target=work, daemon=True)
            entry.thread.start()
        else:
            work()

    def _line(self, operators: int) -> tqdm[Any]:
        """A line on the terminal that says what the step waits for; it goes when the wait is over."""
        text = f"Compiling a step of {operators} operators, once for all calls like this one"
        # tqdm writes to terminals only.
        hidden = True if self.options.background else None
        return tqdm(total=1, desc=text, bar_format="{desc} ...", leave=False, disable=hidden)

    def _is_still(self, subject: Subject, program: Any, entry: Entry, tensors: Sequence[Tensor], number: int) -> bool:
        """Whether the programs still do what was recorded; if not, the recording is dropped."""
        recording, text = entry.recording, ""
        inputs = recording.inputs
        own = inputs.tensors[len(tensors) :]
        try:
            now = fingerprint(subject, program, replace(inputs, tensors=(*tensors, *own)), number)
            if not now.is_like(recording.print):
                text = "the programs do other things now"
        except Unrecordable as error:
            text = str(error)
        if not text:
            return True
        self.entries.remove(entry)
        warnings.warn(
            f"A compiled step no longer does what its programs do: {text}. Up to "
            f"{entry.steps - _before(entry.steps)} of the last steps ran the old recording. Hand over what changes "
            "between steps as a tensor or a float among the arguments of step().",
            BPQWarning,
            stacklevel=2,
        )
        return False

    def _run(self, subject: Subject, entry: Entry, tensors: list[Tensor], number: int) -> Outcome | None:
        if not entry.is_ready:
            return None
        recording = entry.recording
        inputs = recording.inputs
        if inputs.num_generators:
            generators = subject.generators(inputs.num_generators)
            tensors += [noise.draw(generators[noise.source]) for noise in inputs.noise]
        tensors += [scheduled(schedule, number) for schedule in inputs.schedules]
        if inputs.updates:
            tensors.append(entry.as_tensor(numbers_of(inputs.updates)))
        if am_i_wrapped():
            # SVI learns from these messages which parameters there are.
            store = pyro.get_param_store()
            for name, value in inputs.messages:
                _announce(store[name] if name in inputs.params else value, name=name)
        with torch.no_grad():
            results = entry.run(*[tensors[i] for i in recording.used], *recording.constants)
        entry.steps += 1
        for update in inputs.updates:
            update.count()
        ahead = 1 + len(recording.graded)
        leaves = [tensors[i] for i in recording.graded]
        rest = results[ahead:]
        return Outcome(results[0], leaves, results[1:ahead], LastInfo(functools.partial(recording.info, rest)))

    def _tell(self, reason: str, kind: str = "") -> None:
        """Warns of a reason for eager steps, once; of a kind of reasons, once."""
        if (kind or reason) not in self._told:
            self._told.add(kind or reason)
            self.reasons.append(reason)
            warnings.warn(f"compile: steps run eagerly, because {reason}.", BPQWarning, stacklevel=2)


@effectful(type="param")
def _announce(value: Tensor) -> Tensor:
    return value


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides, which compiled code counts on."""
    own = tensor.detach()
    if own.is_contiguous():
        return own.clone()
    if 0 in own.stride():
        # An expanded tensor; nothing writes into it.
        return own
    return torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device).copy_(own)


def _is_due(steps: int) -> bool:
    return steps > 0 and (steps & (steps - 1) == 0 if steps < _LONGEST else steps % _LONGEST == 0)


def _before(steps: int) -> int:
    """Number of steps at the last comparison; 0 if there was none."""
    if steps <= 1:
        return 0
    return 1 << (steps - 1).bit_length() - 1 if steps <= _LONGEST else steps - _LONGEST
