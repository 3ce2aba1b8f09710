r"""Collects the signals of the sites of a step, from the plan of their structure and from the recording."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.objectives.observation import Mode, Staged
from pyro_bpq.plan.structure import StructureFacts
from pyro_bpq.reruns.at_values import Reruns, charged, has_slope
from pyro_bpq.reruns.flips import flipped_costs
from pyro_bpq.reruns.values import Values
from pyro_bpq.rollout.runs import Particles, Program, Rollout
from pyro_bpq.step.signals import Signals
from pyro_bpq.tracing.traced_run import TracedRun

if TYPE_CHECKING:
    from pyro_bpq.objectives.runner import StepRunner


@dataclass(frozen=True)
class Staging:
    """Runs of like structure, to be prepared for estimators."""

    runner: StepRunner
    particles: Particles  # how the particles of the step run
    mode: Mode  # what the step is for
    traced: tuple[TracedRun, ...]  # the runs
    programs: tuple[Program, ...]  # the program of each run
    graph: StochasticComputationGraph
    facts: StructureFacts  # what is known of the structure besides its graph
    plate_ndim: int  # number of plate dimensions in the tensors of all runs of the step

    def staged(self, one: Program | None = None) -> Staged:
        """The signals of the sites; without ``one``, the program for one particle, estimators compare no values."""
        runner, rollout, mode, values = self.runner, self._rollout(), self.mode, self._values()
        plan = runner.plans.plan(
            self.traced[0], self.graph, self.facts, lambda name: has_slope(values, self.graph, name)
        )
        if one is not None and self.particles.has_plate and plan.held.all_drawn:
            values = replace(values, alone=runner.alone(one, self.particles, self.traced[0]))
        tables, shifts = flipped_costs(plan, values, rollout) if plan.flips.sites else ({}, {})
        rerun = None
        if one is not None and plan.needs_program and not self.facts.is_dynamic:
            rerun = Reruns(values, plan, runner.noise())
        if plan.patterns:
            runs = tuple(charged(t.run, plan.patterns, t.guide_trace, t.model_trace) for t in self.traced)
            rollout = replace(rollout, runs=runs)
        signals = Signals(plan.layout, rollout, tables, runner.critics, mode.learning, rerun, mode.by_value, shifts)
        return Staged(self.traced, self.programs, self.particles, signals)

    def _rollout(self) -> Rollout:
        first, has_plate = self.traced[0], self.particles.has_plate
        number = self.particles.number if has_plate else len(self.traced)
        # Particles lie to the left of as many dimensions as plates may have, whether there are plates or not.
        ndim = int(self.particles.nesting) - 1 if has_plate else self.plate_ndim
        return Rollout(tuple(t.run for t in self.traced), number, first.plate_sizes, ndim, has_plate)

    def _values(self) -> Values:
        """What costs at other values are computed from."""
        runner, particles = self.runner, self.particles
        found = [runner.recordings.recorded(traced, particles.in_call) for traced in self.traced]
        recorded = tuple(own for own in found if own is not None)
        nesting = int(particles.nesting) if particles.has_plate else 0
        return Values(recorded, None, self.traced, runner.recordings.call, nesting)
