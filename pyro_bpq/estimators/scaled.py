r"""Estimators with one control variate: its scale, and the running means that centre cost and control variate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_bpq.errors import check_option
from pyro_bpq.estimators.base import Estimator, SiteContext, Statistics, check_decay, site_mean
from pyro_bpq.estimators.baselines import leave_one_out
from pyro_bpq.estimators.requirements import needs_finite


@dataclass(frozen=True)
class OptimalScale:
    r"""The scale of a control variate that minimises the second moment of the gradient.

        g = u - a v,   a = E[u·v] / E[v·v], clipped to [0, max_scale]

    ``u`` is the gradient without the control variate. ``v`` is the control variate, which has mean zero. Both are with
    respect to the logits. The moments come from earlier steps, so the scale does not depend on the run that it
    corrects. A useless control variate gets the scale zero.

    Args:
        decay: Weight of the past in the running moments, in ``[0, 1)``.
        max_scale: Upper end of the scale.

    References:
        | Variance reduction techniques for gradient estimates in reinforcement learning (Greensmith et al., 2004)
        | Black box variational inference (Ranganath et al., 2014)
    """

    decay: float = 0.98
    max_scale: float = 1.2

    def __post_init__(self) -> None:
        check_decay(self)
        check_option(self, "max_scale", self.max_scale > 0.0, "a positive number")


Scale = float | OptimalScale


def scale_statistics(scale: Scale) -> Statistics:
    """Running statistics of a scale: the products ``u·v`` and ``v·v``, and the scale itself."""
    return {"products": (0.0, 0.0), "scales": (1.0,)} if isinstance(scale, OptimalScale) else {}


def read_scale(scale: Scale, context: SiteContext) -> Tensor:
    """The scale of each site, fixed before the run and broadcastable to ``(G, M, plates)``."""
    if isinstance(scale, OptimalScale):
        return context.per_site(context.statistics["scales"])
    return context.per_site(context.cost.new_full((len(context.names),), float(scale)))


def update_scale(scale: Scale, context: SiteContext, plain: Tensor, variate: Tensor) -> dict[str, Tensor]:
    """New running statistics of a scale, from gradients ``u`` and control variates ``v``, ``(G, M, plates, ...)``."""
    if not isinstance(scale, OptimalScale):
        return {}
    assert context.count is not None
    last = tuple(range(context.cost.dim(), plain.dim()))
    pairs = [(plain * variate).sum(last), variate.square().sum(last)] if last else [plain * variate, variate.square()]
    new, samples = context.joint(torch.stack([site_mean(pair) for pair in pairs], 1))
    products = context.running_mean("products", new, scale.decay)
    # A ridge towards 1 steadies the first steps.
    ridge = 3.0 / ((context.count + 1.0) * samples)
    square = products[:, 1]
    found = (products[:, 0] + ridge * square) / ((1.0 + ridge) * square).clamp(min=torch.finfo(square.dtype).tiny)
    found = torch.where(square > 0, found.clamp(0.0, scale.max_scale), torch.ones_like(found))
    return {"products": products, "scales": found.unsqueeze(1)}


def means_statistics() -> dict[str, tuple[float, ...]]:
    """Running means of cost and control variate; products of two particles' residuals, and their squares."""
    return {"means": (0.0, 0.0), "pairs": (0.0, 0.0)}


def running_means(context: SiteContext) -> tuple[Tensor, Tensor]:
    """Running means of cost and control variate, broadcastable to ``(G, M, plates)``."""
    first, second = context.statistics["means"].unbind(1)
    return context.per_site(first), context.per_site(second)


def centre(cost: Tensor, variate: Tensor, context: SiteContext) -> tuple[Tensor, Tensor]:
    r"""Subtracts from cost and control variate their predictions by earlier steps and the other particles.

        C_i - m - ρ (1/(M-1) Σ_{j≠i} C_j - m),   ρ = c / (c + (s - c) / (M-1))

    ``m`` is the running mean, ``c`` the running product of two particles' residuals, and ``s`` their running square.
    ``ρ = 1`` is leave-one-out. ``ρ`` is 0 if the residuals of a row's particles are not correlated.
    """
    means, particles = running_means(context), cost.shape[1]
    if particles == 1:
        return cost - means[0], variate - means[1]
    assert context.count is not None
    product, square = context.statistics["pairs"].unbind(1)
    noise = (square - product).clamp(min=0.0) / (particles - 1.0)
    weight = product.clamp(min=0.0) / (product.clamp(min=0.0) + noise).clamp(min=torch.finfo(noise.dtype).tiny)
    weight = context.per_site(torch.where(context.count > 0, weight, torch.ones_like(weight)))
    first, second = (
        (1.0 - weight) * (part - mean) + weight * leave_one_out(part)
        for part, mean in zip((cost, variate), means, strict=True)
    )
    return first, second


def update_means(
    cost: Tensor, variate: Tensor, context: SiteContext, decay: float, scale: Tensor | float = 1.0
) -> dict[str, Tensor]:
    """New running means; ``scale`` is the scale of the control variate."""
    assert context.count is not None
    found = {"means": context.running_mean("means", torch.stack((site_mean(cost), site_mean(variate)), 1), decay)}
    particles = cost.shape[1]
    if particles > 1:
        residual, means = cost - scale * variate, running_means(context)
        known = means[0] - scale * means[1]
        start = context.per_site(site_mean(residual))
        residual = residual - torch.where(context.per_site(context.count > 0), known, start)
        square = residual.square().mean(1, keepdim=True)
        product = (particles * residual.mean(1, keepdim=True).square() - square) / (particles - 1.0)
        pairs = torch.stack((site_mean(product), site_mean(square)), 1)
        found["pairs"] = context.running_mean("pairs", pairs, decay)
    return found


class Scaled(Estimator):
    """Base of the estimators ``u - a v``, with fields ``scale``, ``a``, and ``decay`` of running means. Unbiased."""

    scale: Scale
    decay: float

    is_unbiased: ClassVar[bool] = True
    unsupported = needs_finite

    def __post_init__(self) -> None:
        is_valid = isinstance(self.scale, int | float | OptimalScale) and not isinstance(self.scale, bool)
        check_option(self, "scale", is_valid, "a number or OptimalScale()")
        check_decay(self)

    def statistics(self) -> Statistics:
        """Running means and products for the scale."""
        return {**means_statistics(), **scale_statistics(self.scale)}

    def updated(self, context: SiteContext, value: Tensor, *parts: Tensor) -> dict[str, Tensor]:
        """New running statistics, from the predicted cost and, if known, from ``u`` and ``v``."""
        means = update_means(context.cost, value, context, self.decay, read_scale(self.scale, context))
        return {**means, **(update_scale(self.scale, context, *parts) if parts else {})}
