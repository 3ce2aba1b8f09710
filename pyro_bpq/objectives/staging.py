r"""Collects the signals of the sites of a step, from the plan of their structure and from the recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pyro_bpq.errors import BPQError
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.objectives.observation import Mode, Staged
from pyro_bpq.plan.plan import Plan
from pyro_bpq.plan.structure import StructureFacts
from pyro_bpq.reruns.at_values import Reruns, charged
from pyro_bpq.reruns.flipped_costs import flipped_costs
from pyro_bpq.reruns.values import Values
from pyro_bpq.rollout.runs import Particles, Program, Rollout
from pyro_bpq.step.signals import Signals
from pyro_bpq.tracing.traced_run import TracedRun

if TYPE_CHECKING:
    from pyro_bpq.objectives.runner import StepRunner


def staged(
    runner: StepRunner,
    traced: Sequence[TracedRun],
    programs: Sequence[Program],
    particles: Particles,
    mode: Mode,
    graph: StochasticComputationGraph,
    facts: StructureFacts,
    plate_ndim: int,
    one: Program | None = None,
) -> Staged:
    """The signals of the sites of runs of like structure; without ``one``, the program for one particle, none reruns.

    Args:
        runner: Runs the programs.
        traced: The runs.
        programs: The program of each run.
        particles: How the particles of the step run.
        mode: What the step is for.
        graph: The graph of the runs.
        facts: What is known of their structure besides.
        plate_ndim: Number of plate dimensions in the tensors of all runs of the step.
        one: The program for one particle.
    """
    first, has_plate, plans = traced[0], particles.has_plate, runner.plans
    # Particles lie to the left of as many dimensions as plates may have, whether there are plates or not.
    ndim = int(particles.nesting) - 1 if has_plate else plate_ndim
    number = particles.number if has_plate else len(traced)
    rollout = Rollout(tuple(t.run for t in traced), number, first.plate_sizes, ndim, has_plate)
    plan = plans.plan(first, graph, facts)
    found = (runner.recordings.recorded(run, particles.in_call) for run in traced)
    needs_alone = one is not None and has_plate and plan.held is not None and plan.held.all_drawn
    values = Values(
        tuple(own for own in found if own is not None),
        runner.alone(one, particles, first) if one is not None and needs_alone else None,
        tuple(traced),
        runner.recordings.call,
        int(particles.nesting) if has_plate else 0,
    )
    tables, shifts = ({}, {}) if plan.flips is None else flipped_costs(plan, values, rollout)
    rerun = None
    if one is not None and plan.needs_program and not facts.is_dynamic:
        rerun = Reruns(values, plan, runner.noise())
        if plan.sloped and ("slopes", first.key) not in plans.found:
            plans.know("slopes", first.key, _have_slopes(rerun, plan, rollout))
            plan = plans.plan(first, graph, facts)
            rerun = rerun.with_plan(plan)
    if plan.patterns:
        runs = tuple(charged(t.run, plan.patterns, t.guide_trace, t.model_trace) for t in traced)
        rollout = replace(rollout, runs=runs)
    signals = Signals(plan.layout, rollout, tables, runner.critics, mode.learning, rerun, mode.by_value, shifts)
    return Staged(tuple(traced), tuple(programs), particles, signals)


def _have_slopes(rerun: Reruns, plan: Plan, rollout: Rollout) -> bool:
    """Whether costs have gradients to the values of the sites that need some."""
    try:
        return all(rerun.has_slope(name, rollout, plan.graph.node(name).plates) for name in plan.sloped)
    except BPQError:
        raise
    except RuntimeError:
        # Torch refuses something that the program does with values that carry gradients.
        return False
