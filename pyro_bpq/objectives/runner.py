r"""Runs the programs of a step, plans what is done on their structure, and collects the signals of their sites."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from pyro.infer.util import is_validation_enabled

from pyro_bpq.critics.bank import CriticBank
from pyro_bpq.errors import BPQError, BPQWarning, UnsupportedProgramError
from pyro_bpq.objectives.observation import Mode, NoiseSource, Observation, Runner, Staged
from pyro_bpq.objectives.ordered import ordered_by_option, ordered_by_rules, ordered_runs
from pyro_bpq.objectives.programs import programs_of, traced_with
from pyro_bpq.objectives.staging import Staging
from pyro_bpq.objectives.summing import Summing
from pyro_bpq.plan.particles import num_particles_for, num_rows_for
from pyro_bpq.plan.plan import Plan
from pyro_bpq.plan.planner import PlanCache, Planner, check_gradients
from pyro_bpq.plan.structure import StructureFacts
from pyro_bpq.reruns.apart import tracked_alone
from pyro_bpq.reruns.elimination import eliminate
from pyro_bpq.reruns.enumeration import enumerated_programs
from pyro_bpq.reruns.row_runs import RowRuns
from pyro_bpq.reruns.rows_apart import plated_costs, rows_that_meet
from pyro_bpq.rollout.runs import Particles, Program
from pyro_bpq.tracing.hidden_particles import trace_particles
from pyro_bpq.tracing.plain_values import ReachedValues, plain_arguments
from pyro_bpq.tracing.plate_errors import check_declared, left_torch
from pyro_bpq.tracing.sandbox import Draws, LentBuffers, Sandbox, UngraphedBuffers
from pyro_bpq.tracing.structure_cache import StructureCache, merged_graph
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.tracer import trace_run
from pyro_bpq.tracing.watch import TraceOptions, samples

_NOTHING_ENUMERATED = (
    'enumeration="exact" found no site to sum out. Mark sites with infer={"enumerate": "parallel"} or '
    'pyro.infer.config_enumerate, or write enumeration="sample".'
)


class StepRunner(Runner):
    """Runs guide and model as often as a step needs it.

    Attributes:
        plans: The plans of the structures met so far.
        structure: What is known of these structures.
        row_runs: How the extra runs of the model are carried out.
        noise: Source of what estimators draw themselves.
        reached: The plain values that the programs can reach besides their arguments.
        num_zeros: Largest number of probabilities of zero in a summed step whose gradient was looked at.
    """

    noise: NoiseSource

    def __init__(
        self,
        planner: Planner,
        structure: str,
        critics: CriticBank,
        only_costs: bool = False,
        enumerates: bool = False,
        warns: bool = True,
    ) -> None:
        self.plans, self.structure, self.row_runs = PlanCache(planner), StructureCache(structure), RowRuns()
        self.noise, self.critics = NoiseSource(critics.seed), critics
        self.num_zeros, self.reached = 0, ReachedValues()
        self.only_costs, self.enumerates, self.warns = only_costs, enumerates, warns

    @property
    def parts(self) -> tuple[Any, ...]:
        """What finds things out in a step."""
        return self.structure, self.plans, self.row_runs, self.noise

    @property
    def said(self) -> tuple[str, ...]:
        """What was settled last of the extra run and of tracking; empty where nothing was."""
        return tuple(filter(None, (self.row_runs.said, self.structure.said)))

    @property
    def has_buffers(self) -> bool:
        """Whether the programs may call modules with buffers."""
        return self.plans.last is None or self.plans.last.plan.has_buffers

    @property
    def is_looking(self) -> bool:
        """Whether the next runs are tracked."""
        return self.structure.wants_tracking()

    @property
    def is_settled(self) -> bool:
        """Whether the next run does what the last one did, as far as is known."""
        return self.plans.last is not None and not self.structure.wants_tracking()

    def refuses_recording(self) -> str:
        """Steps that are tracked are not recorded."""
        if not self.structure.always_tracks:
            return ""
        if self.structure.mode == "dynamic":
            return 'structure="dynamic" tracks every step'
        return f"sampled values of {', '.join(self.structure.escaping) or 'a site'} steer Python, or leave torch"

    def look_again(self) -> None:
        """Tracks the next run."""
        self.structure.look_again()

    def forget_last(self) -> None:
        """Forgets the last step: the next one is planned anew."""
        self.plans.forget_last()

    def good_for(self, traced: TracedRun, particles: int = 1) -> int:
        """The number of particles to take for a program, from a run of ``particles``; 1 if values steer the program."""
        plan = self._static_plan(traced)
        return 1 if plan is None else num_particles_for(plan, traced, particles, self.structure.work_of(traced))

    def why_one(self, traced: TracedRun) -> str:
        """Why that number is 1, in words."""
        plan = self._static_plan(traced)
        if plan is not None:
            return plan.alone
        is_asked = self.structure.mode == "dynamic"
        return 'you wrote structure="dynamic"' if is_asked else "sampled values steer the program"

    def rows_for(self, traced: TracedRun, particles: int = 1) -> int:
        """Number of rows of a run that tells the costs of all values; 0 where the loss cannot be summed over them."""
        plan = self._static_plan(traced)
        return 0 if plan is None else num_rows_for(plan, traced, particles)

    def _static_plan(self, traced: TracedRun) -> Plan | None:
        """The last plan; ``None`` if values steer the program, or its structure is tracked at every step."""
        if self.plans.last is None or self.structure.is_dynamic(traced) or self.structure.always_tracks:
            return None
        return self.plans.last.plan

    def trace(
        self,
        program: Program,
        particles: Particles,
        num_steps: int,
        track: bool = False,
        sloped: frozenset[str] = frozenset(),
        maps: bool = False,
        warns: bool = True,
        put: Callable[[Any], Any] = lambda part: part,
        has_told: bool = False,
    ) -> TracedRun:
        """Runs a program once.

        Args:
            program: Model, guide and their arguments, wrapped for vectorised particles.
            particles: How the particles of the step run.
            num_steps: Number of steps taken.
            track: Whether to track which values depend on which.
            sloped: Sites of whose costs slopes are wanted.
            maps: Whether the linear maps that read their values are noted.
            warns: Whether to warn of what is hardly meant.
            put: Puts values in: it wraps model and guide, within enumeration.
            has_told: Whether another run of the step has warned of what is hardly meant in the program.
        """
        model, guide, args, kwargs = program
        # Particles that meet show in few runs at few values, but in every tracked one.
        is_looked_at = particles.has_plate and not self.structure.always_tracks
        options = self._options(
            particles,
            track=track,
            step=num_steps,
            only_costs=self.only_costs,
            components=self.structure.follows_components and not self.enumerates,
            sloped=sloped,
            maps=maps,
            rows=not self.enumerates and (self.structure.follows_rows or is_looked_at),
            counts=track and not self.structure.escapes,
            warns=warns,
            has_told=has_told,
        )
        if not self.enumerates:
            traced = trace_run(put(model), put(guide), args, kwargs, options)
            check_gradients(traced)
            return self._with_rows_that_meet(traced, program, particles, num_steps)
        nesting = int(particles.nesting)
        with enumerated_programs(model, guide, nesting) as (summed, sampled):
            # Values that are put in stand outside of enumeration, which follows the sites that it passes.
            traced = trace_run(put(summed), put(sampled), args, kwargs, options)
        if self.warns and is_validation_enabled() and not traced.enumerated:
            warnings.warn(_NOTHING_ENUMERATED, BPQWarning, stacklevel=2)
        traced = eliminate(traced, nesting)
        if track and self.structure.follows_rows:
            # Rows are not followed beside the values of enumerated sites.
            traced = replace(traced, unfollowed=plated_costs(traced))
        return self._with_rows_that_meet(traced, program, particles, num_steps)

    def _with_rows_that_meet(
        self, traced: TracedRun, program: Program, particles: Particles, num_steps: int
    ) -> TracedRun:
        """The run with the rows that meet by values, where they could not be followed."""
        if not traced.unfollowed or self.structure.crosses or traced.crosses:
            return traced
        trace = traced_with(self, particles, num_steps)
        is_first = self.structure.tracked_runs == 0
        met = rows_that_meet(trace, program, traced, self.has_buffers, num_steps, is_first)
        return replace(traced, met=met, crosses=bool(met))

    def _options(self, particles: Particles, **more: Any) -> TraceOptions:
        planner, nesting, number = self.plans.planner, particles.nesting, particles.number
        return TraceOptions(planner.choose, nesting, number, planner.attach, noise=self.noise, **more)

    def observe(self, program: Program, particles: Particles, mode: Mode) -> Observation:
        """Runs model and guide, given as for one particle, for all particles of a step."""
        if not (mode.is_recorded or self.structure.is_ordered):
            self.structure.meet("handed over", plain_arguments(program[2:]))
            self.structure.meet("reached", self.reached.of(program), self.reached.has_counters)
        if particles.sums:
            found = Summing(self, program, particles, mode).observation()
            assert found.summed is not None
            self.num_zeros = max(self.num_zeros, found.summed.num_zeros)
            return found
        is_together = particles.has_plate or particles.is_hidden
        is_ordered = self.structure.is_ordered and mode.may_order and not (mode.shows or is_together)
        in_order = self._ordered_step(program, particles, mode) if is_ordered else None
        if in_order is not None:
            return in_order
        track = self.structure.wants_tracking() or (self.structure.always_tracks and not is_ordered)
        programs, draws = programs_of(program, particles), Draws()
        runs = self._runs(programs, particles, mode, track)
        ordered = ordered_runs(self.plans.planner, runs) if is_ordered else None
        if ordered is not None:
            return Observation((), (), ordered)
        # The runs that show the structure: those of the step, unless they cannot be tracked.
        shown = runs
        if runs[0].reads is None and (track or not all(self.structure.knows(run) for run in runs)):
            # Of a structure that was never tracked it is not known whether values steer it or rows meet.
            if particles.is_hidden:
                trace = functools.partial(self.trace, programs[0], particles, mode.num_steps)
                shown = tracked_alone(trace, runs, self.has_buffers)
            else:
                draws.again()
                shown = runs = self._runs(programs, particles, mode, True)
        graphs = [self.structure.graph(traced, mode.learning) for traced in shown]
        is_dynamic = any(self.structure.is_dynamic(traced) for traced in shown)
        if is_dynamic or [run.key for run in runs] != [run.key for run in shown]:
            runs = shown
        if is_dynamic and particles.has_plate and any(s.score is not None for r in runs for s in r.run.sites.values()):
            sites = frozenset().union(*(traced.escaped_sites for traced in shown))
            raise UnsupportedProgramError(left_torch(sites, particles.number))
        facts = self.facts(shown, is_dynamic, particles, mode)
        if mode.learning and mode.may_order and self.plans.planner.orders:
            self.structure.settle_order(all(self.plans.planner.fits_order(traced) for traced in shown))
        members, ndim = stacked(runs, is_dynamic), most_plates(runs)
        if len(members) == 1 and any(graph != graphs[0] for graph in graphs[1:]):
            graphs = [merged_graph(runs[0], graphs)]
        try:
            items = [
                Staging(
                    *(self, particles, mode, tuple(runs[i] for i in ids), tuple(programs[i] for i in ids)),
                    *(graphs[ids[0]], facts, ndim),
                ).staged(program)
                for ids in members
            ]
        except BPQError:
            raise
        except RuntimeError:
            # An error about shapes that do not fit names the site that they come from.
            traces = (runs[0].guide_trace, runs[0].model_trace)
            check_declared(site for trace in traces for site in samples(trace).values())
            raise
        return Observation(tuple(runs), tuple(items))

    def _plan_once(self, program: Program, particles: Particles, mode: Mode) -> None:
        """Plans for a run that the step does without: an objective whose state was loaded may have no plan to show."""
        # With two particles leave-one-out has a plan too.
        few = replace(particles, number=min(particles.number, 2))
        with Sandbox(torch.get_rng_state(), self.has_buffers):
            self.observe(program, few, replace(mode, learning=False, may_order=False))

    def _ordered_step(self, program: Program, particles: Particles, mode: Mode) -> Observation | None:
        """A step in program order; ``None`` if it does not serve all sites."""
        planner, structure = self.plans.planner, self.structure
        follows_rules = structure.mode == "auto"
        if not follows_rules and (structure.needs_graphs or not planner.serves_order):
            return None
        if self.plans.last is None:
            self._plan_once(program, particles, mode)
        options = self._options(particles, step=mode.num_steps)
        step = ordered_by_rules if follows_rules else ordered_by_option
        return step(planner, structure, program, options, mode.learning)

    def _runs(self, programs: Sequence[Program], particles: Particles, mode: Mode, track: bool) -> list[TracedRun]:
        """Traces the programs of a step, with slopes if the last step's plan needs them.

        Particles in a dimension that the programs do not see have one run.
        """
        if particles.is_hidden and (mode.is_checked or not track):
            options = self._options(particles)
            return trace_particles(*programs[0], options, is_checked=mode.is_checked, has_buffers=self.has_buffers)
        trace = functools.partial(self.trace, particles=particles, num_steps=mode.num_steps, track=track)
        last = None if track or not torch.is_grad_enabled() else self.plans.last
        lends = particles.is_hidden and self.has_buffers

        def each(**options: Any) -> list[TracedRun]:
            # Particles of one call write buffers once; where they run one after the other for once, the first does.
            first, *others = programs
            runs = [trace(first, **options)]
            with LentBuffers() if lends else contextlib.nullcontext():
                return runs + [trace(program, has_told=True, **options) for program in others]

        if last is None or not last.plan.led_back:
            return each()
        draws = Draws()
        try:
            with UngraphedBuffers() if last.plan.has_buffers else contextlib.nullcontext():
                return each(sloped=last.plan.led_back, maps=last.plan.notes_maps)
        except BPQError:
            raise
        except RuntimeError as error:
            draws.again()
            runs = each()
            # It runs with plain values: torch refuses something that the program does with values that carry gradients.
            self.plans.know("slopes", last.key, False)
            warnings.warn(
                f"Sites {sorted(last.plan.led_back)}: the program failed while their values carried gradients, which "
                f"slopes of costs need: {error} From now on estimators do without slopes there. To keep them, write "
                "z.detach() where a value leaves torch.",
                BPQWarning,
                stacklevel=2,
            )
            return runs

    def facts(self, runs: Sequence[TracedRun], is_dynamic: bool, particles: Particles, mode: Mode) -> StructureFacts:
        """What is known of the structure of runs besides their graph."""
        structure = self.structure
        return StructureFacts(
            is_dynamic=is_dynamic,
            cuts_plates=all(structure.cuts_plates(traced) for traced in runs),
            patterns=frozenset() if is_dynamic else structure.patterns_of(runs),
            handed=structure.handed_of(runs),
            has_buffers=structure.has_buffers(runs),
            num_particles=particles.number,
            is_ordered=is_dynamic
            and structure.mode == "auto"
            and mode.may_order
            and self.plans.planner.orders
            and not structure.needs_graphs,
            work=structure.work_of(runs[0]),
        )

    def stage(self, runs: Sequence[TracedRun], programs: Sequence[Program], particles: Particles, mode: Mode) -> Staged:
        """The signals of the sites of further runs of a known structure; nothing learns, and nothing runs again."""
        graph = self.structure.graph(runs[0], False)
        facts = self.facts(runs, self.structure.is_dynamic(runs[0]), particles, mode)
        known = graph, facts, most_plates(runs)
        with self.plans.keeping_last():
            return Staging(self, particles, mode, tuple(runs), tuple(programs), *known).staged()


def most_plates(runs: Sequence[TracedRun]) -> int:
    """The most plate dimensions of any run: a site's tensors have as many, whichever later plates its value opens."""
    return max(run.plate_ndim for run in runs)


def stacked(runs: Sequence[TracedRun], is_dynamic: bool) -> list[list[int]]:
    """Groups of run numbers whose tensors are stacked: all runs in one group, or each run in a group of its own.

    A baseline from those particles that happen to have the same structure would depend on the value of the site that
    it is for.
    """
    is_alike = not is_dynamic and all(run.key == runs[0].key for run in runs)
    return [list(range(len(runs)))] if is_alike else [[i] for i in range(len(runs))]
