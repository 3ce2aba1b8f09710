r"""The cost-to-go: sums of the costs downstream of a site, for all sites of a class at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_bpq.batching.kinds import Relation
from pyro_bpq.batching.layout import Layout
from pyro_bpq.rollout.runs import Rollout, Run, sum_to_plates


def stack_costs(layout: Layout, rollout: Rollout) -> list[Tensor]:
    """Stacks the costs of a rollout per class of costs, ``(costs, M, plates)`` each, in nats, detached."""
    return [
        rollout.stack(lambda run, name: run.costs[name].detach(), cls.names, cls.plates) for cls in layout.cost_classes
    ]


def sum_costs(layout: Layout, costs: Sequence[Tensor], kind: Relation, c: int) -> Tensor | None:
    """Sums, for each site of a class, the costs that a matrix of the layout selects.

    Args:
        layout: The layout.
        costs: Stacked costs, by class of costs.
        kind: ``DOWNSTREAM``, ``CROSSING`` or ``TABLED``.
        c: Position of the class of sites.

    Returns:
        Sums that broadcast to ``(G, M, plates)``, or ``None`` if no cost is selected.
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
    """The cost-to-go of each component of every site of a class.

    Args:
        layout: The layout.
        rollout: The runs. Their sites hold the costs that are charged to single components.
        c: Position of the class of sites.
        joint: The part of the cost-to-go that all components of a site share, ``(G, M, plates)``, in nats.

    Returns:
        Shape ``(G, M, plates, D)``, in nats.
    """
    cls = layout.classes[c]

    def own(run: Run, name: str) -> Tensor:
        charged = run.sites[name].charged
        assert charged is not None
        return charged

    return joint.unsqueeze(-1) + rollout.stack(own, cls.names, cls.spec.plates, 1)
