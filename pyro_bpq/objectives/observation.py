r"""How a step runs the programs, what for, and what it gets back: ``Runner``, ``Mode``, ``Observation``."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_bpq.errors import BPQError
from pyro_bpq.plan.plan import Plan
from pyro_bpq.record.further import Draws, further_particles, gradients_agree
from pyro_bpq.record.key import Call, reach
from pyro_bpq.record.program_errors import check_declared
from pyro_bpq.record.recordings import Alike, Recordings
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.record.values import RecordingError
from pyro_bpq.record.watch import PARTICLES, samples, traced_leaves
from pyro_bpq.reruns.values import Values, are_alike
from pyro_bpq.rollout.runs import NoiseSource, Particles, Program
from pyro_bpq.step.program_order import RunInOrder
from pyro_bpq.step.signals import Signals
from pyro_bpq.step.surrogate import Step

MOST_OPERATORS = 4000  # of runs alone with which particles among others are compared


@dataclass(frozen=True)
class Mode:
    """What a step is for."""

    learning: bool = False  # whether anything learns from it
    settles: bool = False  # whether it may settle how particles run: in training mode, also for a loss alone
    num_steps: int = 0  # number of steps taken
    # Whether all gradients come by way of ``log q`` of every value, as what is kept for later needs it.
    by_value: bool = False
    is_reused: bool = False  # whether the guide moves further on the same runs
    has_ranks: bool = False  # whether other processes learn along
    # Whether operators of the step are recorded: findings of earlier steps are then taken as they are.
    is_recorded: bool = False
    # Whether the step needs nothing but costs in program order, where that is all that is known.
    may_order: bool = False
    shows: bool = False  # whether somebody wants to see the signals of sites, so that a graph is needed in any case

    def counts(self, run: TracedRun) -> bool:
        """Whether it is a step since the last recorded run."""
        return self.learning and not self.is_recorded and run.recorded is None


@dataclass(frozen=True, eq=False)
class Staged:
    """Runs of like structure, and the signals of their sites."""

    traced: tuple[TracedRun, ...]  # the runs
    programs: tuple[Any, ...]  # model, guide, arguments and keyword arguments of each run
    particles: Particles  # how the particles of the step ran
    signals: Signals  # their tensors
    result: Step | None = None  # what the step yielded, with all its particles; ``None`` before


class Transient:
    """Holds what belongs to the process: copies and pickles are empty."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.items: tuple[Any, ...] = tuple(items)

    def __reduce__(self) -> tuple[Any, ...]:
        return Transient, ()


@dataclass(frozen=True, eq=False)
class Observation:
    """The runs of a step, and the signals of their sites."""

    runs: tuple[TracedRun, ...]  # one for each particle, or a single one of all; none in program order
    items: tuple[Staged, ...] = ()  # one for all particles; or one for each, where sampled values steer the program
    ordered: tuple[RunInOrder, ...] = ()  # in place of items, what each run tells in program order
    is_lone: bool = False  # whether a single run in program order has baselines of recent costs
    stages: tuple[Callable[[], Staged], ...] = ()  # they make the items
    plan: Plan | None = None  # what was planned for all such runs; ``None`` where each run may have a plan of its own
    summed: Tensor | None = None  # in place of items, the loss summed over all values, with gradient

    @property
    def traces(self) -> tuple[Any, Any]:
        """Pyro's traces of model and guide in the first run."""
        return (self.ordered or self.runs)[0].traces

    @property
    def loss(self) -> Tensor:
        """The loss, summed over draws, a scalar in nats; its gradient has no meaning."""
        if self.summed is not None:
            return self.summed.detach()
        losses = [run.loss for run in self.ordered] or [traced.run.loss for traced in self.runs]
        return sum(losses[1:], losses[0])

    def staged(self) -> Observation:
        """The same with the signals of the sites; none in inference mode, where nothing can be differentiated."""
        if torch.is_inference_mode_enabled():
            return self
        with shapes_told(self):
            return replace(self, items=tuple(stage() for stage in self.stages))


@contextlib.contextmanager
def shapes_told(seen: Observation) -> Iterator[None]:
    """Errors about shapes that do not fit name the site that they come from."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, BPQError):
            check_declared(site for trace in reversed(seen.traces) for site in samples(trace).values())
        raise


class Runner(ABC):
    """Runs the programs of a step.

    Attributes:
        recordings: What is known of the structures of the programs, and when runs are recorded.
        noise: Source of what estimators draw themselves.
        is_settled: Whether the next run does what the last one did, as far as is known.
        looks_for_jumps: Whether runs in which pathwise gradients miss jumps are taken once more, with scores.
        enumerates: Whether marked sites are summed out, in dimensions of their own.
    """

    is_settled, looks_for_jumps, enumerates = True, False, False

    def __init__(self, structure: str, seed: int) -> None:
        self.recordings, self.noise = Recordings(structure), NoiseSource(seed)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The objects in which a step notes what it finds out."""
        return self, self.recordings, self.noise

    def meet(self, program: Program, mode: Mode, known: Alike | None = None) -> None:
        """Looks at a call before its programs run; a step that is compiled was looked at before.

        What is ``known`` of it is, if it runs once more, what the step has shown.
        """
        if not mode.is_recorded:
            states = [(each.owner, state) for each, state in self.recordings.externals.values()]
            self.recordings.meet(reach(program._asdict(), self.recordings.logs, states))
            self.recordings.now = known or self.recordings.now

    def refuses_recording(self) -> str:
        """Why the programs are not compiled, as the end of a sentence; empty if they are."""
        recordings = self.recordings
        if not recordings.always:
            return ""
        if recordings.mode == "dynamic":
            return 'structure="dynamic" records every step'
        return f"sampled values of {', '.join(recordings.escaping) or 'a site'} steer Python, or leave torch"

    def is_alike(self, run: TracedRun, particles: Particles, one: tuple[TracedRun, Call] | None) -> bool:
        """Whether particles among others cost what they cost alone; ``one`` is a run of one particle, and its call."""
        recordings = self.recordings
        recorded = recordings.recorded(run, particles.in_call)
        if recorded is not None and particles.is_hidden:
            return gradients_agree(run, run.bound(recorded, recordings.call))
        if recorded is None or one is None or one[0].recorded is None:
            return True
        values = Values((recorded,), one[0].recorded, (run,), one[1], int(particles.nesting))
        # Few values may be such that another meaning of the program costs the same. In long programs there are many.
        most = max(2, min(32, MOST_OPERATORS // len(one[0].recorded.recording.nodes)))
        return are_alike(values, checked_rows(particles.number, most))

    def _recorded_runs(
        self, program: Program, particles: Particles, mode: Mode, is_ordered: bool = False
    ) -> tuple[list[Program], list[TracedRun]]:
        """The programs of a step and their runs; recorded if that is due, or if their structure is not known."""
        recordings, programs = self.recordings, programs_of(program, particles)
        draws, record = recordings.mark(), recordings.wants(particles) or (recordings.always and not is_ordered)
        take = functools.partial(self._runs, programs, particles, mode, draws)
        try:
            runs = take(record and not mode.is_recorded)
        except RecordingError as error:
            recordings.give_up(error)
            draws.again()
            return programs, take(False)
        if self.looks_for_jumps and any(recordings.finds_jumps(run) for run in runs if run.recorded):
            draws.again(runs)
            runs = take(True)
        return programs, runs

    def _runs(
        self, programs: Sequence[Program], particles: Particles, mode: Mode, draws: Draws, record: bool
    ) -> list[TracedRun]:
        """The runs of a step from a mark on; they are taken once more, and recorded, if they have something new."""
        recordings, number = self.recordings, len(programs) if not particles.is_hidden else 1
        options = {"track": record, "step": mode.num_steps, "warns": mode.learning, "answers": draws.answers}
        runs = [self.trace(each, particles, has_told=i > 0, **options) for i, each in enumerate(programs[:number])]
        bound = None
        if particles.is_hidden:
            recordings.recognises(runs[0], 1)
            recorded = recordings.recorded(runs[0], 1)
            bound = None if recorded is None else runs[0].bound(recorded, recordings.call)
        new = "" if record or mode.is_recorded else recordings.news(runs, particles, bound)
        if new:
            recordings.is_new(new)
            draws.again()
            return self._runs(programs, particles, mode, draws, True)
        return [*runs, *further_particles(runs[0], bound, particles.number - 1)] if particles.is_hidden else runs

    @abstractmethod
    def trace(self, program: Program, particles: Particles, **options: Any) -> TracedRun:
        """Runs a program once, with further options of its trace."""

    @abstractmethod
    def observe(self, program: Program, particles: Particles, mode: Mode) -> Observation:
        """Runs model and guide, given as for one particle, for all particles of a step."""


def checked_rows(number: int, most: int = 8) -> set[int]:
    """Some of so many rows, at most ``most``, whose costs are compared with those of a run of their own."""
    return {*torch.linspace(0, number - 1, min(number, most)).int().tolist()}


def programs_of(program: Program, particles: Particles) -> list[Program]:
    """The programs of each run of a step: one for each particle, or one in a plate of all particles."""
    if not particles.has_plate:
        return [program] * particles.number
    number, dim = particles.number, -int(particles.nesting)
    model, guide = (pyro.plate(PARTICLES, number, dim=dim)(part) for part in program[:2])
    return [program._replace(model=model, guide=guide)]


def guide_leaves(traced: TracedRun, guide: Any) -> dict[str, Tensor]:
    """The leaf parameters that a run of the guide reached, by name."""
    leaves = traced_leaves(traced.guide_trace)
    # One program may wrap a policy and an environment.
    for part in (guide, *(guide.args if isinstance(guide, functools.partial) else ())):
        module = poutine.unwrap(part) if callable(part) else part
        if isinstance(module, nn.Module):
            seen = {id(leaf) for leaf in leaves.values()}
            leaves.update({name: p for name, p in module.named_parameters() if id(p) not in seen})
    return leaves


@contextlib.contextmanager
def swapped(leaves: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Gives parameters other values within the context."""
    own = {name: leaf.data for name, leaf in leaves.items() if name in values}
    try:
        for name in own:
            leaves[name].data = values[name]
        yield
    finally:
        for name, value in own.items():
            leaves[name].data = value
