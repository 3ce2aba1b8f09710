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
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_bpq.features import finite_components
from pyro_bpq.graph import StochasticComputationGraph
from pyro_bpq.layout import CrossedCosts
from pyro_bpq.rollout import Rollout, Run, SiteRecord
from pyro_bpq.tracing import TracedRun, cost_of_guide, cost_of_model

__all__ = ["crossable", "crossed_costs"]

# Least log-probability of a component's value, in nats: any number below tells a baseline that it does not occur.
_LEAST = -100.0
# Values of so many elements are not put together: copies would cost more than calls.
_LARGE = 1 << 14


def crossable(traced: TracedRun, graph: StochasticComputationGraph, handed: frozenset[str]) -> frozenset[str]:
    """The log-probabilities of sites whose values all occur under any law of theirs: those of finite support.

    Args:
        traced: A run.
        graph: Its graph.
        handed: Costs of the model that read values of the guide itself: their law may read the value that it scores.

    Returns:
        Names of costs.
    """
    found: set[str] = set()
    if traced.elimination is not None:
        return frozenset()
    for name, site in traced.run.sites.items():
        components, cost = traced.infos[name].components, cost_of_model(name)
        if components is None or name in traced.untraced or not _is_plated(traced.guide_trace.nodes[name]):
            continue
        found.add(cost_of_guide(name))
        if site.prior is not None and finite_components(site.prior) == components:
            if graph.cost(cost).plates == graph.node(name).plates and _is_plated(traced.model_trace.nodes[name]):
                found.add(cost)
    return frozenset(found - handed)


def _is_plated(site: Any) -> bool:
    """Whether all batch dimensions of a traced site are plates, or that of the particles."""
    dims = {frame.dim for frame in site["cond_indep_stack"] if frame.vectorized}
    return all(size == 1 or -1 - i in dims for i, size in enumerate(reversed(site["fn"].batch_shape)))


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
    size = rollout.runs[0].sites[group.sites[names[0]]].value.numel()
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
    is_guide = {name: name == cost_of_guide(group.sites[name]) for name in names}

    def stack(pick: Callable[[SiteRecord, bool], Tensor], event_ndim: int) -> Tensor:
        def from_run(run: Run, name: str) -> Tensor:
            return pick(run.sites[group.sites[name]], is_guide[name])

        return rollout.stack(from_run, names, group.cls.plates, event_ndim)

    def law(site: SiteRecord, is_guide: bool) -> Tensor:
        return components.parameters(site.fn if is_guide else site.prior)

    def weight(site: SiteRecord, is_guide: bool) -> Tensor:
        one, scale, mask = (1.0, site.scale, site.mask) if is_guide else (-1.0, site.prior_scale, site.prior_mask)
        return scale_and_mask(like.new_full((), one), scale, mask)  # type: ignore[no-untyped-call]

    slopes, base = components.linear(stack(law, components.event_ndim), _LEAST)
    values = stack(lambda site, _: components.encoded(site.value.detach(), site.fn), 1).to(slopes.dtype)
    log_prob = torch.einsum("ci...f,cj...f->cij...", slopes, values) + base.unsqueeze(2)
    weights = stack(weight, 0).unsqueeze(2)
    # What is masked may be anything.
    return torch.where(weights == 0.0, 0.0, weights * log_prob)
