"""Stacked costs: the cost-to-go of a class of sites, and crossed costs, those given another particle's past.

Leave-one-out subtracts the cost-to-go of particle ``j``, which has another past than particle ``i``. A closer baseline
is the cost of the values of ``j``, from the site on, given the past of ``i``. A log-probability is known for such a
pair without another run if its law reads only the past, ``log p(y_j | parents_i)``, or if its value lies in the past
and its law reads nothing of the past, ``log p(y_i | parents_j)``. The values of ``i`` that enter do not depend on the
site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_bpq.batching.classes import CrossedCosts, Relation
from pyro_bpq.batching.layout import Layout
from pyro_bpq.rollout.runs import Rollout, Run, SiteRecord, sum_to_plates
from pyro_bpq.rollout.sums import in_single

# Least log-probability of a component's value in crossed costs, in nats.
_LEAST = -100.0
# Sites whose values have so many elements get a call each, because copies would take longer than calls.
_LARGE = 1 << 14


def stack_costs(layout: Layout, rollout: Rollout) -> list[Tensor]:
    """Stacks the costs of a rollout per class of costs, ``(costs, M, plates)`` each, detached.

    They are in nats, and in single precision at least: their squares overflow in half precision.
    """
    return [
        rollout.stack(lambda run, name: in_single(run.costs[name].detach()), cls.names, cls.plates)
        for cls in layout.cost_classes
    ]


def sum_costs(layout: Layout, costs: Sequence[Tensor], kind: Relation, c: int) -> Tensor | None:
    """Sums, for each site of class ``c``, the costs ``DOWNSTREAM``, ``CROSSING`` or ``TABLED``.

    The sums broadcast to ``(G, M, plates)``. ``None`` if there is no such cost.
    """
    total, plates = None, () if kind is Relation.CROSSING else layout.classes[c].spec.plates
    for k, (cls, stacked) in enumerate(zip(layout.cost_classes, costs, strict=True)):
        selected = layout.matrix(kind, c, k, stacked)
        if selected is not None:
            term = selected @ sum_to_plates(stacked, cls.plates, plates)
            total = term if total is None else total + term
    return total


def cost_to_go(layout: Layout, costs: Sequence[Tensor], c: int, like: Tensor) -> Tensor:
    """The cost-to-go ``C_X`` of every site of a class, shaped like ``like``, ``(G, M, plates)``, in nats."""
    total = torch.zeros_like(like)
    for kind in (Relation.DOWNSTREAM, Relation.CROSSING):
        term = sum_costs(layout, costs, kind, c)
        total = total if term is None else total + term
    return total


def component_cost_to_go(layout: Layout, rollout: Rollout, c: int, joint: Tensor) -> Tensor:
    """The cost-to-go of each component, ``(G, M, plates, D)``, in nats.

    It is the part ``joint``, ``(G, M, plates)``, that all components of a site share, and the costs that the sites of
    the rollout charge to single components.
    """
    cls = layout.classes[c]

    def own(run: Run, name: str) -> Tensor:
        charged = run.sites[name].charged
        assert charged is not None
        return charged

    return joint.unsqueeze(-1) + rollout.stack(own, cls.names, cls.spec.plates, 1)


@torch.no_grad()
def crossed_costs(group: CrossedCosts, rollout: Rollout, costs: Sequence[Tensor]) -> Tensor:
    """Change of each cost given another particle's past, averaged over the other particles.

    A change is the cost given particle ``i``'s past minus the cost of particle ``j``, averaged over ``j``. The result
    holds the changes under the own law, then those at the own value, ``(2 costs, M, plates)`` in nats.
    """
    own, names = group.pick(costs), list(group.sites)
    size = rollout.runs[0].sites[group.sites[names[0]][0]].value.numel()
    parts = [names] if size < _LARGE else [[name] for name in names]
    pairs = torch.cat([_pairs(group, rollout, part, own) for part in parts])
    change = torch.cat((pairs, pairs.transpose(1, 2))) - torch.cat((own, own)).unsqueeze(1)
    itself = torch.eye(rollout.num_particles, dtype=torch.bool, device=own.device)
    itself = itself.reshape(*itself.shape, *(1,) * (own.dim() - 2))
    return change.masked_fill(itself, 0.0).sum(2) / (rollout.num_particles - 1)


def _pairs(group: CrossedCosts, rollout: Rollout, names: Sequence[str], like: Tensor) -> Tensor:
    """Costs under the law of particle ``i`` at the value of particle ``j``, ``(costs, i, j, plates)``.

    They are linear in an encoded value, so one matrix product gives all pairs. Particle ``i``'s own value must not
    enter the result, not even through rounding.
    """
    components = group.components

    def stack(pick: Callable[[SiteRecord, bool], Tensor], event_ndim: int) -> Tensor:
        def from_run(run: Run, name: str) -> Tensor:
            site, of_guide = group.sites[name]
            return pick(run.sites[site], of_guide)

        return rollout.stack(from_run, names, group.cls.plates, event_ndim)

    def law(site: SiteRecord, of_guide: bool) -> Tensor:
        return components.parameters(site.fn if of_guide else site.prior)

    def weight(site: SiteRecord, of_guide: bool) -> Tensor:
        one, scale, mask = (1.0, site.scale, site.mask) if of_guide else (-1.0, site.prior_scale, site.prior_mask)
        weight = like.new_full((), one) * scale
        return weight if mask is None else weight * torch.as_tensor(mask, device=like.device)

    slopes, base = components.linear(stack(law, components.event_ndim), _LEAST)
    values = stack(lambda site, _: components.encoded(site.value.detach(), site.fn), 1).to(slopes.dtype)
    log_prob = torch.einsum("ci...f,cj...f->cij...", slopes, values) + base.unsqueeze(2)
    weights = stack(weight, 0).unsqueeze(2)
    # Masked log-probabilities may be infinite or NaN.
    return torch.where(weights == 0.0, 0.0, weights * log_prob)
