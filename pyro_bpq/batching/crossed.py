"""Crossed costs: those of other particles' values given a particle's own past.

Leave-one-out subtracts the cost-to-go of particle ``j``, which has another past than particle ``i``. A closer baseline
is the cost of the values of ``j``, from the site on, given the past of ``i``. A log-probability is known for such a
pair without another run if its law reads only the past, ``log p(y_j | parents_i)``, or if its value lies in the past
and its law reads nothing of the past, ``log p(y_i | parents_j)``. The values of ``i`` that enter do not depend on the
site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bpq.batching.classes import Constants
from pyro_bpq.graph.scg import CostNode, Plate
from pyro_bpq.rollout.features import Components
from pyro_bpq.rollout.runs import Rollout, Run, SiteRecord

# Least log-probability of a component's value in crossed costs, in nats.
_LEAST = -100.0
# Sites whose values have so many elements get a call each, because copies would take longer than calls.
_LARGE = 1 << 14


@dataclass(frozen=True, eq=False)
class CrossedCosts(Constants):
    """Log-probabilities of like-shaped sites that are known given another particle's past."""

    k: int  # Position of the class of costs
    plates: tuple[Plate, ...]  # Its plates
    components: Components  # Finite components of the sites
    costs: Mapping[str, CostNode]  # The costs by name
    at: tuple[int, ...]  # Their positions in the class

    @torch.no_grad()
    def changes(self, rollout: Rollout, costs: Sequence[Tensor]) -> Tensor:
        """Change of each cost given another particle's past, averaged over the other particles.

        A change is the cost given particle ``i``'s past minus the cost of particle ``j``, averaged over ``j``. The
        result holds the changes under the own law, then those at the own value, ``(2 costs, M, plates)`` in nats.
        """
        own = costs[self.k]
        own, names = own[self.indices("at", own, lambda: self.at)], list(self.costs)
        size = rollout.runs[0].sites[self.costs[names[0]].site or ""].value.numel()
        parts = [names] if size < _LARGE else [[name] for name in names]
        pairs = torch.cat([self._pairs(rollout, part, own) for part in parts])
        change = torch.cat((pairs, pairs.transpose(1, 2))) - torch.cat((own, own)).unsqueeze(1)
        itself = torch.eye(rollout.num_particles, dtype=torch.bool, device=own.device)
        itself = itself.reshape(*itself.shape, *(1,) * (own.dim() - 2))
        return change.masked_fill(itself, 0.0).sum(2) / (rollout.num_particles - 1)

    def _pairs(self, rollout: Rollout, names: Sequence[str], like: Tensor) -> Tensor:
        """Costs under the law of particle ``i`` at the value of particle ``j``, ``(costs, i, j, plates)``.

        They are linear in an encoded value, so one matrix product gives all pairs. Particle ``i``'s own value must not
        enter the result, not even through rounding.
        """
        components = self.components

        def stack(pick: Callable[[SiteRecord, bool], Tensor], event_ndim: int) -> Tensor:
            def from_run(run: Run, name: str) -> Tensor:
                cost = self.costs[name]
                return pick(run.sites[cost.site or ""], cost.is_of_guide)

            return rollout.stack(from_run, names, self.plates, event_ndim)

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
