r"""What other particles' values cost beside a particle's own past.

Leave-one-out centres a site's cost-to-go by that of another particle, which has another past. What a site and all that
follows it cost beside one's own past is nearer. A log-probability ``log p(y | parents)`` is known there too, without
another run, where its law reads the past alone, or ``y`` lies in the past and the law reads nothing of it:

    own law:    log p(y_j | parents_i)
    own value:  log p(y_i | parents_j)

for a site ``X`` of particle ``i`` and values from ``X`` on of particle ``j``. Other costs are particle ``j``'s own. All
of it follows from particle ``j`` and from what does not depend on ``X`` in particle ``i``, so as a baseline it is as
free of bias as leave-one-out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_bpq.batching.layout import CrossedCosts
from pyro_bpq.rollout.runs import Rollout, Run, SiteRecord

__all__ = ["crossed_costs"]

# Least log-probability of a component's value, in nats: any number below tells a baseline that it does not occur.
_LEAST = -100.0
# Values of so many elements are not put together: copies would cost more than calls.
_LARGE = 1 << 14


@torch.no_grad()
def crossed_costs(group: CrossedCosts, rollout: Rollout, costs: Sequence[Tensor]) -> Tensor:
    """What costs change by beside another past, on average over other particles.

    Log-probabilities of finite components are linear in an encoded value: all pairs of a law and a value are one
    product of matrices.

    Args:
        group: The costs.
        rollout: The runs, of at least two particles.
        costs: Stacked costs by class of costs, ``(costs, M, plates)`` in nats.

    Returns:
        First under the own law, then at the own value, ``(2 costs, M, plates)`` in nats: the cost beside particle
        ``i``'s past less the cost that particle ``j`` has, averaged over ``j``.
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
    """Costs under the law of particle ``i`` at the value of ``j``, ``(costs, i, j, plates)``.

    Particle ``i``'s own value must not enter, by rounding either.
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
    # What is masked may be anything.
    return torch.where(weights == 0.0, 0.0, weights * log_prob)
