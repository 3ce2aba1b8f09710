r"""The loss of a program as a sum over all values of its sites, by messages along the guide.

    m_X(x) = Σ_u m_U(u) q(x | u),        U the site that the law of X reads
    L = Σ_X Σ_{u,x} m_U(u) q(x | u) log q(x | u) - Σ_X Σ_{w,x} q(w, x) log p(x | w) + Σ_C Σ_u m_U(u) c_C(u)

``m_X`` is the law of ``X``, ``w`` the value of the site that the model's law of ``X`` reads, and ``c_C`` is a cost of
no latent site, such as that of an observation. The sum is exact, and so is its gradient, also that of the guide:
nothing is drawn. Laws and costs are tables from one run, in whose row ``u`` every site has its value ``u``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.estimators import AllAction
from pyro_bpq.plan.sum_plan import SumPlan
from pyro_bpq.rollout.features import Components
from pyro_bpq.step.surrogate import Step
from pyro_bpq.tracing.traced_run import TracedRun, full_mask


@dataclass(frozen=True, eq=False)
class ExactSum:
    """The summed loss of a step.

    Args:
        loss: The loss in nats, a scalar with the gradient.
        sites: The sites that are summed over.
        is_finite: Whether the loss is finite; ``True`` in a step that is recorded.
    """

    loss: Tensor
    sites: tuple[str, ...]
    is_finite: bool = True


def exact_sum(traced: TracedRun, plan: SumPlan, nesting: int, is_recorded: bool = False) -> ExactSum:
    """Sums the loss of a run that has one row for each value.

    Args:
        traced: The run.
        plan: What its laws and costs read.
        nesting: Number of batch dimensions, that of the rows included, which is the leftmost.
        is_recorded: Whether operators of the step are recorded.
    """
    tables, found = _Tables(traced, plan, nesting), []
    guide, model = traced.guide_trace.nodes, traced.model_trace.nodes
    for name, split in plan.components.items():
        parent = plan.parents[name]
        law = tables.law(guide[name], split, parent)
        joint = law.exp() if parent is None else law.exp() * tables.marginals[parent]
        tables.joints[name], tables.marginals[name] = joint, joint.sum(1).unsqueeze(0)
        found.append(_expected(joint, _weighted(law, guide[name], tables.rows(parent), nesting)))
    for name, other in plan.priors.items():
        law = tables.law(model[name], plan.components[name], other)
        found.append(_expected(tables.pair(name, other), -_weighted(law, model[name], tables.rows(other), nesting)))
    for cost, other in plan.others.items():
        table = tables.cost(cost, other)
        found.append(table.sum() if other is None else _expected(tables.marginals[other], table))
    loss = sum(found[1:], found[0])
    return ExactSum(loss, tuple(plan.components), is_recorded or bool(torch.isfinite(loss.detach())))


def sum_step(summed: ExactSum, is_learning: bool) -> Step:
    """The step of a summed loss: its gradient is that of the loss, and there is nothing to learn but the step's number.

    Args:
        summed: The loss.
        is_learning: Whether the step counts, unless the loss is not finite.
    """
    loss, build = summed.loss.detach(), is_learning and summed.is_finite
    info: dict[str, dict[str, Any]] = {name: {"estimator": AllAction()} for name in summed.sites} if build else {}
    return Step(loss, torch.zeros_like(loss), info=info, learns=build, paths=summed.loss)


@dataclass(frozen=True, eq=False)
class _Tables:
    """What a run tells of all values.

    Args:
        traced: The run.
        plan: What its laws and costs read.
        nesting: Number of batch dimensions.
        joints: Law of each site so far and of its parent, ``(values, values of the parent or 1, plates)``.
        marginals: Law of each site so far, ``(1, values, plates)``.
    """

    traced: TracedRun
    plan: SumPlan
    nesting: int
    joints: dict[str, Tensor] = field(default_factory=dict)
    marginals: dict[str, Tensor] = field(default_factory=dict)

    def rows(self, other: str | None) -> int:
        """The rows that differ."""
        return 1 if other is None else self.plan.components[other].cardinality

    def law(self, site: Any, split: Components, other: str | None) -> Tensor:
        """Log-probabilities of a site, given another or none: ``(values, values of the other or 1, plates)``."""
        fn = site["fn"]
        found = split.log_probs(split.parameters(fn)).squeeze(-2).movedim(-1, 0)
        found = found.expand(split.cardinality, *fn.batch_shape)
        return _rows(found, self.rows(other), 1, self.nesting)

    def pair(self, name: str, other: str | None) -> Tensor:
        """The joint law of a site and another, ``(values, values of the other or 1, plates)``."""
        own = self.marginals[name].transpose(0, 1)
        if other is None:
            return own
        if other == self.plan.parents[name]:
            return self.joints[name]
        if self.plan.parents[other] == name:
            return self.joints[other].transpose(0, 1)
        return own * self.marginals[other]

    def cost(self, cost: str, other: str | None) -> Tensor:
        """A cost at the values of the site that it reads, ``(1, values or 1, plates)``."""
        found = self.traced.run.costs[cost]
        return _rows(found.unsqueeze(0), self.rows(other), 1, self.nesting)


def _rows(table: Tensor, rows: int, lead: int, nesting: int) -> Tensor:
    """The first rows of a table ``(lead, batch)``, all batch dimensions included."""
    missing = nesting - (table.dim() - lead)
    table = table.reshape(*table.shape[:lead], *(1,) * missing, *table.shape[lead:]) if missing else table
    return table.narrow(lead, 0, min(rows, table.shape[lead]))


def _weighted(table: Tensor, site: Any, rows: int, nesting: int) -> Tensor:
    """Log-probabilities with the mask and the scale of their site."""
    mask, scale = full_mask(site), site["scale"]
    if isinstance(mask, Tensor):
        table = torch.where(_rows(mask, rows, 0, nesting), table, torch.zeros_like(table[:1, :1]))
    elif mask is False:
        table = torch.zeros_like(table)
    return table * (_rows(scale, rows, 0, nesting) if isinstance(scale, Tensor) else scale)


def _expected(law: Tensor, table: Tensor) -> Tensor:
    """The mean of a table; where nothing is likely, it may be infinite."""
    law, table = torch.broadcast_tensors(law, table)
    return (law * torch.where(law > 0.0, table, torch.zeros_like(table))).sum()
