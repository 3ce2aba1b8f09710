r"""Predicts costs at other values of large sites, and laws of their children, from slopes and curvatures.

The drawn values carry gradients in the step's own run; in the first step of a program they do not, and nothing is
predicted. With ``g`` and ``H`` the first and second derivatives of the costs that read a site, a step of component
``d`` from its value to ``v`` changes them by about

    g · δ + ½ δ · H δ,   δ = e_v - e_{x_d}.

Curvatures follow from squared weights. If ``h = W u + b`` reads a value and a cost is a sum over the entries of ``h``,
the cost's second derivative in entry ``d`` of ``u`` is

    Σ_j W_jd² ∂²cost/∂h_j².

Otherwise the second derivatives in ``h`` are probed by one random vector of signs, which neglects those in two entries.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyro
import torch
from torch import Tensor

from pyro_bpq.errors import BPQError, BPQWarning
from pyro_bpq.estimators.hindsight import Changes
from pyro_bpq.estimators.noise import signs
from pyro_bpq.graph.scg import StochasticComputationGraph, cost_of_guide
from pyro_bpq.plan.held import HeldPlan
from pyro_bpq.reruns.held_costs import joined, unmasked
from pyro_bpq.reruns.values import Values
from pyro_bpq.rollout.features import Components
from pyro_bpq.rollout.runs import Rollout
from pyro_bpq.tracing.config import cost_options
from pyro_bpq.tracing.linear_reads import LinearRead
from pyro_bpq.tracing.traced_run import TracedRun, cost_of_site
from pyro_bpq.tracing.watch import samples

# Slope and curvature of a function in the value of a site; curvature None where it is not known.
Expansion = tuple[Tensor, Tensor | None]
# Those of the children's laws, of the costs that read a site downstream, and of immediate costs, by site.
Expansions = tuple[dict[str, Expansion], dict[str, Expansion], dict[str, Expansion]]


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
        The changes by site, ``(M, plates, D, K)``, without those of the site's own log-probabilities; zero where
        nothing is known. Of bits the changes of the other values, ``(M, plates, D)``.
    """
    parts: dict[str, list[Changes]] = {n: [] for n, site in plan.sites.items() if site.is_drawn}
    many = rollout.is_vectorized and rollout.num_particles > 1
    for one in values.traced:
        expansions = _expansions(plan, one, generator, rollout.plate_ndim + 1 if many else None)
        for name in parts:
            shape = rollout.run_shape(graph.node(name).plates)
            split, record = plan.sites[name].components, one.run.sites[name]
            value, has_bits = record.value.detach(), split.kind == "bernoulli"
            if has_bits:
                # The step of each bit to its other value.
                at = (1.0 - 2.0 * value).reshape(*value.shape[: value.dim() - split.value_ndim], split.size)
            else:
                at = split.index(value, record.fn)
            size = (split.size,) if has_bits else (split.size, split.cardinality)
            tables = []
            for found in expansions:
                table = torch.zeros((), device=value.device)
                if name in found:
                    table = _table_of_bits(at, *found[name]) if has_bits else _table(split, at, *found[name])
                tables.append(table.nan_to_num_(0.0, 0.0, 0.0).expand(*shape, *size))
            parts[name].append(Changes(*tables))
    return {name: joined(found) for name, found in parts.items()}


def _expansions(
    plan: HeldPlan, traced: TracedRun, generator: torch.Generator | None, nesting: int | None
) -> Expansions:
    """Expansions by site; empty where the program has no gradients."""
    sites = traced.run.sites
    names = [name for name in plan.sites if name in plan.sloped and sites[name].value.is_floating_point()]
    own = {name: leaf for name in names if (leaf := sites[name].leaf) is not None}
    if not names or len(own) < len(names):
        return {}, {}, {}
    blocks = {n: s.components.cardinality for n, s in plan.sites.items() if s.components.kind == "one_hot"}
    curves = any(plan.sites[name].curvature for name in names)
    try:
        with pyro.validation_enabled(False), torch.enable_grad():
            return _expanded(plan, traced, Leaves(own, traced.maps if curves else (), blocks, generator, nesting))
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


def _expanded(plan: HeldPlan, traced: TracedRun, leaves: Leaves) -> Expansions:
    of_model, of_guide, laws = _totals(plan, traced)
    found = leaves.expansion(laws)
    later = dict(found if of_guide is laws else leaves.expansion(of_guide))
    immediate: dict[str, Expansion] = {}
    for group, total in zip(plan.groups, of_model, strict=True):
        for name, part in leaves.expansion(total).items():
            side = immediate if name in group.immediate else later
            if name in side:
                (slope, bent), (more, bent_more) = side[name], part
                part = slope + more, _total([curved for curved in (bent, bent_more) if curved is not None])
            side[name] = part
    return found, later, immediate


def _totals(plan: HeldPlan, traced: TracedRun) -> tuple[list[Tensor | None], Tensor | None, Tensor | None]:
    """The sums of the model's costs by group, of the guide's, and of the children's laws, as functions of the leaves.

    A site's own log-probability takes its plain value: at other values it is known.
    """
    drawn = [site for site in plan.sites.values() if site.is_drawn]
    wanted = {cost for site in drawn for cost in site.costs}
    children = {child for site in drawn for child in site.children}
    first = traced.guide_trace
    costs: list[Tensor] = []
    laws: list[Tensor] = []
    for name, site in samples(first).items():
        if cost_of_site(site, True) in wanted:
            costs.append((1.0 if cost_options(site) is None else -1.0) * site["log_prob_sum"])
        if name in children:
            laws.append(
                costs[-1] if _is_law(traced, name) else unmasked(site["fn"]).log_prob(site["value"].detach()).sum()
            )
    of_model = {cost_of_site(site, False): -site["log_prob_sum"] for site in samples(traced.model_trace).values()}
    groups = [_total([of_model[cost] for cost in group.costs if cost in of_model]) for group in plan.groups]
    of_guide = _total(costs)
    are_laws = all(_is_law(traced, child) for child in children)
    are_laws &= not any(site["is_observed"] and cost_of_site(site, True) in wanted for site in samples(first).values())
    # The log-probability of a site that is nobody's child has no gradient to the leaves.
    return groups, of_guide, of_guide if are_laws and children else _total(laws)


def _is_law(traced: TracedRun, child: str) -> bool:
    """Whether the cost of a site is the log-probability of its value, neither scaled nor masked."""
    record = traced.run.sites[child]
    is_plain = isinstance(record.scale, float) and record.scale == 1.0 and record.mask is None
    return is_plain and cost_of_guide(child) in traced.run.costs and not traced.only_costs


def _total(terms: Sequence[Tensor]) -> Tensor | None:
    return sum(terms[1:], terms[0]) if terms else None


def _table_of_bits(step: Tensor, slope: Tensor, bent: Tensor | None) -> Tensor:
    """Changes ``(M, plates, D)`` of the other values from an expansion at the drawn ones."""
    table = slope.reshape(step.shape) * step
    if bent is None:
        return table
    lead = step.shape if bent.shape == slope.shape else (1, *step.shape[1:])
    return table.add_(bent.reshape(lead), alpha=0.5)


def _table(split: Components, index: Tensor, slope: Tensor, bent: Tensor | None) -> Tensor:
    """Changes ``(M, plates, D, K)`` from an expansion at the drawn values."""
    size, cardinality, batch, at = split.size, split.cardinality, index.shape[:-1], index.unsqueeze(-1)
    table = slope.reshape(*batch, size, cardinality)
    table = table - table.gather(-1, at)
    if bent is None:
        return table
    mixed = bent.expand(*slope.shape, cardinality).reshape(*batch, size, cardinality, cardinality)
    own = mixed.diagonal(dim1=-2, dim2=-1)
    across = mixed.gather(-1, at.unsqueeze(-2).expand(*mixed.shape[:-1], 1)).squeeze(-1)
    return table + 0.5 * (own + own.gather(-1, at) - 2.0 * across)


@dataclass(frozen=True)
class Leaves:
    """Where costs are expanded.

    Args:
        values: The leaves by name.
        reads: The linear maps that read them.
        blocks: For some leaves the size ``K`` of the blocks within which mixed derivatives are found too; for the
            others the derivatives lie on the diagonal.
        generator: Draws the signs.
        nesting: Second derivatives are averaged over the leftmost of so many batch dimensions; ``None`` for no average.
    """

    values: Mapping[str, Tensor]
    reads: Sequence[LinearRead]
    blocks: Mapping[str, int]
    generator: torch.Generator | None
    nesting: int | None

    def expansion(self, total: Tensor | None) -> dict[str, Expansion]:
        """First and second derivatives of a sum of costs in the entries of leaves.

        Second ones are found as far as linear maps read the leaves. They may lack the size of the particles, and have
        another dimension ``K`` for mixed derivatives. Leaves that nothing reads are left out.
        """
        if total is None or not total.requires_grad:
            return {}
        asked = [*self.values.values(), *(read.output for read in self.reads)]
        first = torch.autograd.grad(total, asked, create_graph=bool(self.reads), allow_unused=True, retain_graph=True)
        bent = self._curvatures(first[len(self.values) :])
        slopes = zip(self.values, first, strict=False)
        return {name: (slope.detach(), bent.get(name)) for name, slope in slopes if slope is not None}

    def _curvatures(self, first: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Second derivatives in leaves, from first derivatives in the outputs of linear maps."""
        pairs = zip(self.reads, first, strict=True)
        known = [(read, slope) for read, slope in pairs if slope is not None and slope.requires_grad]
        if not known:
            return {}
        outputs, slopes = [read.output for read, _ in known], [slope for _, slope in known]
        drawn = _signs(slopes, self.generator)
        probes = [sign.expand_as(slope) for sign, slope in zip(drawn, slopes, strict=True)]
        second = torch.autograd.grad(slopes, outputs, probes, allow_unused=True, retain_graph=True)
        found: dict[str, Tensor] = {}
        for (read, _), sign, bent in zip(known, drawn, second, strict=True):
            if bent is None:
                continue
            curved = bent.detach()
            if self.nesting is not None and read.scale is not None and curved.dim() == self.nesting + 1:
                # Each particle's own would be hardly better, and takes a product of matrices for each.
                curved = curved.mean(0, keepdim=True)
            curved = sign * curved
            curved = curved if curved.shape[-1:] == read.weight.shape[:1] else curved.unsqueeze(-1)
            for name in read.leaves:
                part = _in_leaf(read, curved, self.values[name], self.blocks.get(name))
                if part is not None:
                    found[name] = found[name] + part if name in found else part
        return found


def _signs(slopes: Sequence[Tensor], generator: torch.Generator | None) -> list[Tensor]:
    """Random signs for each slope, the same for all of its rows."""
    assert generator is not None
    sizes = [slope.shape[-1] if slope.dim() else 1 for slope in slopes]
    parts = signs(slopes[0].new_empty(sum(sizes)), generator).split(sizes)
    return [part.reshape(slope.shape[-1:]).to(slope.dtype) for part, slope in zip(parts, slopes, strict=True)]


def _in_leaf(read: LinearRead, curved: Tensor, leaf: Tensor, block: int | None) -> Tensor | None:
    """From second derivatives in the output of a map to those in a leaf."""
    if block is not None:
        if read.scale is None:
            return None
        weight = (read.scale * read.weight).reshape(len(read.weight), -1, block)
        mixed = (weight.unsqueeze(-1) * weight.unsqueeze(-2)).flatten(1)
        return _shaped(curved @ mixed, (*leaf.shape, block))
    if read.scale is not None:
        return _shaped((curved @ read.weight.square()) * read.scale.square(), leaf.shape)
    squared = curved @ read.weight.square()
    # Each entry of the source reads at most one entry of the leaf, with a slope that enters squared.
    outer = torch.zeros_like(read.source, requires_grad=True)
    (back,) = torch.autograd.grad(read.source, leaf, outer, create_graph=True)
    (slope,) = torch.autograd.grad(back, outer, torch.ones_like(leaf))
    (found,) = torch.autograd.grad(read.source, leaf, squared * slope, retain_graph=True)
    return found


def _shaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor in the shape of a leaf; averages keep a first dimension of one."""
    return tensor.reshape(shape) if tensor.numel() == math.prod(shape) else tensor.reshape(1, *shape[1:])
