r"""Collects the signals of the sites of a step, from the plan of their structure and from the recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.objectives.observation import Mode, Staged
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.reruns.at_values import Reruns, charged, has_slope
from pyro_bpq.reruns.flips import flipped_costs
from pyro_bpq.reruns.values import Values
from pyro_bpq.rollout.runs import Particles, Program, Rollout
from pyro_bpq.step.signals import Signals

if TYPE_CHECKING:
    from pyro_bpq.objectives.runner import StepRunner


def planned(
    runner: StepRunner,
    runs: Sequence[TracedRun],
    programs: Sequence[Program],
    group: Sequence[int],
    graph: StochasticComputationGraph,
    is_dynamic: bool,
    particles: Particles,
    mode: Mode,
    one: Program | None = None,
) -> Callable[[], Staged]:
    """Plans some of the runs of a step, which have one structure; returns what gives the signals of their sites.

    Args:
        runner: Runs the programs.
        runs: All runs of the step.
        programs: The program of each run.
        group: Numbers of the runs that have one structure.
        graph: Their graph.
        is_dynamic: Whether sampled values may steer the program.
        particles: How the particles of the step run.
        mode: What the step is for.
        one: The program for one particle; without it nothing runs again.
    """
    traced, own = tuple(runs[i] for i in group), tuple(programs[i] for i in group)
    facts, first = runner.facts(traced, is_dynamic, particles, mode), traced[0]
    # Particles lie to the left of as many dimensions as plates may have, whether there are plates or not; else a site's
    # tensors have as many plate dimensions as any run, whichever later plates its value opens.
    has_plate = particles.has_plate
    ndim = int(particles.nesting) - 1 if has_plate else max(run.plate_ndim for run in runs)
    number = particles.number if has_plate else len(traced)
    rollout = Rollout(tuple(t.run for t in traced), number, first.plate_sizes, ndim, has_plate)
    found = (runner.recordings.recorded(run, particles.in_call) for run in traced)
    recorded, nesting = tuple(each for each in found if each is not None), int(particles.nesting) if has_plate else 0
    values = Values(recorded, None, traced, runner.recordings.call, nesting)
    plan = runner.plans.plan(first, graph, facts, lambda name: has_slope(values, graph, name))
    if one is not None and has_plate and plan.held.all_drawn:
        values = replace(values, alone=runner.alone(one, particles, first))

    def staged() -> Staged:
        tables, shifts = flipped_costs(plan, values, rollout) if plan.flips.sites else ({}, {})
        rerun, charges = None, rollout
        if one is not None and plan.needs_program and not is_dynamic:
            rerun = Reruns(values, plan, runner.noise())
        if plan.patterns:
            runs = tuple(charged(t.run, plan.patterns, t.guide_trace, t.model_trace) for t in traced)
            charges = replace(rollout, runs=runs)
        signals = Signals(plan.layout, charges, tables, runner.critics, mode.learning, rerun, mode.by_value, shifts)
        return Staged(traced, own, particles, signals)

    return staged
