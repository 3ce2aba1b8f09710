r"""Predicts costs at other values of large sites, and laws of their children, from slopes and curvatures.

The drawn values carry gradients: in the step's own run where it has leaves, else in another run of guide and model.
With ``g`` and ``H`` the first and second derivatives of the costs that read a site, a step of component ``d`` from its
value to ``v`` changes them by about

    g · δ + ½ δ · H δ,   δ = e_v - e_{x_d}.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pyro
import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_bpq.errors import BPQError, BPQWarning
from pyro_bpq.estimators.hindsight import Changes
from pyro_bpq.plan.held import has_slopes
from pyro_bpq.reruns.expansions import expansions
from pyro_bpq.reruns.flipped_costs import trace_at
from pyro_bpq.reruns.held_costs import HeldRun, joined, law_name, law_of, unmasked
from pyro_bpq.rollout.features import Components
from pyro_bpq.rollout.runs import Program, Rollout
from pyro_bpq.tracing.config import cost_options
from pyro_bpq.tracing.linear_reads import LinearRead, LinearReads
from pyro_bpq.tracing.sandbox import Sandbox
from pyro_bpq.tracing.traced_run import TracedRun, cost_of_site
from pyro_bpq.tracing.watch import samples

# Slope and curvature of a function in the value of a site; curvature None where it is not known.
Expansion = tuple[Tensor, Tensor | None]
# Those of the children's laws, of the costs that read a site downstream, and of immediate costs, by site.
Expansions = tuple[dict[str, Expansion], dict[str, Expansion], dict[str, Expansion]]


def predicted_costs(
    run: HeldRun,
    traced: Sequence[TracedRun],
    programs: Sequence[Program],
    rollout: Rollout,
    generator: torch.Generator | None,
) -> dict[str, Changes]:
    """Predicts changes for the sites of which only some components are evaluated.

    Args:
        run: The extra run.
        traced: The runs of the step.
        programs: Model, guide and arguments of each.
        rollout: The tensors of these runs.
        generator: Source of random signs.

    Returns:
        The changes by site, ``(M, plates, D, K)``, without those of the site's own log-probabilities; zero where
        nothing is known. Of bits the changes of the other values, ``(M, plates, D)``.
    """
    parts: dict[str, list[Changes]] = {n: [] for n, site in run.plan.sites.items() if site.is_drawn}
    many = rollout.is_vectorized and rollout.num_particles > 1
    for one, program in zip(traced, programs, strict=True):
        expansions = _expansions(run, one, program, generator, rollout.plate_ndim + 1 if many else None)
        for name in parts:
            shape = rollout.run_shape(run.graph.node(name).plates)
            split, record = run.plan.sites[name].components, one.run.sites[name]
            value = record.value.detach()
            if split.kind == "bernoulli":
                step = _step(split, value)
                tables = [_table_of_bits(step, found.get(name), shape) for found in expansions]
            else:
                index = split.index(value, record.fn)
                tables = [_table(split, index, found.get(name), shape) for found in expansions]
            parts[name].append(Changes(*tables))
    return {name: joined(found) for name, found in parts.items()}


def _expansions(
    run: HeldRun, traced: TracedRun, program: Program, generator: torch.Generator | None, nesting: int | None
) -> Expansions:
    """Expansions by site; empty where the program has no gradients."""
    sites = traced.run.sites
    names = [n for n, site in run.plan.sites.items() if site.is_drawn and has_slopes(site.components)]
    names = [name for name in names if sites[name].value.is_floating_point()]
    if not names or traced.elimination is not None:
        return {}, {}, {}
    own = {name: leaf for name in names if (leaf := sites[name].leaf) is not None}
    try:
        with pyro.validation_enabled(False), torch.enable_grad():
            if len(own) == len(names):
                pair = traced.guide_trace, None if traced.only_costs else traced.model_trace
                return _expanded(run, traced, pair, own, traced.maps, generator, nesting)
            leaves = {name: sites[name].value.detach().clone().requires_grad_() for name in names}
            with Sandbox(traced.rng[0], run.has_buffers):
                pair, maps = _run_again(traced, program, leaves)
                return _expanded(run, traced, pair, leaves, maps, generator, nesting)
    except BPQError:
        raise
    except RuntimeError as error:
        warnings.warn(
            f"Sites {', '.join(map(repr, names))}: the program failed while their values carried gradients. Predicted "
            f"changes of its costs are taken for zero: {error} Estimates stay unbiased, with more variance. Write "
            "z.detach() where a value leaves torch, or use CrossedLeaveOneOut() there.",
            BPQWarning,
            stacklevel=2,
        )
        return {}, {}, {}


def _run_again(
    traced: TracedRun, program: Program, leaves: Mapping[str, Tensor]
) -> tuple[tuple[Any, Any], tuple[LinearRead, ...]]:
    """The traces of guide and model at leaves, and the linear maps that read these."""
    model, guide, args, kwargs = program
    values: dict[str, Any] = {name: record.value.detach() for name, record in traced.run.sites.items()}
    values |= {name: leaf.clone() for name, leaf in leaves.items()}
    values |= traced.subsamples
    with LinearReads(leaves) as reads:
        first = trace_at(values, guide, args, kwargs)
        second = None if traced.only_costs else trace_at(values, model, args, kwargs)
    return (first, second), tuple(reads.found)


def _expanded(
    run: HeldRun,
    traced: TracedRun,
    traces: tuple[Any, Any],
    leaves: Mapping[str, Tensor],
    maps: Sequence[LinearRead],
    generator: torch.Generator | None,
    nesting: int | None,
) -> Expansions:
    of_model, of_guide, laws = _totals(run, traced, traces)
    maps = maps if any(run.plan.sites[name].curvature for name in leaves) else ()
    blocks = {n: s.components.cardinality for n, s in run.plan.sites.items() if s.components.kind == "one_hot"}

    def expansion(total: Tensor | None) -> dict[str, Expansion]:
        if total is None or not total.requires_grad:
            return {}
        slopes, bent = expansions(total, maps, leaves, blocks, generator, nesting)
        return {name: (slope, bent.get(name)) for name, slope in slopes.items()}

    found = expansion(laws)
    later: dict[str, Expansion] = dict(found if of_guide is laws else expansion(of_guide))
    immediate: dict[str, Expansion] = {}
    for group, total in zip(run.plan.groups, of_model, strict=True):
        for name, part in expansion(total).items():
            side = immediate if name in group.immediate else later
            if name in side:
                (slope, bent), (more, bent_more) = side[name], part
                part = slope + more, _total([curved for curved in (bent, bent_more) if curved is not None])
            side[name] = part
    return found, later, immediate


def _totals(
    run: HeldRun, traced: TracedRun, traces: tuple[Any, Any]
) -> tuple[list[Tensor | None], Tensor | None, Tensor | None]:
    """The sums of the model's costs by group, of the guide's, and of the children's laws, as functions of the leaves.

    A site's own log-probability takes its plain value: at other values it is known.
    """
    drawn = [site for site in run.plan.sites.values() if site.is_drawn]
    wanted = {cost for site in drawn for cost in site.costs}
    children = {child for site in drawn for child in site.children}
    first, second = traces
    costs: list[Tensor] = []
    laws: list[Tensor] = []
    for name, site in samples(first).items():
        if cost_of_site(site, True) in wanted:
            costs.append((1.0 if cost_options(site) is None else -1.0) * _log_prob(site))
        if name in children:
            is_cost = law_name(traced, name) != law_of(name)
            laws.append(costs[-1] if is_cost else unmasked(site["fn"]).log_prob(_plain(site)).sum())
    of_model = {cost_of_site(site, False): site for site in ({} if second is None else samples(second)).values()}
    groups = [_total([-_log_prob(of_model[cost]) for cost in g.costs if cost in of_model]) for g in run.plan.groups]
    of_guide = _total(costs)
    are_laws = all(law_name(traced, child) != law_of(child) for child in children)
    are_laws &= not any(site["is_observed"] and cost_of_site(site, True) in wanted for site in samples(first).values())
    # The log-probability of a site that is nobody's child has no gradient to the leaves.
    return groups, of_guide, of_guide if are_laws and children else _total(laws)


def _log_prob(site: Any) -> Tensor:
    """The sum of the log-probabilities of a site, which the step's own run has."""
    if "log_prob_sum" in site:
        return site["log_prob_sum"]
    return scale_and_mask(site["fn"].log_prob(_plain(site)), site["scale"], site["mask"]).sum()


def _plain(site: Any) -> Any:
    value = site["value"]
    return value.detach() if isinstance(value, Tensor) else value


def _total(terms: Sequence[Tensor]) -> Tensor | None:
    return sum(terms[1:], terms[0]) if terms else None


def _step(split: Components, value: Tensor) -> Tensor:
    """The step of each bit to its other value, ``(batch, D)``."""
    return (1.0 - 2.0 * value).reshape(*value.shape[: value.dim() - split.value_ndim], split.size)


def _table_of_bits(step: Tensor, found: Expansion | None, shape: tuple[int, ...]) -> Tensor:
    """Changes ``(M, plates, D)`` of the other values from an expansion at the drawn ones."""
    if found is None:
        return _spread(step.new_zeros(()).expand_as(step), shape, 1)
    slope, bent = found
    table = slope.reshape(step.shape) * step
    if bent is not None:
        lead = step.shape if bent.shape == slope.shape else (1, *step.shape[1:])
        table = table.add_(bent.reshape(lead), alpha=0.5)
    return _spread(table.nan_to_num_(0.0, 0.0, 0.0), shape, 1)


def _table(split: Components, index: Tensor, found: Expansion | None, shape: tuple[int, ...]) -> Tensor:
    """Changes ``(M, plates, D, K)`` from an expansion at the drawn values."""
    size, cardinality, batch, at = split.size, split.cardinality, index.shape[:-1], index.unsqueeze(-1)
    if found is None:
        return torch.zeros((), device=index.device).expand(*shape, size, cardinality)
    slope, bent = found
    table = slope.reshape(*batch, size, cardinality)
    table = table - table.gather(-1, at)
    if bent is not None:
        mixed = bent.expand(*slope.shape, cardinality).reshape(*batch, size, cardinality, cardinality)
        own = mixed.diagonal(dim1=-2, dim2=-1)
        across = mixed.gather(-1, at.unsqueeze(-2).expand(*mixed.shape[:-1], 1)).squeeze(-1)
        table = table + 0.5 * (own + own.gather(-1, at) - 2.0 * across)
    return _spread(table.nan_to_num_(0.0, 0.0, 0.0), shape, 2)


def _spread(table: Tensor, shape: tuple[int, ...], ndim: int) -> Tensor:
    """A table with ``ndim`` last dimensions at all places of ``shape``."""
    missing = len(shape) + ndim - table.dim()
    return table.reshape(*(1,) * missing, *table.shape).expand(*shape, *table.shape[-ndim:])
