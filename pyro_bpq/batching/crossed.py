r"""Crossed costs: the costs of another particle's values, given a particle's own past.

Leave-one-out centres a site's cost-to-go by the cost-to-go of another particle. That particle has another past. A
closer baseline is the cost of its values from the site on, given the own past. A log-probability ``log p(y | parents)``
is known for such a pair without another run in two cases. Either its law reads the past only, or ``y`` lies in the past
and its law reads nothing of the past:

    own law:    log p(y_j | parents_i)
    own value:  log p(y_i | parents_j)

for a site ``X`` of particle ``i``, and the values of particle ``j`` from ``X`` on. Other costs are those of particle
``j``. The baseline depends on particle ``j``, and on values of particle ``i`` that do not depend on ``X``. So it is as
free of bias as leave-one-out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_bpq.batching.classes import CrossedCosts
from pyro_bpq.rollout.runs import Rollout, Run, SiteRecord

# Smallest log-probability of a component's value, in nats. For a baseline, such a value does not occur.
_LEAST = -100.0
# Sites whose values have so many elements get a call each, because copies would cost more than calls.
_LARGE = 1 << 14


@torch.no_grad()
def crossed_costs(group: CrossedCosts, rollout: Rollout, costs: Sequence[Tensor]) -> Tensor:
    """The change of each cost given another particle's past, averaged over the other particles.

    Log-probabilities of finite components are linear in an encoded value. So one matrix product gives all pairs of a
    law and a value.

    Args:
        group: The costs.
        rollout: The runs, of at least two particles.
        costs: Stacked costs by class of costs, ``(costs, M, plates)`` in nats.

    Returns:
        The changes under the own law, then those at the own value, ``(2 costs, M, plates)`` in nats. A change is the
        cost given particle ``i``'s past minus the cost of particle ``j``, averaged over ``j``.
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

    Particle ``i``'s own value must not enter the result, not even through rounding.
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
