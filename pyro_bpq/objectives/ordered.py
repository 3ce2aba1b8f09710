r"""Steps of steered programs in program order: which runs they take, and whether they serve all sites."""

from __future__ import annotations

from collections.abc import Sequence

from pyro_bpq.objectives.observation import Observation
from pyro_bpq.plan.planner import Planner
from pyro_bpq.plan.rules import plain_score
from pyro_bpq.rollout.runs import Program
from pyro_bpq.step.program_order import RunInOrder, in_order, served_alike
from pyro_bpq.tracing.recordings import Recordings
from pyro_bpq.tracing.sandbox import Draws
from pyro_bpq.tracing.traced_run import PlainRun, TracedRun
from pyro_bpq.tracing.tracer import run_in_order
from pyro_bpq.tracing.watch import TraceOptions


def ordered_by_option(
    planner: Planner, recordings: Recordings, program: Program, options: TraceOptions, learning: bool
) -> Observation | None:
    """A step in program order that an option asks for; ``None``, and nothing drawn, if an estimator needs more."""
    draws = Draws()
    ordered = ordered_runs(planner, _runs(program, options))
    if learning:
        recordings.settle_order(ordered is not None)
    if ordered is None:
        draws.again()
        return None
    return Observation((), (), ordered)


def ordered_by_rules(
    planner: Planner, recordings: Recordings, program: Program, options: TraceOptions, learning: bool
) -> Observation:
    """A step in program order that follows from the rules, not from an option.

    If program order does not fit a run, only later steps change: what a step does must not depend on the values
    that it has drawn.
    """
    runs = _runs(program, options)
    if learning:
        recordings.settle_order(all(isinstance(run, PlainRun) or planner.fits_order(run) for run in runs))
    ordered = tuple(served_alike(run, plain_score(len(runs))) for run in runs)
    return Observation((), (), ordered, is_lone=len(runs) == 1)


def ordered_runs(planner: Planner, runs: Sequence[PlainRun | TracedRun]) -> tuple[RunInOrder, ...] | None:
    """The signals of runs in program order; ``None`` if an estimator needs more."""
    estimators = [planner.order_estimators(run, len(runs)) for run in runs]
    found = tuple(in_order(run, own) for run, own in zip(runs, estimators, strict=True) if own is not None)
    return found if len(found) == len(runs) else None


def _runs(program: Program, options: TraceOptions) -> list[PlainRun | TracedRun]:
    return [run_in_order(*program, options) for _ in range(options.num_particles)]
