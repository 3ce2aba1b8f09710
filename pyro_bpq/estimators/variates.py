r"""Control variates: their scale, the running means that centre them and the costs, and small networks as variates."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_bpq.errors import Checked, check_hidden, is_real, option, positive
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteTerm, Statistics, past, site_mean
from pyro_bpq.estimators.requirements import needs_finite
from pyro_bpq.estimators.score_function import leave_one_out


@dataclass(frozen=True)
class OptimalScale(Checked):
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

    decay: float = past(0.98)
    max_scale: float = positive(1.2)


Scale = float | OptimalScale


def scale_option(default: Scale) -> Any:
    """An option: the scale of a control variate."""

    def is_valid(scale: Any) -> bool:
        return isinstance(scale, OptimalScale) or (is_real(scale) and not isinstance(scale, bool))

    return option(default, is_valid, "a number or OptimalScale()")


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


def running_means(context: SiteContext) -> tuple[Tensor, Tensor]:
    """Running means of cost and control variate, broadcastable to ``(G, M, plates)``."""
    first, second = context.statistics["means"].unbind(1)
    return context.per_site(first), context.per_site(second)


def means_statistics() -> dict[str, tuple[float, ...]]:
    """Running means of cost and control variate; products of two particles' residuals, and their squares."""
    return {"means": (0.0, 0.0), "pairs": (0.0, 0.0)}


def centre(cost: Tensor, variate: Tensor, context: SiteContext) -> tuple[Tensor, Tensor]:
    r"""Subtracts from cost and control variate their predictions by earlier steps and the other particles.

        C_i - m - ρ (1/(M-1) Σ_{j≠i} C_j - m),   ρ = c / (c + (s - c) / (M-1))

    ``m`` is the running mean, ``c`` the running product of two particles' residuals, and ``s`` their running square.
    ``ρ = 1`` is leave-one-out. ``ρ`` is 0 if the residuals of a row's particles are not correlated: with two particles
    leave-one-out then has twice the variance.
    """
    means, particles = running_means(context), cost.shape[1]
    if particles == 1:
        return cost - means[0], variate - means[1]
    product, square = context.statistics["pairs"].unbind(1)
    noise = (square - product).clamp(min=0.0) / (particles - 1.0)
    weight = product.clamp(min=0.0) / (product.clamp(min=0.0) + noise).clamp(min=torch.finfo(noise.dtype).tiny)
    weight = context.per_site(torch.where(context.count > 0, weight, torch.ones_like(weight)))
    pairs = zip((cost, variate), means, strict=True)
    first, second = ((1.0 - weight) * (part - mean) + weight * leave_one_out(part) for part, mean in pairs)
    return first, second


def update_means(
    cost: Tensor, variate: Tensor, context: SiteContext, decay: float, scale: Tensor | float = 1.0
) -> dict[str, Tensor]:
    """New running means; ``scale`` is the scale of the control variate."""
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


@dataclass(frozen=True, kw_only=True)
class Scaled(Estimator):
    """Base of the estimators ``u - a v``, with fields ``scale``, ``a``, and ``decay`` of running means. Unbiased."""

    scale: Scale = scale_option(OptimalScale())
    decay: float = past(0.98)

    is_unbiased: ClassVar[bool] = True
    unsupported = needs_finite

    def statistics(self) -> Statistics:
        """Running means and products for the scale."""
        return {**means_statistics(), **scale_statistics(self.scale)}

    @torch.no_grad()
    def corrected(self, context: SiteContext, value: Tensor, path: Tensor | float = 0.0) -> SiteTerm:
        """The term whose gradient is ``u - a v``, and new running statistics.

            u = (C - b) s,   v = (c - b_c) s - p

        ``s`` is the derivative of ``log q`` to free logits.

        Args:
            context: Tensors of the sites.
            value: The predicted cost ``c``, ``(G, M, plates)``.
            path: The derivative ``p`` of the expectation of ``c`` to free logits, ``(G, M, plates, D, K)``.
        """
        log_probs, score = context.table[0], context.score_table[1]
        centred, control = (part[..., None, None] for part in centre(context.cost, value, context))
        plain, variate = centred * score, control * score - path
        gradient = plain - read_scale(self.scale, context)[..., None, None] * variate
        with torch.enable_grad():
            return SiteTerm(gradient * log_probs, self.updated(context, value, plain, variate))

    def updated(self, context: SiteContext, value: Tensor, *parts: Tensor) -> dict[str, Tensor]:
        """New running statistics, from the predicted cost and, if known, from ``u`` and ``v``."""
        means = update_means(context.cost, value, context, self.decay, read_scale(self.scale, context))
        return means | (update_scale(self.scale, context, *parts) if parts else {})


@dataclass(frozen=True)
class NetworkVariate(Checked):
    r"""A perceptron ``c_φ`` per site, trained to lower the variance of the gradient that it corrects.

        φ ← Adam(φ, ∂|g|²/∂φ),   ∂Var[g]/∂φ = E[∂|g|²/∂φ]

    This holds because the mean of ``g`` does not depend on ``φ``. The last layer of ``c_φ`` starts at zero.

    Args:
        hidden: Sizes of the hidden layers.
        lr: Learning rate of Adam.
        decay: Weight of the past in the running spread of the costs, the unit of the network's output.
        seed: Seed of the initial weights.

    References:
        | Backpropagation through the void (Grathwohl et al., 2018), Eq. 6
    """

    hidden: tuple[int, ...] = (32,)
    lr: float = option(0.01, lambda lr: lr >= 0.0, "a number that is not negative")
    decay: float = past(0.98)
    seed: int = 0

    def __post_init__(self) -> None:
        check_hidden(self)
        super().__post_init__()

    def statistics(self, inputs: int, extra: int = 0) -> Statistics:
        """Initial weights and moments of their gradient, as flat vectors, and the spread of the costs.

        So many ``extra`` trained numbers, which start at zero, stand behind the weights.
        """
        flat = _weights(tuple(self._layers(inputs)), extra, self.seed)
        moments = dict.fromkeys(("first", "second"), torch.zeros_like(flat))
        return {"phi": flat, **moments, "spread": 1.0, "square": 0.0, **means_statistics()}

    def evaluate(self, weights: Tensor, features: Tensor, context: SiteContext) -> Tensor:
        """``c_φ`` in nats, ``(G, M, plates)``, from features ``(G, M, plates, F)``."""
        value, at = features.reshape(features.shape[0], -1, features.shape[-1]), 0
        for i, (fan_in, fan_out) in enumerate(self._layers(features.shape[-1])):
            weight = weights[:, at : at + fan_in * fan_out].reshape(-1, fan_in, fan_out)
            bias = weights[:, at + fan_in * fan_out : at + (fan_in + 1) * fan_out].unsqueeze(1)
            value, at = torch.baddbmm(bias, value, weight), at + (fan_in + 1) * fan_out
            if i < len(self.hidden):
                value = value.tanh()
        return context.per_site(context.statistics["spread"]) * value.reshape(context.cost.shape)

    def train(self, weights: Tensor, objective: Tensor, control: Tensor, context: SiteContext) -> dict[str, Tensor]:
        """New statistics after one step of Adam along the derivative of ``objective``, ``(G,)``, to ``weights``.

        ``control`` is the predicted cost, ``(G, M, plates)``.
        """
        (gradient,) = torch.autograd.grad(objective.sum(), weights)
        with torch.no_grad():
            old, step = context.statistics, (context.count + 1.0).unsqueeze(1)
            first = torch.lerp(gradient, old["first"], 0.9)
            second = torch.lerp(gradient.square(), old["second"], 0.99)
            mean = first / (1.0 - 0.9**step)
            size = (second / (1.0 - 0.99**step)).sqrt()
            new = weights.detach() - self.lr * mean / size.clamp(min=torch.finfo(size.dtype).tiny)
            square = (context.cost - running_means(context)[0]).square()
            mean_square = context.running_mean("square", site_mean(square), self.decay)
            spread = mean_square.sqrt().clamp(min=torch.finfo(mean_square.dtype).tiny ** 0.5)
            moved = {"phi": new, "first": first, "second": second, "square": mean_square, "spread": spread}
            return moved | update_means(context.cost, control.detach(), context, self.decay)

    def _layers(self, inputs: int) -> list[tuple[int, int]]:
        return list(itertools.pairwise((inputs, *self.hidden, 1)))


@functools.cache
def _weights(layers: Sequence[tuple[int, int]], extra: int, seed: int) -> Tensor:
    number, at, generator = sum((a + 1) * b for a, b in layers), 0, torch.Generator().manual_seed(seed)
    weights = torch.zeros(number + extra, dtype=torch.float64, device="cpu")
    for a, b in layers[:-1]:
        weights[at : at + a * b].uniform_(-1.0, 1.0, generator=generator).mul_(math.sqrt(3.0 / a))
        at += (a + 1) * b
    return weights


def network() -> Any:
    """An option: a trained control variate."""
    return option(NetworkVariate(), lambda variate: isinstance(variate, NetworkVariate), "NetworkVariate(...)")
