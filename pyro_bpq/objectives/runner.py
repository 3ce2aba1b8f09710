r"""Runs the programs of a step, plans what is done on their structure, and collects the signals of their sites."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_bpq.critics.bank import CriticBank
from pyro_bpq.errors import UnsupportedProgramError, warn
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.objectives.observation import Mode, Observation, Runner, Staged, checked_rows, programs_of
from pyro_bpq.plan.planner import PlanCache, Planner
from pyro_bpq.plan.rules import plain_score
from pyro_bpq.plan.structure import StructureFacts, SumPlan, check_gradients
from pyro_bpq.record.jumps import is_undecided
from pyro_bpq.record.program_errors import left_torch
from pyro_bpq.record.recorded import Recorded
from pyro_bpq.record.traced_run import PlainRun, TracedRun, merged_graph
from pyro_bpq.record.tracer import run_in_order, run_unscored, trace_run
from pyro_bpq.record.watch import TraceOptions, gradients_of, inputs_of
from pyro_bpq.reruns.at_values import Reruns, charged, has_slope
from pyro_bpq.reruns.enumeration import eliminate, enumerated_programs
from pyro_bpq.reruns.tables import AllValues, exact_sum
from pyro_bpq.reruns.values import Values, are_alike, flipped_costs
from pyro_bpq.rollout.runs import Particles, Program, Rollout
from pyro_bpq.rollout.sums import in_single
from pyro_bpq.step.program_order import in_order
from pyro_bpq.step.signals import Signals

_NOTHING_ENUMERATED = (
    'enumeration="exact" found no site to sum out. Mark sites with infer={"enumerate": "parallel"} or '
    'pyro.infer.config_enumerate, or write enumeration="sample".'
)


class StepRunner(Runner):
    """Runs guide and model as often as a step needs it.

    Attributes:
        plans: The plans of the structures met so far.
        recordings: What is known of these structures, and when runs are recorded.
        noise: Source of what estimators draw themselves.
        num_zeros: Largest number of probabilities of zero in a summed step whose gradient was looked at.
    """

    def __init__(
        self, planner: Planner, structure: str, critics: CriticBank, only_costs: bool, enumerates: bool, warns: bool
    ) -> None:
        super().__init__(structure, critics.seed)
        self.plans, self.critics, self.num_zeros = PlanCache(planner), critics, 0
        self.only_costs, self.enumerates, self.warns = only_costs, enumerates, warns

    @property
    def parts(self) -> tuple[Any, ...]:
        """The objects in which a step notes what it finds out."""
        return *super().parts, self.plans

    @property
    def is_settled(self) -> bool:  # type: ignore[override]
        """Whether the next run does what the last one did, as far as is known."""
        return self.plans.last is not None and not self.recordings.always

    @property
    def looks_for_jumps(self) -> bool:  # type: ignore[override]
        """Whether runs in which pathwise gradients miss jumps are taken once more, with scores."""
        chosen = self.plans.planner.estimator
        return torch.is_grad_enabled() and not (chosen and chosen.is_pathwise)

    def trace(self, program: Program, particles: Particles, **options: Any) -> TracedRun:
        """Runs a program once, with further options of its trace."""
        model, guide, args, kwargs = program
        given = self._options(particles, call=self.recordings.call, only_costs=self.only_costs, **options)
        with self.recordings.logs.watched(given.track and not self.recordings.always):
            if not self.enumerates or math.isinf(particles.nesting):  # the run that looked for the nesting has failed
                traced = trace_run(*program, given)
                check_gradients(traced)
                return traced
            nesting = int(particles.nesting)
            programs = enumerated_programs(model, guide, nesting)
            traced = trace_run(*programs, args, kwargs, given, functools.partial(eliminate, nesting=nesting))
        if self.warns and options["step"] == 0 and is_validation_enabled() and not traced.enumerated:
            warn(_NOTHING_ENUMERATED)
        return traced

    def _options(self, particles: Particles, **more: Any) -> TraceOptions:
        planner, nesting, number = self.plans.planner, particles.nesting, particles.number
        return TraceOptions(
            planner.choose, nesting, number, planner.estimator, noise=self.noise, jumps=self.recordings.jumps, **more
        )

    def observe(self, program: Program, particles: Particles, mode: Mode) -> Observation:
        """Runs model and guide, given as for one particle, for all particles of a step."""
        recordings, planner = self.recordings, self.plans.planner
        if particles.sums:
            return self._summed(program, particles, mode)
        if recordings.now.unscored and (found := self._unscored_step(program, particles, mode)) is not None:
            return found
        is_ordered = recordings.is_ordered and mode.may_order and not (mode.shows or particles.has_plate)
        if is_ordered and self.plans.last is None and (recordings.mode == "auto" or planner.serves_order):
            # There has to be a plan to show. With two particles leave-one-out has a plan.
            few, mark = replace(particles, number=min(particles.number, 2)), recordings.mark()
            self.observe(program, few, replace(mode, learning=False, may_order=False))
            mark.again()
            self.plans.last = self.plans.last and replace(self.plans.last, num_particles=particles.number)
        if is_ordered and recordings.mode == "auto":
            return self._ordered_step(program, particles, mode)
        programs, runs = self._recorded_runs(program, particles, mode, is_ordered)
        if is_ordered:
            chosen = [own for own in map(planner.order_estimators, runs) if own is not None]
            if len(chosen) == len(runs):  # else an estimator needs more
                return Observation((), (), tuple(map(in_order, runs, chosen)))
        return self._planned(programs, runs, particles, mode, program)

    def stage(self, runs: Sequence[TracedRun], programs: Sequence[Program], particles: Particles, mode: Mode) -> Any:
        """The signals of the sites of further runs of a known structure; nothing learns, and nothing runs again."""
        last = self.plans.last
        try:
            return self._planned(programs, runs, particles, mode).staged().items
        finally:
            # What is planned here is no step's.
            self.plans.last = last

    def _planned(
        self,
        programs: Sequence[Program],
        runs: Sequence[TracedRun],
        particles: Particles,
        mode: Mode,
        one: Program | None = None,
    ) -> Observation:
        """Plans what is done on some runs; without the program for one particle nothing runs again."""
        recordings, planner = self.recordings, self.plans.planner
        recordings.now.steps += mode.counts(runs[0])
        # Further particles in a hidden dimension have the recording of the first one.
        shown = runs[:1] if particles.is_hidden else runs
        graphs = [recordings.graph(traced, particles.in_call, mode.learning) for traced in shown]
        graphs *= len(runs) // len(shown)
        is_dynamic = any(recordings.is_dynamic(traced) for traced in runs)
        sites = frozenset(recordings.escaping).union(*(traced.escaped_sites for traced in runs))
        if sites and particles.has_plate and any(run.scored for run in runs):
            raise UnsupportedProgramError(left_torch(sites, particles.number))
        may_settle = mode.learning and mode.may_order and planner.orders
        if may_settle and not any(is_undecided(run, recordings.now.looks) for run in runs):
            recordings.settle_order(all(planner.fits_order(traced) for traced in runs))
        groups = stacked(runs, is_dynamic)
        if len(groups) == 1 and any(graph != graphs[0] for graph in graphs[1:]):
            graphs = [merged_graph(runs[0], graphs)]
        # A site's tensors have as many plate dimensions as any run, whichever later plates its value opens.
        ndim = max(run.plate_ndim for run in runs)
        rest = ndim, is_dynamic, particles, mode, one
        stages = (self._stage([runs[i] for i in g], [programs[i] for i in g], graphs[g[0]], *rest) for g in groups)
        found = Observation(tuple(runs), stages=tuple(stages))
        if not (is_dynamic or recordings.always):
            found = replace(found, plan=self.plans.last)
        if mode.learning and not is_dynamic and not runs[0].scored:
            # Nothing is charged with costs.
            recordings.now.next = math.inf
            if may_settle and not particles.is_hidden and all(run.is_plain for run in runs):
                recordings.now.unscored[particles, _sites_of(found.traces)] = self.plans.last
        return found

    def _unscored_step(self, program: Program, particles: Particles, mode: Mode) -> Observation | None:
        """A step without scores, as ``Trace_ELBO`` takes it; ``None``, and nothing drawn, if there are some."""
        now = self.recordings.now
        if not mode.may_order or mode.shows or mode.is_recorded or now.always:
            return None
        draws, runs = self.recordings.mark(), list[PlainRun | None]()
        with contextlib.suppress(Exception):  # the usual run says where
            runs = [run_unscored(*each, particles.nesting) for each in programs_of(program, particles)]
        plans = [now.unscored.get((particles, _sites_of(run.traces))) if run else None for run in runs]
        if not plans or plans[0] is None or any(plan is not plans[0] for plan in plans):
            draws.again()
            return None
        self.plans.last = plans[0]
        return Observation((), (), tuple(in_order(run, {}) for run in runs if run))

    def _ordered_step(self, program: Program, particles: Particles, mode: Mode) -> Observation:
        """A step in program order, by the rules' own estimator."""
        planner, options = self.plans.planner, self._options(particles, step=mode.num_steps)
        runs = [run_in_order(*program, options) for _ in range(particles.number)]
        if mode.learning:
            # If program order does not fit a run, only later steps change: what a step does must not depend on the
            # values that it has drawn.
            self.recordings.settle_order(all(isinstance(run, PlainRun) or planner.fits_order(run) for run in runs))
        ordered = tuple(in_order(run, dict.fromkeys(run.scored, plain_score(len(runs)))) for run in runs)
        return Observation((), (), ordered, is_lone=len(runs) == 1)

    def _stage(
        self,
        runs: Sequence[TracedRun],
        programs: Sequence[Program],
        graph: StochasticComputationGraph,
        ndim: int,
        is_dynamic: bool,
        particles: Particles,
        mode: Mode,
        one: Program | None,
    ) -> Callable[[], Staged]:
        """Plans some of the runs of a step, which have one graph; returns what gives the signals of their sites."""
        traced, first = tuple(runs), runs[0]
        # Particles lie to the left of as many dimensions as plates may have, whether there are plates or not.
        has_plate = particles.has_plate
        ndim = int(particles.nesting) - 1 if has_plate else ndim
        number = particles.number if has_plate else len(traced)
        rollout = Rollout(tuple(t.run for t in traced), number, first.plate_sizes, ndim, has_plate)
        found = (self.recordings.recorded(run, particles.in_call) for run in traced)
        recorded = tuple(each for each in found if each is not None)
        nesting = int(particles.nesting) if has_plate else 0
        values = Values(recorded, None, traced, self.recordings.call, nesting, mode.is_recorded)
        facts = self.facts(traced, is_dynamic, particles, mode, has_slope=lambda name: has_slope(values, graph, name))
        plan = self.plans.of(first, graph, facts)
        if one is not None and has_plate and plan.held.picks_one:
            values = replace(values, alone=self.alone(one, particles, first))

        def staged() -> Staged:
            tables = flipped_costs(plan, values, rollout) if plan.flips.sites else {}
            rerun, charges = None, rollout
            if one is not None and plan.needs_program and not is_dynamic:
                rerun = Reruns(values, plan, self.noise())
            if plan.patterns:
                runs = tuple(charged(t.run, plan.patterns, t.guide_trace, t.model_trace) for t in traced)
                charges = replace(rollout, runs=runs)
            signals = Signals(plan.layout, charges, tables, self.critics, mode.learning, rerun, mode.by_value)
            return Staged(traced, tuple(programs), particles, signals)

        return staged

    def alone(self, program: Program, particles: Particles, traced: TracedRun) -> Recorded:
        """The recording of one particle, where all of them run in one call."""
        recordings = self.recordings
        key = recordings.key_of(traced, 1)
        if key not in recordings.now.recorded:
            one, draws = Particles(nesting=particles.nesting - 1), recordings.mark()
            run = self.trace(program, one, step=1, track=True, warns=False)
            draws.again([run])
            assert run.recorded is not None
            recordings.now.recorded[key] = run.recorded
        return recordings.now.recorded[key]

    def facts(
        self, runs: Sequence[TracedRun], is_dynamic: bool, particles: Particles, mode: Mode, **more: Any
    ) -> StructureFacts:
        """What is known of the structure of runs besides their graph."""
        recordings, first = self.recordings, runs[0]
        recorded = recordings.recorded(first, particles.in_call)
        known = None if is_dynamic else recordings.known.get(first.key)
        reader = known or recorded
        may_order = mode.may_order and self.plans.planner.orders and recordings.mode == "auto"
        return StructureFacts(
            is_dynamic=is_dynamic,
            cuts_plates=all(recordings.cuts_plates(traced) for traced in runs),
            patterns=known.patterns if known else frozenset(),
            self_read=reader.self_read if reader else frozenset(),
            num_particles=particles.number,
            is_ordered=is_dynamic and may_order and not recordings.needs_graphs,
            is_reused=mode.is_reused,
            recorded=recorded,
            cuts=() if recorded is None or is_dynamic else recorded.cuts,
            **more,
        )

    # Sums over all values.

    def _summed(self, program: Program, particles: Particles, mode: Mode) -> Observation:
        """The run that fills the tables, a particle for each value, and their sum; refuses programs that have none."""
        recordings, rows, nesting = self.recordings, particles.number, int(particles.nesting)
        draws = recordings.mark()
        (together,) = programs_of(program, particles)

        def run(record: bool) -> TracedRun:
            # Dependencies are followed row by row, in log-probabilities too.
            put = AllValues(rows, nesting, particles.is_compact, record)
            filled = together._replace(model=put(together.model), guide=put(together.guide))
            return self.trace(filled, particles, step=mode.num_steps, track=record, warns=False)

        record = not mode.is_recorded and recordings.wants(particles, mode.learning)
        traced = run(record)
        if not (record or mode.is_recorded or recordings.knows(traced, rows)):
            draws.again()
            traced, record = run(True), True
        loss = self._sum(traced, particles, mode)
        if record:
            assert traced.recorded is not None
            alone = self.alone(program, particles, traced)
            values = Values((traced.recorded,), alone, (traced,), recordings.call, nesting)
            if not are_alike(values, checked_rows(rows)):
                self._refuse("a row of values costs something else alone")
            # A program may read a shape. In a recorded run values are as large as their plates. The last run counts:
            # autograd refuses buffers that were put back.
            draws.again([traced])
            recorded, loss = loss, self._sum(run(False), particles, mode)
            if not torch.allclose(recorded, loss, rtol=1e-4):
                self._refuse("values of size one in plates cost something else")
        recordings.now.steps += mode.counts(traced)
        return Observation((traced,), summed=loss)

    def _refuse(self, reason: str) -> NoReturn:
        """Refuses to sum. The next run is recorded: what was known of the structure may no longer be so."""
        self.recordings.look_again()
        raise UnsupportedProgramError(reason)

    def _sum(self, traced: TracedRun, particles: Particles, mode: Mode) -> Tensor:
        """The sum over the tables of a run."""
        plan, is_open = self._sum_plan(traced, particles, mode), not mode.is_recorded
        loss, zeros = exact_sum(traced, plan, int(particles.nesting), is_open)
        if is_open:
            # One read on the host.
            known, (number, num_zeros) = self.num_zeros, torch.stack([in_single(loss.detach()), zeros]).tolist()
            if not math.isfinite(number):
                raise UnsupportedProgramError("the loss is not finite at some values")
            if num_zeros > known or (num_zeros and traced.recorded is not None):
                # Where the probability is zero, an infinite slope of the cost makes the gradient NaN.
                slopes = gradients_of(loss, inputs_of(loss), retain_graph=True)
                if not all(bool(torch.isfinite(slope).all()) for slope in slopes.values()):
                    raise UnsupportedProgramError("the gradient is not finite at impossible values")
                self.num_zeros = max(known, int(num_zeros))
        return loss

    def _sum_plan(self, traced: TracedRun, particles: Particles, mode: Mode) -> SumPlan:
        """The plan of the sum over the tables of a run."""
        recordings = self.recordings
        if traced.escaped_sites or recordings.is_dynamic(traced):
            # Where one value runs at a time, values may well stay in torch.
            self._refuse("sampled values steer it")
        if traced.mixes is not None:
            self._refuse(f"{traced.mixes[0]} reads several rows of values")
        graph = recordings.graph(traced, particles.number, mode.learning)
        plan = self.plans.of(traced, graph, self.facts([traced], False, particles, mode, sums=True)).summed
        if plan is None or plan.rows > particles.number:
            self._refuse("a law or a cost reads several sites")
        return plan


def _sites_of(traces: tuple[Any, Any]) -> Hashable:
    """What tells structures without scores apart: their sites, and the kinds of their laws."""
    return tuple((name, type(site.get("fn"))) for trace in traces for name, site in trace.nodes.items())


def stacked(runs: Sequence[TracedRun], is_dynamic: bool) -> list[list[int]]:
    """Groups of run numbers whose tensors are stacked: all runs in one group, or each run in a group of its own.

    A baseline from those particles that happen to have the same structure would depend on the value of the site that
    it is for.
    """
    is_alike = not is_dynamic and all(run.key == runs[0].key for run in runs)
    return [list(range(len(runs)))] if is_alike else [[i] for i in range(len(runs))]
