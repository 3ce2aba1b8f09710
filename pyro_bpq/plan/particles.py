r"""How many particles a program is good for, where their number is left open."""

from __future__ import annotations

from torch import Tensor

from pyro_bpq.plan.plan import Plan
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.watch import samples

__all__ = ["num_particles_for"]

MOST_PARTICLES = 8
# A value of so many elements takes about as long as the Python code of a sample statement.
ELEMENTS = 1 << 16


def num_particles_for(plan: Plan, traced: TracedRun, particles: int = 1) -> int:
    r"""Number of particles that a program is good for.

        M = min(8, max(2, 65536 / n)),   n elements of the largest value of a particle

    where costs after a site of the default's choice are known of the sampled value alone, and differ from row to row
    of its plates; else one. Baselines from other particles know the row, those from other steps do not. Two, where
    :class:`~pyro_bpq.estimators.DebiasedStraightThrough` serves all such sites, which needs no baseline.

    Args:
        plan: The plan of a run.
        traced: The run.
        particles: Number of particles in it.

    Returns:
        The number ``M``.
    """
    if not plan.by_row or traced.user_costs or traced.untraced or traced.elimination is not None:
        return 1
    if plan.by_row <= set(plan.sloped):
        return 2
    values = [site["value"] for trace in (traced.guide_trace, traced.model_trace) for site in samples(trace).values()]
    largest = max(value.numel() for value in values if isinstance(value, Tensor))
    return min(MOST_PARTICLES, max(2, ELEMENTS * particles // max(largest, 1)))
