r"""What an extra run with held values needs to know, and how the laws of children are named in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions import MaskedDistribution

from pyro_bpq.estimators.hindsight import Changes
from pyro_bpq.graph.scg import StochasticComputationGraph, cost_of_guide
from pyro_bpq.plan.held import HeldPlan
from pyro_bpq.reruns.row_runs import RowRuns
from pyro_bpq.rollout.runs import Program
from pyro_bpq.tracing.traced_run import TracedRun


@dataclass(frozen=True)
class HeldRun:
    """What an extra run needs to know.

    Args:
        plan: Which row flips which sites.
        graph: The graph.
        runs: Chooses the way in which the rows run.
        has_buffers: Whether the programs may call modules with buffers.
        learning: Whether this run counts as a use of that way.
        one: Model and guide for one particle, and their arguments; ``None`` where particles have no plate.
        is_checked: Whether the costs of the first row are compared with those of the step.
    """

    plan: HeldPlan
    graph: StochasticComputationGraph
    runs: RowRuns
    has_buffers: bool
    learning: bool
    one: Program | None
    is_checked: bool


def law_of(child: str) -> str:
    """Name of the log-probability of a child's value, neither scaled nor masked."""
    return f"law({child})"


def unmasked(fn: Any) -> Any:
    """The distribution that values are drawn from, without the mask that hides their log-probability."""
    while isinstance(fn, MaskedDistribution):
        fn = fn.base_dist
    return fn


def law_name(traced: TracedRun, child: str) -> str:
    """The cost that is the log-probability of the child's value, if it is neither scaled nor masked."""
    record, cost = traced.run.sites[child], cost_of_guide(child)
    is_plain = isinstance(record.scale, float) and record.scale == 1.0 and record.mask is None
    return cost if is_plain and cost in traced.run.costs and not traced.only_costs else law_of(child)


def joined(parts: Sequence[Changes]) -> Changes:
    """The changes of all particles, from those of each run."""
    return parts[0] if len(parts) == 1 else Changes(*map(torch.cat, zip(*parts, strict=True)))
