r"""Collects the signals of the sites of a step, from the plan of their structure and from its further runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from pyro_bpq.errors import BPQError
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.objectives.observation import Mode, Staged
from pyro_bpq.plan.plan import Plan
from pyro_bpq.plan.structure import StructureFacts
from pyro_bpq.reruns.at_values import Reruns, charged
from pyro_bpq.reruns.flipped_costs import flipped_costs
from pyro_bpq.reruns.held_costs import HeldRun, is_refused
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
        """The signals of the sites; without ``one``, the program for one particle, nothing runs at further values."""
        rollout, critics, mode = self._rollout(), self.runner.critics, self.mode
        plan, tables = self._planned(rollout)
        rerun = None
        if one is not None and plan.needs_program and not self.facts.is_dynamic:
            rerun = self._rerun(plan, rollout, one)
            plan = rerun.plan
        if plan.patterns:
            # Only now it is certain which plan is carried out.
            runs = tuple(charged(t.run, plan.patterns, t.guide_trace, t.model_trace) for t in self.traced)
            rollout = replace(rollout, runs=runs)
        signals = Signals(plan.layout, rollout, tables, critics, mode.learning, rerun, mode.by_value)
        return Staged(self.traced, self.programs, signals)

    def _rollout(self) -> Rollout:
        first, has_plate = self.traced[0], self.particles.has_plate
        number = self.particles.number if has_plate else len(self.traced)
        # Particles lie to the left of as many dimensions as plates may have, whether there are plates or not.
        ndim = int(self.particles.nesting) - 1 if has_plate else self.plate_ndim
        return Rollout(tuple(t.run for t in self.traced), number, first.plate_sizes, ndim, has_plate)

    def _plan(self) -> Plan:
        return self.runner.plans.plan(self.traced[0], self.graph, self.facts)

    def _planned(self, rollout: Rollout) -> tuple[Plan, dict[str, Tensor]]:
        """The plan without the extra runs that fail, and the immediate costs that its extra run of the model tells."""
        plan, tables, key = self._plan(), dict[str, Tensor](), self.traced[0].key
        plans, row_runs, mode = self.runner.plans, self.runner.row_runs, self.mode
        if plan.flips is not None:
            program, checks = self.programs[0], not mode.is_recorded
            found = flipped_costs(plan, self.traced, rollout, program, row_runs, mode.learning, checks)
            tables = found or tables
            if found is None:
                row_runs.say("There is no extra run of the model: it does not run at other values of its sites.")
                plans.know("flips", key, False)
                plan = self._plan()
        if plan.held is not None and not plan.held.asked and is_refused(plan.held, self.traced[0], rollout, row_runs):
            plans.know("holding", key, False)
            plan = self._plan()
        return plan, tables

    def _rerun(self, plan: Plan, rollout: Rollout, one: Program) -> Reruns:
        """The runs at values that estimators ask for, with the plan that holds then."""
        runner, mode, held = self.runner, self.mode, None
        trace = functools.partial(runner.trace, particles=self.particles, num_steps=mode.num_steps)
        if plan.held is not None:
            checks = not mode.is_recorded
            held = HeldRun(plan.held, self.graph, runner.row_runs, plan.has_buffers, mode.learning, one, checks)
        share = 1.0 / self.particles.number if mode.goes_back else None
        rerun = Reruns(trace, self.programs, self.traced, plan, runner.noise(), share, held)
        if plan.sloped and not self._has_slopes(rerun, plan, rollout):
            return rerun.with_plan(self._plan())
        return rerun

    def _has_slopes(self, rerun: Reruns, plan: Plan, rollout: Rollout) -> bool:
        """Looks, once for each structure, whether costs have gradients to the values of the sites that need some."""
        plans, key = self.runner.plans, self.traced[0].key
        if ("slopes", key) in plans.found:
            return True
        plates = {name: plan.graph.node(name).plates for name in plan.sloped}
        try:
            found = all(rerun.has_slope(name, rollout, own) for name, own in plates.items())
        except BPQError:
            raise
        except RuntimeError:
            # Torch refuses something that the program does with values that carry gradients.
            found = False
        plans.know("slopes", key, found)
        return found
