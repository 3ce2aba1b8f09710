r"""Scales of control variates: fixed numbers, or optimal scales from earlier steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.base import SiteContext, Statistics, check_decay, site_mean, update_mean


@dataclass(frozen=True)
class OptimalScale:
    r"""The scale of a control variate that minimises the second moment of the gradient.

        g = u - a v,   a = E[u·v] / E[v·v], clipped to [0, max_scale]

    ``u`` is the gradient without the control variate. ``v`` is the control variate, which has mean zero. Both are with
    respect to the logits. The moments are running moments of earlier steps, so the scale does not depend on the run
    that it corrects. A useless control variate gets the scale zero.

    Args:
        decay: Weight of the past in the running moments, in ``[0, 1)``.
        max_scale: Upper end of the scale.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Variance reduction techniques for gradient estimates in reinforcement learning (Greensmith et al., 2004)
        | Black box variational inference (Ranganath et al., 2014)
    """

    decay: float = 0.98
    max_scale: float = 1.2

    def __post_init__(self) -> None:
        check_decay("OptimalScale", self.decay)
        if not self.max_scale > 0.0:
            raise OptionError(f"OptimalScale(max_scale={self.max_scale!r}): write a positive number.")


Scale = float | OptimalScale


def check_scale(owner: str, scale: Scale) -> None:
    """Raises an OptionError if ``scale`` is neither a number nor an :class:`OptimalScale`."""
    if isinstance(scale, bool) or not isinstance(scale, int | float | OptimalScale):
        raise OptionError(f"{owner}(scale={scale!r}): write a number or OptimalScale().")


def scale_statistics(scale: Scale) -> Statistics:
    """Running statistics of a scale: the products ``u·v`` and ``v·v``, and the scale itself."""
    return {"products": (0.0, 0.0), "scales": (1.0,)} if isinstance(scale, OptimalScale) else {}


def read_scale(scale: Scale, context: SiteContext) -> Tensor:
    """The scale of each site, fixed before the run and broadcastable to ``(G, M, plates)``."""
    lead = (-1, *(1,) * (context.cost.dim() - 1))
    if isinstance(scale, OptimalScale):
        return context.statistics["scales"].reshape(lead)
    return context.cost.new_full((len(context.names),), float(scale)).reshape(lead)


def update_scale(scale: Scale, context: SiteContext, plain: Tensor, variate: Tensor) -> dict[str, Tensor]:
    """New running statistics of a scale.

    Args:
        scale: The scale.
        context: The step.
        plain: Gradient ``u`` of each element, ``(G, M, plates, ...)``.
        variate: Control variate ``v``, of the same shape.

    Returns:
        The statistics. A ridge towards 1 steadies the first steps; it fades with the number of samples.
    """
    if not isinstance(scale, OptimalScale):
        return {}
    assert context.count is not None
    last = tuple(range(context.cost.dim(), plain.dim()))
    pairs = [(plain * variate).sum(last), variate.square().sum(last)] if last else [plain * variate, variate.square()]
    new, samples = context.joint(torch.stack([site_mean(pair) for pair in pairs], 1))
    products = update_mean(context.statistics["products"], new, context.count, scale.decay)
    ridge = 3.0 / ((context.count + 1.0) * samples)
    square = products[:, 1]
    found = (products[:, 0] + ridge * square) / ((1.0 + ridge) * square).clamp(min=torch.finfo(square.dtype).tiny)
    found = torch.where(square > 0, found.clamp(0.0, scale.max_scale), torch.ones_like(found))
    return {"products": products, "scales": found.unsqueeze(1)}
