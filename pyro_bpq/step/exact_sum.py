r"""The loss of a program as a sum over all values of its sites, by messages along the guide.

    m_X(x) = Σ_u m_U(u) q(x | u),        U the site that the law of X reads
    L = Σ_X Σ_{u,x} m_U(u) q(x | u) log q(x | u) - Σ_X Σ_{w,x} q(w, x) log p(x | w) + Σ_C Σ_u m_U(u) c_C(u)

``m_X`` is the law of ``X``. ``w`` is the value of the site that the model's law of ``X`` reads. ``c_C`` is a cost that
belongs to no latent site, such as an observation. Nothing is drawn, so the sum and its gradient are exact. Laws and
costs are tables from one run, in whose row ``u`` every site has its value ``u``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.estimators.all_action import AllAction
from pyro_bpq.plan.sum_plan import SumPlan
from pyro_bpq.rollout.sums import common_type, in_single
from pyro_bpq.step.values import Step
from pyro_bpq.tracing.traced_run import TracedRun, full_mask

# Tables of up to so many elements are stacked, because a call takes longer than its computation.
SMALL = 4096


@dataclass(frozen=True, eq=False)
class ExactSum:
    """The summed loss of a step, a scalar in nats with gradient, and the sites that are summed over.

    ``num_zeros`` counts the entries of tables whose probability is zero. A step that is recorded does not look:
    ``is_finite`` is true, and ``num_zeros`` is 0.
    """

    loss: Tensor
    sites: tuple[str, ...]
    is_finite: bool = True
    num_zeros: int = 0


def exact_sum(traced: TracedRun, plan: SumPlan, nesting: int, is_recorded: bool) -> ExactSum:
    """Sums the loss of a run that has one row for each value.

    ``nesting`` is the number of batch dimensions. The leftmost of them holds the rows.
    """
    tables = _Tables(traced, plan, nesting)
    guide, model = traced.guide_trace.nodes, traced.model_trace.nodes
    priors = tables.laws(model, plan.priors)
    # Pairs of a law and a table to average over it.
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, law in tables.laws(guide, plan.parents).items():
        parent = plan.parents[name]
        joint = law.exp() if parent is None else law.exp() * tables.marginals[parent].unsqueeze(-1)
        tables.joints[name], tables.marginals[name] = joint, joint.sum(0).movedim(-1, 0)
        table = tables.weighted(law, guide[name], parent)
        if name in priors and plan.priors[name] == parent:
            table = table - tables.weighted(priors.pop(name), model[name], parent)
        pairs.append(_contracted(joint, table, guide[name]))
    for name, law in priors.items():
        other = plan.priors[name]
        pairs.append(_contracted(tables.pair(name, other), -tables.weighted(law, model[name], other), model[name]))
    costs = [(tables.rows(traced.run.costs[cost], other), other) for cost, other in plan.others.items()]
    pairs += [(tables.marginals[other], cost) for cost, other in costs if other is not None]
    averages, zeros = _averages(pairs, not is_recorded)
    found = [cost.sum() for cost, other in costs if other is None] + averages
    loss = sum(found[1:], found[0])
    if is_recorded:
        return ExactSum(loss, tuple(plan.components))
    number = in_single(loss.detach())
    # One read on the host.
    value, num_zeros = torch.stack([number, sum(zeros, number.new_zeros(()))]).tolist()
    return ExactSum(loss, tuple(plan.components), math.isfinite(value), int(num_zeros))


def sum_step(summed: ExactSum, is_learning: bool) -> Step:
    """The step of a summed loss; it counts as a training step if ``is_learning`` and if the loss is finite."""
    loss, build = summed.loss.detach(), is_learning and summed.is_finite
    info: dict[str, dict[str, Any]] = {name: {"estimator": AllAction()} for name in summed.sites} if build else {}
    return Step(loss, torch.zeros_like(loss), info=info, learns=build, paths=summed.loss)


@dataclass(frozen=True, eq=False)
class _Tables:
    """Tables over all values, from one run."""

    traced: TracedRun  # The run
    plan: SumPlan  # The sites that its laws and costs read
    nesting: int  # Number of batch dimensions
    # Joint law of each site and its parent, `(values of the parent or 1, plates, values)`
    joints: dict[str, Tensor] = field(default_factory=dict)
    marginals: dict[str, Tensor] = field(default_factory=dict)  # Law of each site, `(values, plates)`

    def laws(self, sites: Mapping[str, Any], others: Mapping[str, str | None]) -> dict[str, Tensor]:
        """Log-probabilities of sites, each given another or none: ``(values of the other or 1, plates, values)``."""
        found, alike = dict[str, Tensor](), dict[Any, dict[str, Tensor]]()
        for name, other in others.items():
            split = self.plan.components[name]
            parameters = split.parameters(sites[name]["fn"])
            if parameters.dim() - split.event_ndim == self.nesting:
                parameters = _unexpanded(parameters, self.num_rows(other), self.nesting)
            if parameters.numel() > SMALL:
                found[name] = split.log_probs(parameters).squeeze(-2)
            else:
                alike.setdefault((split, parameters.shape), {})[name] = parameters
        for (split, _), members in alike.items():
            law = split.log_probs(torch.stack([*members.values()])).squeeze(-2)
            found.update(zip(members, law.unbind(0), strict=True))
        return {name: self.rows(found[name], other, 1) for name, other in others.items()}

    def weighted(self, law: Tensor, site: Any, other: str | None) -> Tensor:
        """Log-probabilities, masked and scaled as their site."""
        mask, scale = full_mask(site), site["scale"]
        if isinstance(mask, Tensor):
            law = torch.where(self.rows(mask, other).unsqueeze(-1), law, law.new_zeros(()))
        elif mask is False:
            law = torch.zeros_like(law)
        if isinstance(scale, Tensor):
            return law * self.rows(scale, other).unsqueeze(-1)
        return law if scale == 1.0 else law * scale

    def pair(self, name: str, other: str | None) -> Tensor:
        """The joint law of a site and another, ``(values of the other or 1, plates, values)``."""
        own = self.marginals[name].movedim(0, -1).unsqueeze(0)
        if other is None:
            return own
        if other == self.plan.parents[name]:
            return self.joints[name]
        if self.plan.parents[other] == name:
            return self.joints[other].transpose(0, -1)
        return own * self.marginals[other].unsqueeze(-1)

    def num_rows(self, other: str | None) -> int:
        """Number of rows that differ: the number of values of the other site."""
        return 1 if other is None else self.plan.components[other].cardinality

    def rows(self, table: Tensor, other: str | None, event_ndim: int = 0) -> Tensor:
        """The rows of a table that differ, with all batch dimensions."""
        missing = self.nesting - (table.dim() - event_ndim)
        table = table.reshape(*(1,) * missing, *table.shape) if missing else table
        rows = self.num_rows(other)
        return table if table.shape[0] <= rows else table.narrow(0, 0, rows)


def _unexpanded(parameters: Tensor, rows: int, nesting: int) -> Tensor:
    """Parameters ``(rows, plates, event)`` without the rows and plates that only repeat others."""
    parameters = parameters.narrow(0, 0, min(rows, parameters.shape[0]))
    for dim in range(nesting):
        if parameters.stride(dim) == 0 and parameters.shape[dim] > 1:
            parameters = parameters.narrow(dim, 0, 1)
    return parameters


def _contracted(law: Tensor, table: Tensor, site: Any) -> tuple[Tensor, Tensor]:
    """A law, summed over those plate rows of a site in which a table does not vary, and the table."""
    # Of two sizes that broadcast, one is 1 or both are the same.
    sizes = zip(law.shape, table.shape, (1, *site["fn"].batch_shape[1:], 1), strict=True)
    whole = tuple(max(each) for each in sizes)
    if whole != law.shape:
        law = law.expand(whole)
    return law if whole == table.shape else law.sum_to_size(table.shape), table


def _averages(pairs: Sequence[tuple[Tensor, Tensor]], counts: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The expectations of tables under their laws, and numbers of zeros; small tables of a shape share a call."""
    found, alike = list[tuple[Tensor, Tensor]](), dict[Any, list[tuple[Tensor, Tensor]]]()
    for law, table in pairs:
        dtype = common_type(law, table)
        law, table = torch.broadcast_tensors(law.to(dtype), table.to(dtype))
        if law.numel() > SMALL:
            found.append((law, table))
        else:
            alike.setdefault((law.shape, dtype), []).append((law, table))
    for members in alike.values():
        laws, tables = zip(*members, strict=True)
        found.append((torch.stack(laws), torch.stack(tables)))
    zeros = [(law.detach() <= 0.0).sum() for law, _ in found] if counts else []
    return [_average(law, table) for law, table in found], zeros


def _average(law: Tensor, table: Tensor) -> Tensor:
    """The expectation of a table under a law; the table may be infinite where the law is zero."""
    return torch.dot(law.reshape(-1), torch.where(law > 0.0, table, table.new_zeros(())).reshape(-1))
