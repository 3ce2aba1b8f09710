r"""The loss of a program as a sum over all values of its sites, by messages along the guide.

    m_X(x) = Σ_u m_U(u) q(x | u),        U the site that the law of X reads
    L = Σ_X Σ_{u,x} m_U(u) q(x | u) log q(x | u) - Σ_X Σ_{w,x} q(w, x) log p(x | w) + Σ_C Σ_u m_U(u) c_C(u)

``m_X`` is the law of ``X``, ``w`` the value of the site that the model's law of ``X`` reads, and ``c_C`` is a cost of
no latent site, such as that of an observation. The sum is exact, and so is its gradient, also that of the guide:
nothing is drawn. Laws and costs are tables from one run, in whose row ``u`` every site has its value ``u``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.estimators import AllAction
from pyro_bpq.plan.sum_plan import SumPlan
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
    tables = _Tables(traced, plan, nesting)
    guide, model = traced.guide_trace.nodes, traced.model_trace.nodes
    # Pairs of a law and of what is to be averaged over it.
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, law in tables.laws(guide, plan.parents).items():
        parent = plan.parents[name]
        joint = law.exp() if parent is None else law.exp() * tables.marginals[parent]
        tables.joints[name], tables.marginals[name] = joint, joint.sum(1).unsqueeze(0)
        pairs.append((joint, tables.weighted(law, guide[name], parent)))
    for name, law in tables.laws(model, plan.priors).items():
        other = plan.priors[name]
        pairs.append((tables.pair(name, other), -tables.weighted(law, model[name], other)))
    costs = [(tables.cost(cost, other), other) for cost, other in plan.others.items()]
    pairs += [(tables.marginals[other], cost) for cost, other in costs if other is not None]
    found = [cost.sum() for cost, other in costs if other is None] + _averages(pairs)
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

    def laws(self, sites: Mapping[str, Any], others: Mapping[str, str | None]) -> dict[str, Tensor]:
        """Log-probabilities of sites, each given another or none: ``(values, values of the other or 1, plates)``."""
        found, alike = dict[str, Tensor](), dict[Any, dict[str, Tensor]]()
        for name, other in others.items():
            split, fn = self.plan.components[name], sites[name]["fn"]
            parameters = split.parameters(fn)
            if parameters.dim() - split.event_ndim == self.nesting:
                # Other rows are alike: plates have expanded them.
                parameters = parameters.narrow(0, 0, min(self._num_rows(other), len(parameters)))
            alike.setdefault((split, parameters.shape), {})[name] = parameters
        for (split, _), stacked in alike.items():
            # Of all sites that are alike at once: a step of a long program is mostly calls.
            law = split.log_probs(torch.stack([*stacked.values()])).squeeze(-2).movedim(-1, 1)
            found.update(zip(stacked, law.unbind(0), strict=True))
        plates = {
            name: sites[name]["fn"].batch_shape[-self.nesting + 1 :] if self.nesting > 1 else () for name in others
        }
        return {name: self._rows(found[name], other, 1, plates[name]) for name, other in others.items()}

    def weighted(self, law: Tensor, site: Any, other: str | None) -> Tensor:
        """Log-probabilities with the mask and the scale of their site."""
        mask, scale = full_mask(site), site["scale"]
        if isinstance(mask, Tensor):
            law = torch.where(self._rows(mask, other, 0), law, law.new_zeros(()))
        elif mask is False:
            law = torch.zeros_like(law)
        if isinstance(scale, Tensor):
            return law * self._rows(scale, other, 0)
        return law if scale == 1.0 else law * scale

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
        return self._rows(self.traced.run.costs[cost].unsqueeze(0), other, 1)

    def _num_rows(self, other: str | None) -> int:
        return 1 if other is None else self.plan.components[other].cardinality

    def _rows(self, table: Tensor, other: str | None, lead: int, plates: Sequence[int] | None = None) -> Tensor:
        """The rows of a table ``(lead, batch)`` that differ, all batch dimensions included."""
        missing = self.nesting - (table.dim() - lead)
        if missing:
            table = table.reshape(*table.shape[:lead], *(1,) * missing, *table.shape[lead:])
        if plates is not None and table.shape[lead + 1 :] != plates:
            table = table.expand(*table.shape[: lead + 1], *plates)
        rows = self._num_rows(other)
        return table if table.shape[lead] <= rows else table.narrow(lead, 0, rows)


def _averages(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The sum of tables over their laws, for all tables of a shape at once; what has no probability may be infinite."""
    alike = dict[Any, list[tuple[Tensor, Tensor]]]()
    for law, table in pairs:
        alike.setdefault((law.shape, table.shape), []).append((law, table))
    found = []
    for members in alike.values():
        law, table = (torch.stack(part) for part in zip(*members, strict=True))
        law, table = torch.broadcast_tensors(law, table)
        found.append((law * torch.where(law > 0.0, table, table.new_zeros(()))).sum())
    return found
