r"""Predicts costs at other values of large sites, and laws of their children, from slopes and curvatures.

With ``g`` and ``H`` the first and second derivatives of the costs that read a site, a step of component ``d`` from its
value to ``v`` changes them by about

    g · δ + ½ δ · H δ,   δ = e_v - e_{x_d}.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.errors import BPQError, BPQWarning
from pyro_bpq.estimators.hindsight import Changes
from pyro_bpq.estimators.noise import signs
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.plan.held import HeldPlan
from pyro_bpq.record.recorded import Bound
from pyro_bpq.reruns.held_costs import joined
from pyro_bpq.reruns.slopes import expansions
from pyro_bpq.reruns.values import Values
from pyro_bpq.rollout.features import Components
from pyro_bpq.rollout.runs import Rollout

# Slopes and curvatures that add up; ``None`` where there are none.
Terms = list[tuple[Tensor | None, Tensor | None]]


@torch.no_grad()
def predicted_costs(
    plan: HeldPlan,
    graph: StochasticComputationGraph,
    values: Values,
    rollout: Rollout,
    generator: torch.Generator | None,
) -> dict[str, Changes]:
    """Predicts changes for the sites of which only some components are evaluated.

    Args:
        plan: The sites.
        graph: The graph.
        values: The recording, and the runs of the step.
        rollout: The tensors of these runs.
        generator: Source of random signs.

    Returns:
        The changes by site, ``(M, plates, D, K)``; zero where nothing is known. Of bits the changes of the other
        values, ``(M, plates, D)``.
    """
    found: dict[str, list[Changes]] = {name: [] for name, site in plan.sites.items() if site.is_drawn}
    nesting = rollout.plate_ndim + 1 if rollout.is_vectorized and rollout.num_particles > 1 else 0
    for traced, bound in zip(values.traced, values.bound, strict=True):
        terms = _terms(plan, bound, generator, nesting)
        for name, parts in found.items():
            record, split = traced.run.sites[name], plan.sites[name].components
            shape = (*rollout.run_shape(graph.node(name).plates), *split.table_shape)
            tables = (_table(split, record.value.detach(), record.fn, terms[name, side]) for side in Changes._fields)
            parts.append(Changes(*(table.nan_to_num_(0.0, 0.0, 0.0).expand(shape) for table in tables)))
    return {name: joined(parts) for name, parts in found.items()}


def _terms(
    plan: HeldPlan, bound: Bound, generator: torch.Generator | None, nesting: int
) -> dict[tuple[str, str], Terms]:
    """The derivatives by site and by the changes that they predict."""
    recorded, terms = bound.recorded, defaultdict[tuple[str, str], Terms](list)
    values = {name: bound.tensors[recorded.drawn[name].value] for name in plan.sites if name in plan.sloped}
    names = tuple(name for name, value in values.items() if value.is_floating_point())
    if not names:
        return terms
    blocks = tuple(s.cardinality if s.kind == "one_hot" else 1 for s in (plan.sites[n].components for n in names))
    groups = (*(group.costs for group in plan.groups), tuple(map(recorded.law, plan.laws)))
    try:
        found = expansions(
            bound, groups, names, lambda slopes: _signs(slopes, generator), blocks if plan.curved else None, nesting
        )
    except BPQError:
        raise
    except RuntimeError as error:
        warnings.warn(
            f"Sites {', '.join(map(repr, names))}: costs have no gradient in their values. Changes of costs that it "
            f"would predict are taken for zero: {error} Estimates stay unbiased, with more variance. Write z.detach() "
            "where a value is changed in place, or use CrossedLeaveOneOut() there.",
            BPQWarning,
            stacklevel=2,
        )
        return terms
    *of_costs, of_laws = found
    for name in names:
        terms[name, "law"].append(of_laws[name][1:])
        for group, own in zip(plan.groups, of_costs, strict=True):
            terms[name, "immediate" if name in group.immediate else "later"].append(own[name][1:])
            terms[name, "immediate" if name in group.own else "later"].append((own[name].own, None))
    return terms


def _signs(slopes: Sequence[Tensor], generator: torch.Generator | None) -> list[Tensor]:
    """Random signs for each slope."""
    assert generator is not None
    parts = signs(torch.cat([torch.zeros_like(one) for one in slopes]), generator).split([len(one) for one in slopes])
    return [part.to(slope.dtype) for part, slope in zip(parts, slopes, strict=True)]


def _table(split: Components, value: Tensor, fn: Any, terms: Terms) -> Tensor:
    """Changes ``(M, plates, D, K)``, of bits ``(M, plates, D)``, from derivatives at the drawn values."""
    slopes = [slope for slope, _ in terms if slope is not None]
    if not slopes:
        return value.new_zeros((), dtype=torch.get_default_dtype())
    slope, bent = sum(slopes[1:], slopes[0]), [curved for _, curved in terms if curved is not None]
    batch = value.shape[: value.dim() - split.value_ndim]
    if split.kind == "bernoulli":
        # The step of each bit to its other value.
        change = slope * (1.0 - 2.0 * value)
        return (change + 0.5 * sum(bent[1:], bent[0]) if bent else change).reshape(*batch, split.size)
    index, table = split.index(value, fn).unsqueeze(-1), slope.reshape(*batch, split.size, split.cardinality)
    table = table - table.gather(-1, index)
    if not bent:
        return table
    mixed = sum(bent[1:], bent[0]).expand(*value.shape, split.cardinality)
    mixed = mixed.reshape(*batch, split.size, split.cardinality, split.cardinality)
    own = mixed.diagonal(dim1=-2, dim2=-1)
    across = mixed.gather(-1, index.unsqueeze(-2).expand(*mixed.shape[:-1], 1)).squeeze(-1)
    return table + 0.5 * (own + own.gather(-1, index) - 2.0 * across)
