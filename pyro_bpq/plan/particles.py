r"""How many particles a program is good for, where their number is left open; and what runs cost, on which it depends.

A cost is counted instead of timed: calls of recorded operators, floating-point operations, bytes written. A count is
the same in every run and on every machine; a clock is not. Weights turn counts into seconds of one CPU and one thread;
only ratios of such seconds are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pyro_bpq.estimators.differences import Differences
from pyro_bpq.plan.rules import DRAWN_STEPS, MANY_READS, MOST_SUMMED, PARTICLES, ProgramFacts
from pyro_bpq.plan.structure import num_reads
from pyro_bpq.record.function import values_in
from pyro_bpq.record.operators import effects_of
from pyro_bpq.record.recorded import Recorded
from pyro_bpq.record.traced_run import TracedRun, cost_of_site
from pyro_bpq.record.values import Node, Value
from pyro_bpq.record.watch import samples

if TYPE_CHECKING:
    from pyro_bpq.plan.plan import Plan

# Seconds of a call of an operator with Python's share, of an operation of a matrix product, of one of a convolution,
# of a byte of a result, and of a step's Python that no operator is called for.
OPERATOR, FLOP, CONVOLVED, BYTE, STEP = 8.3e-6, 1.3e-11, 3.2e-11, 3.3e-10, 1.8e-3

Shapes = Sequence[Any]


def num_particles_for(plan: Plan, traced: TracedRun, recorded: Recorded | None, particles: int = 1) -> int:
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
        free=math.inf if recorded is None or particles > 1 else _shared_over_added(work_of_run(recorded)),
    )
    return next(rule.gives(facts) for rule in PARTICLES if rule.holds(facts))


def _shared_over_added(work: Work) -> float:
    """Seconds of a step that its particles share over those that each adds."""
    # A backward pass takes about twice as long as the run itself.
    return (3.0 * work.shared + STEP) / (3.0 * work.added) if work.added > 0.0 else math.inf


def num_rows_for(plan: Plan | None, traced: TracedRun, recorded: Recorded | None, particles: int = 1) -> int:
    """Number of rows of a run that tells the costs of all values; 0 where the loss cannot be summed, or is too dear."""
    if plan is None or plan.summed is None or recorded is None or any(map(recorded.draws, recorded.named)):
        return 0
    rows = plan.summed.rows
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


# What runs cost.


class Work(NamedTuple):
    """Seconds that rows of one call share, and seconds that each row adds."""

    shared: float = 0.0
    added: float = 0.0

    def seconds(self, rows: int = 1) -> float:
        """Estimated seconds of so many rows at once."""
        return self.shared + rows * self.added


def work_of_run(recorded: Recorded) -> Work:
    """The cost of a recorded run."""
    run = recorded.recording
    found: Work = recorded.kept("work", lambda: work_of(run.nodes, run.shapes, run.dtypes))
    return found


def work_at(recorded: Recorded, costs: Iterable[str], sites: Iterable[str]) -> Work:
    """The cost of a row of :meth:`Bound.at_rows`."""
    run = recorded.recording
    function = run.cut([recorded.named[name] for name in costs], sees_all=True)
    return work_of(function.reading({recorded.drawn[name].value for name in sites}), run.shapes, run.dtypes)


def work_of(nodes: Iterable[Node], shapes: Shapes, dtypes: Sequence[torch.dtype]) -> Work:
    """The cost of some operators."""
    shared = added = 0.0
    for node in nodes:
        kind = effects_of(node.func)
        shared += OPERATOR
        if kind.is_view:
            continue
        for value in values_in(node.result):
            if shapes[value] is not None:
                added += BYTE * prod(shapes[value]) * dtypes[value].itemsize
        rule = _RULES.get(kind.name)
        if rule is not None:
            added += rule(node, shapes)
        if (times := _DRAWN.get(kind.name)) and node.args[0].__class__ is Value:
            added += times * BYTE * prod(shapes[node.args[0]]) * dtypes[node.args[0]].itemsize
    return Work(shared, added)


def _product(node: Node, shapes: Shapes) -> float:
    left, right = [shapes[value] for value in values_in(node.args)][-2:]
    return FLOP * 2 * prod(left) * (right[-1] if len(right) > 1 else 1)


def _convolution(node: Node, shapes: Shapes) -> float:
    value, weight, *_ = node.args
    result = next(values_in(node.result))
    # Channels come in full blocks of 16, as CPUs compute them.
    first, second = (16 * -(-size // 16) for size in shapes[weight][:2])
    image = shapes[value] if node.args[6] else shapes[result]
    return CONVOLVED * 2 * shapes[value][0] * prod(image[2:]) * first * second * prod(shapes[weight][2:])


def _attention(node: Node, shapes: Shapes) -> float:
    query, key = node.args[:2]
    return FLOP * 4 * prod(shapes[query]) * shapes[key][-2]


def _recurrent(node: Node, shapes: Shapes) -> float:
    value, *weights = [*values_in(node.args)]
    return FLOP * 2 * prod(shapes[value][:-1]) * sum(prod(shapes[weight]) for weight in weights[:2])


_RULES: Mapping[str, Callable[[Node, Shapes], float]] = MappingProxyType(
    {
        **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot"), _product),
        "convolution": _convolution,
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "mkldnn_rnn_layer": _recurrent,
    }
)
# Operators that draw: how many times the bytes of their argument are written in the time.
_DRAWN: Mapping[str, int] = MappingProxyType({"bernoulli": 4, "multinomial": 9, "_standard_gamma": 20})
