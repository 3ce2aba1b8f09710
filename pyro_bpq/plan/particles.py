r"""How many particles a program is good for, where their number is left open."""

from __future__ import annotations

import math

from torch import Tensor

from pyro_bpq.estimators.differences import Differences
from pyro_bpq.plan.plan import Plan
from pyro_bpq.plan.rules import DRAWN_STEPS, MANY_READS, MOST_SUMMED, PARTICLES, ProgramFacts
from pyro_bpq.plan.structure import num_reads
from pyro_bpq.plan.work import STEP, Work
from pyro_bpq.record.traced_run import TracedRun, cost_of_site
from pyro_bpq.record.watch import samples


def num_particles_for(plan: Plan, traced: TracedRun, particles: int = 1, work: Work | None = None) -> int:
    r"""Number of particles that a program is good for.

        M = min(8, max(4, 1 + a / 2b), max(2, 524288 / n)),   n elements of the largest value of a particle

    Several particles run if a site has no chosen estimator and a noisy gradient. A gradient has no noise if the site is
    the only one of the program, has one component, and all later costs are known at its other values. ``a`` is the
    time that all particles of one call share: the calls of operators. ``b`` is the time that each particle adds. Both
    are in counted seconds. Several particles help because their mean is a baseline for each site and each row, which
    means of earlier steps are not.

    The estimator of these sites may change ``M``. With :class:`~pyro_bpq.estimators.DebiasedStraightThrough` at all of
    them, ``M`` is 2, because it needs no baseline. With :class:`~pyro_bpq.estimators.Hindsight` it is at most 4. With
    :class:`~pyro_bpq.estimators.CrossedLeaveOneOut` it is 8, or less if the values of all pairs of particles have more
    than ``2^20`` elements. The table is ``PARTICLES`` in ``plan/rules.py``.
    """
    held = frozenset(name for name, may_hold in plan.layers.items() if may_hold)
    stepped = [name for name, spec in plan.layout.specs.items() if isinstance(spec.estimator, Differences)]
    counts = {name: plan.held.sites.get(name) for name in stepped}
    drawn = frozenset(name for name, site in counts.items() if site is not None and site.is_drawn)
    sloped = [name for name, spec in plan.layout.specs.items() if "slope" in spec.estimator.needs]
    facts = ProgramFacts(
        compared=plan.compared,
        noisy=len(plan.noisy),
        sloped=frozenset(name for name in sloped if num_reads(traced, name) >= MANY_READS),
        held=held | drawn,
        crossed=frozenset(plan.layers) - held,
        is_stepped=bool(plan.noisy) and plan.noisy <= counts.keys() - drawn,
        is_plain=not (traced.is_dear or traced.untraced or traced.enumerated),
        elements=largest_value(traced),
        particles=particles,
        free=math.inf if work is None or particles > 1 else _shared_over_added(work),
    )
    return next(rule.gives(facts) for rule in PARTICLES if rule.holds(facts))


def _shared_over_added(work: Work) -> float:
    """Seconds of a step that its particles share over those that each adds."""
    # A backward pass takes about twice as long as the run itself.
    return (3.0 * work.shared + STEP) / (3.0 * work.added) if work.added > 0.0 else math.inf


def num_rows_for(plan: Plan, traced: TracedRun, particles: int = 1) -> int:
    """Number of rows of a run that tells the costs of all values; 0 where the loss cannot be summed, or is too dear."""
    rows = 0 if plan.summed is None else plan.summed.rows
    return rows if rows * largest_value(traced) <= MOST_SUMMED * particles else 0


def num_drawn_steps(traced: TracedRun) -> int:
    """Number of steps that draw before the loss is summed over all values.

    Ten if the model learns: without noise a mixture may leave components unused from the start. Else a single one, as
    Adam long remembers noisy steps. It leaves a guide's symmetric start.
    """
    costs = (traced.run.costs.get(cost_of_site(site, False)) for site in samples(traced.model_trace).values())
    return DRAWN_STEPS[any(cost is not None and cost.requires_grad for cost in costs)]


def largest_value(traced: TracedRun) -> int:
    """Number of elements of the largest value."""
    values = [site["value"] for trace in (traced.guide_trace, traced.model_trace) for site in samples(trace).values()]
    return max((value.numel() for value in values if isinstance(value, Tensor)), default=0)
