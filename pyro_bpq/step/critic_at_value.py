"""The critics of a site at its sampled value: ``Q(x)``, and its slope ``∂Q/∂x``."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_bpq.step.asked import RolloutTensors


def value_of_class(signals: RolloutTensors, c: int) -> Tensor:
    """``Q(x)`` for the sites of a class, ``(G, M, plates)`` in nats, detached; zero without critics."""
    found = {g: value.detach() for g, value in signals.q_values[0].items()}
    return _per_site(signals, c, found, ())


def slope_of_class(signals: RolloutTensors, c: int) -> Tensor:
    """``∂Q/∂x`` for the sites of a class, ``(G, M, plates, D)`` in nats per unit of ``x``, detached.

    It is zero where there is no critic that reads the value as a whole. A site with several Q-nodes gets their sum.
    """
    found = {}
    for g, critic in signals.critics.items():
        joint = critic.joint
        if critic.group.c == c and joint is not None and joint.leaf is not None and joint.value.requires_grad:
            (slope,) = torch.autograd.grad(joint.value.sum(), joint.leaf, retain_graph=True)
            found[g] = slope.reshape(*joint.value.shape, -1)
    return _per_site(signals, c, found, (signals.layout.classes[c].width,))


def _per_site(signals: RolloutTensors, c: int, found: dict[int, Tensor], event: tuple[int, ...]) -> Tensor:
    layout, batch = signals.layout, signals.batches[c]
    total = batch.score.detach().new_zeros(len(batch.cls.names), *batch.batch_shape, *event)
    for g, tensor in found.items():
        group = signals.critics[g].group
        if group.c == c:
            member = layout.membership(group, group.nodes, tensor)
            total = total + (tensor if member is None else member @ tensor)
    return total
