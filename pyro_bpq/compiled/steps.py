r"""Decides, call by call, whether a step runs a recording or the programs themselves.

A kind of call runs eagerly until the structure, the number of particles and the critics of its step are settled. Then
it is recorded. A recording serves calls that look alike. After 1, 2, 4, 8, ... steps (later if it is long), and at
least every 1,000, the programs run once more without a trace, and what they do is compared with the recording.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pyro_bpq.compiled.backends import make
from pyro_bpq.compiled.options import Compile
from pyro_bpq.compiled.recorder import Outcome, Recording, record
from pyro_bpq.compiled.subject import Subject, Updates
from pyro_bpq.compiled.watch import NotYet, first_line
from pyro_bpq.errors import Unrecordable, warn
from pyro_bpq.record.key import Call, in_words, reach
from pyro_bpq.rollout.runs import Program

# Number of eager steps of a kind before it is recorded.
_EAGER_STEPS = 3
# Number of operators that put the first comparison off by a step.
_OPERATORS_PER_STEP = 400
# Number of kinds of calls that are counted.
_MOST_KINDS = 256
# Number of calls in a row with new arrays from which on they are told of.
_MANY_ARRAYS = 4
# Number of kinds of calls whose first step looks at the structure again. Where there are more, numbers change often.
_MOST_LOOKS = 32


class CompiledSteps:
    """The recordings of an objective.

    Attributes:
        entries: The recordings, the oldest first.
        reasons: Why kinds of calls run eagerly, by the kind of the reason.
        outside: Why the optimiser's update is no part of the recordings; empty if it is, or if there is none.
    """

    def __init__(self, options: Compile) -> None:
        self.options = options
        self.outside = ""
        self.entries: list[Recording] = []
        self.reasons: dict[str, str] = {}
        # Number of eager steps of each kind of call, and number of attempts to record.
        self._seen: dict[int, int] = {}
        self._made = 0
        self._arguments = Arguments()
        self._last: Call | None = None  # the last call that no recording served

    def __str__(self) -> str:
        lines = [str(entry) for entry in self.entries]
        lines += [f"Some steps run eagerly, because {reason}." for reason in self.reasons.values()]
        if self.outside:
            lines.append(f"The optimiser runs after each step, not within it, because {self.outside}.")
        if not lines:
            return (
                "Nothing is recorded yet: the first steps run eagerly, until structure, particles and critics are "
                "settled. Several calls must then look alike. Calls do not if a whole number, a string or an array of "
                "numpy among their arguments changes from step to step: hand over a tensor or a float."
            )
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledSteps, (self.options,)

    def take(self, objective: Any, program: Any, number: int, updates: Updates | None = None) -> Outcome | None:
        """Takes a compiled step of an objective; ``None`` if the step has to run eagerly."""
        subject = Subject(objective)
        if updates is not None:
            self.outside = updates.refuses()
            if self.outside:
                return None
        if refusal := subject.refuses():
            self._tell(refusal)
        if refusal or not subject.is_settled():
            return None
        if any(issubclass(type(leaf), Tensor) and leaf.grad_fn for leaf in tree_leaves((program.args, program.kwargs))):
            self._tell("an argument carries a gradient: compute it within the programs, or detach it")
            return None
        program = self._arguments.with_tensors(program)
        model, guide, args, kwargs = program
        roots = {"model": model, "guide": guide, "args": args, "kwargs": kwargs, "the objective": subject.options()}
        call = reach(roots, objective.runner.recordings.logs)
        if new_arrays := self._arguments.new_arrays(call) if call.arrays else []:
            if self._arguments.num_new_arrays >= _MANY_ARRAYS:
                path = in_words(call.arrays[new_arrays[0]][0])
                self._tell(f"{path} is a new array of numpy in each call; hand over torch.as_tensor of it", "arrays")
            return None
        read: list[Any] = []  # the numbers that Python reads in this call, but not in those that were recorded
        for entry in self.entries:
            tensors = entry.tensors(call) if entry.updater is updates else None
            if tensors is None:
                continue
            numbers = entry.check.numbers(call)
            if numbers != entry.numbers:
                read.append(numbers)
                continue
            if entry.is_due and not self._is_still(subject, program, entry, call, number):
                return None
            return entry.take(subject, tensors, number)
        made = self._recorded(subject, program, call, number, updates, read)
        self._last = None if self.entries else call
        tensors = None if made is None else made.tensors(call)
        return made.take(subject, tensors, number) if made is not None and tensors is not None else None

    def _why(self, call: Call) -> str:
        """Where a call differs from that of the last recording, in words; empty where there is none."""
        last = self.entries[-1] if self.entries else self._last
        changed = last.difference(call) if last else ""
        return f", the last time because {changed}" if changed else ""

    def _may_have_tensors(self, subject: Subject, program: Program) -> bool:
        """Whether a program does the same with tensors in place of the floats that it was given."""
        given = self._arguments.given
        if given is not None and not subject.agree(given, program):
            self._tell("it does something else if a float among its arguments is a tensor: hand over a tensor")
            self._arguments.keeps_floats = True
            self.entries.clear()
        return given is None or not self._arguments.keeps_floats

    def _recorded(
        self, subject: Subject, program: Any, call: Call, number: int, updates: Updates | None, read: Sequence[Any]
    ) -> Recording | None:
        """A new recording, if it is time for one. Python may ``read`` other numbers than in earlier ones."""
        kind = hash((tuple(call.spec), id(updates), *read))
        if len(self._seen) >= _MOST_KINDS:
            self._seen.clear()
        self._seen[kind] = self._seen.get(kind, 0) + 1
        if self._seen[kind] == 1 and 1 < len(self._seen) <= _MOST_LOOKS:
            # A number among the arguments may switch a part of a program on.
            subject.look_again()
        if self._seen[kind] == 1 and len(self._seen) == _MOST_LOOKS:
            why = f"calls differed {_MOST_LOOKS} times{self._why(call)}"
            self._tell(f"{why}; hand over numbers as float or tensor arguments, data in few shapes", "many kinds")
        if self._seen[kind] <= (1 if self.entries else _EAGER_STEPS):
            return None
        if self._made >= self.options.max_recordings:
            why = f"it was recorded {self._made} times{self._why(call)}; further kinds of calls run eagerly"
            self._tell(f"{why}. Batches of one size need one recording, or Compile(max_recordings=...)", "many kinds")
            return None
        start = time.perf_counter()
        try:
            if not (self._may_have_tensors(subject, program) and subject.meet(program)):
                return None
            recording = record(subject, program, call, number, updates)
        except NotYet:
            self._seen[kind] = 0
            return None
        except Unrecordable as error:
            self._made += 1
            self._seen[kind] = -(1 << min(2 * self._made, 20))
            # Pyro adds the shapes of the sites to the errors of a program.
            self._tell(first_line(error))
            return None
        self._made += 1
        self.entries = [entry for entry in self.entries if entry.holds]
        # A comparison of a long step takes as long as many such steps.
        recording.first = 1 + recording.num_operators // _OPERATORS_PER_STEP
        recording.seconds[0] = time.perf_counter() - start
        make(recording, self.options)
        self.entries.append(recording)
        return recording

    def _is_still(self, subject: Subject, program: Any, entry: Recording, call: Call, number: int) -> bool:
        """Whether the programs still do what was recorded; if not, the recording is dropped."""
        if not self._may_have_tensors(subject, program):
            return False
        text = ""
        try:
            subject.meet(program)
            # The first run may make functions of a new recording of the programs.
            runs = (Recording(subject, program, call, number, entry.updater) for _ in range(2))
            if not any(now.is_like(entry) for now in runs):
                text = "the programs do other things now"
        except Unrecordable as error:
            text = str(error)
        if not text:
            entry.checked = entry.steps
            return True
        self.entries.remove(entry)
        warn(
            f"A compiled step no longer does what its programs do: {text}. Up to {entry.steps - entry.checked} of the "
            "last steps ran the old recording. Hand over what changes between steps as a tensor or a float among the "
            "arguments of step()."
        )
        return False

    def _tell(self, reason: str, kind: str = "") -> None:
        """Warns of a reason for eager steps, once; of a kind of reasons, once."""
        if (kind or reason) not in self.reasons:
            self.reasons[kind or reason] = reason
            warn(f"compile: steps run eagerly, because {reason}.")


class Arguments:
    """The arguments of the last call, as far as a recording cannot take them as they are."""

    def __init__(self) -> None:
        # The arrays of numpy of the last call, and the number of calls in a row that had new ones.
        self._arrays: list[weakref.ref[Any]] = []
        self.num_new_arrays = 0
        # The float arguments of the last call, by position, and those that have changed.
        self._floats: dict[int, float] = {}
        self._varying: set[int] = set()
        self.keeps_floats = False  # whether they stay floats
        self.given: Program | None = None  # the last call, if it has tensors in their place now

    def new_arrays(self, call: Call) -> list[int]:
        """The arrays of numpy that were not there in the last call: a recording holds for the very same ones."""
        last, self._arrays = self._arrays, [weakref.ref(array) for _, array in call.arrays]
        known = {id(array) for array in (reference() for reference in last) if array is not None}
        new = [i for i, (_, array) in enumerate(call.arrays) if id(array) not in known]
        self.num_new_arrays = self.num_new_arrays + 1 if new else 0
        return new

    def with_tensors(self, program: Any) -> Any:
        """The program with tensors in place of float arguments that change from step to step."""
        leaves, tree = tree_flatten((program.args, program.kwargs))
        floats = {i: leaf for i, leaf in enumerate(leaves) if issubclass(type(leaf), (float, numpy.floating))}
        self.given = None
        if self.keeps_floats or not floats:
            return program
        self._varying |= {i for i, value in floats.items() if self._floats.get(i, value) != value}
        self._floats = floats
        for i in self._varying & floats.keys():
            self.given, leaves[i] = program, torch.tensor(floats[i], dtype=torch.get_default_dtype())
        args, kwargs = tree_unflatten(leaves, tree)
        return program._replace(args=args, kwargs=kwargs)
