r"""Small networks as free-form control variates; their weights are running statistics of a site.

Their state is kept in the bank with the other running statistics. It changes only after the step. So the network that
corrects an estimate has not seen the rollout of that estimate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.base import SiteContext, Statistics, check_decay, site_mean, update_mean
from pyro_bpq.estimators.baselines import leave_one_out


@dataclass(frozen=True)
class NetworkVariate:
    r"""A perceptron ``c_φ`` per site, trained to lower the variance of the gradient that it corrects.

        φ ← Adam(φ, ∂|g|²/∂φ),   ∂Var[g]/∂φ = E[∂|g|²/∂φ]

    This holds because the mean of ``g`` does not depend on ``φ``. The last layer of ``c_φ`` starts at zero.

    Args:
        hidden: Sizes of the hidden layers.
        lr: Learning rate of Adam.
        decay: Weight of the past in the running spread of the costs, the unit of the network's output.
        seed: Seed of the initial weights.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Backpropagation through the void (Grathwohl et al., 2018), Eq. 6
    """

    hidden: tuple[int, ...] = (32,)
    lr: float = 0.01
    decay: float = 0.98
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.hidden, tuple) or not all(isinstance(h, int) and h > 0 for h in self.hidden):
            raise OptionError(f"NetworkVariate(hidden={self.hidden!r}): write positive layer sizes, e.g. (32,).")
        if not self.lr >= 0.0:
            raise OptionError(f"NetworkVariate(lr={self.lr!r}): write a number that is not negative.")
        check_decay("NetworkVariate", self.decay)

    def statistics(self, inputs: int, extra: tuple[float, ...] = ()) -> Statistics:
        """Initial weights and moments of their gradient, as flat vectors, and the spread of the costs.

        Args:
            inputs: Number of input features.
            extra: Initial values of further trained numbers, which stand behind the weights.
        """
        generator = torch.Generator().manual_seed(self.seed)
        parts = []
        for i, (fan_in, fan_out) in enumerate(self._layers(inputs)):
            weight = torch.zeros(fan_in, fan_out, dtype=torch.float64, device="cpu")
            if i < len(self.hidden):
                weight.uniform_(-1.0, 1.0, generator=generator).mul_(math.sqrt(3.0 / fan_in))
            parts += [weight.flatten(), torch.zeros(fan_out, dtype=torch.float64, device="cpu")]
        flat = torch.cat([*parts, torch.tensor(extra, dtype=torch.float64, device="cpu")])
        zero = torch.zeros_like(flat)
        return {"phi": flat, "first": zero, "second": zero, "spread": 1.0, "square": 0.0, **means_statistics()}

    def evaluate(self, weights: Tensor, features: Tensor, context: SiteContext) -> Tensor:
        """``c_φ`` in nats, ``(G, M, plates)``, from features ``(G, M, plates, F)``."""
        value, at = features.reshape(features.shape[0], -1, features.shape[-1]), 0
        for i, (fan_in, fan_out) in enumerate(self._layers(features.shape[-1])):
            weight = weights[:, at : at + fan_in * fan_out].reshape(-1, fan_in, fan_out)
            bias = weights[:, at + fan_in * fan_out : at + (fan_in + 1) * fan_out].unsqueeze(1)
            value, at = torch.baddbmm(bias, value, weight), at + (fan_in + 1) * fan_out
            if i < len(self.hidden):
                value = value.tanh()
        spread = context.statistics["spread"].reshape(-1, *(1,) * (context.cost.dim() - 1))
        return spread * value.reshape(context.cost.shape)

    def train(self, weights: Tensor, objective: Tensor, context: SiteContext) -> dict[str, Tensor]:
        """New statistics after one step of Adam.

        Args:
            weights: The weights ``(G, P)`` that ``objective`` was computed from, requiring a gradient.
            objective: Squared norm of the gradient of each site, ``(G,)``.
            context: The step.
        """
        assert context.count is not None
        (gradient,) = torch.autograd.grad(objective.sum(), weights)
        with torch.no_grad():
            old, step = context.statistics, (context.count + 1.0).unsqueeze(1)
            # Adam's steps do not depend on the unit of the objective, except at the start.
            first = torch.lerp(gradient, old["first"], 0.9)
            second = torch.lerp(gradient.square(), old["second"], 0.99)
            moved = first / (1.0 - 0.9**step)
            size = (second / (1.0 - 0.99**step)).sqrt()
            new = weights.detach() - self.lr * moved / size.clamp(min=torch.finfo(size.dtype).tiny)
            square = (context.cost - _means(context)[0]).square()
            mean_square = update_mean(old["square"], site_mean(square), context.count, self.decay)
            floor = torch.finfo(mean_square.dtype).tiny ** 0.5
            return {
                "phi": new,
                "first": first,
                "second": second,
                "square": mean_square,
                "spread": mean_square.sqrt().clamp(min=floor),
            }

    def _layers(self, inputs: int) -> list[tuple[int, int]]:
        return list(itertools.pairwise((inputs, *self.hidden, 1)))


# The functions below centre the cost and the control variate by earlier steps and by the other particles.


def means_statistics() -> dict[str, tuple[float, ...]]:
    """Running means of cost and control variate; products of two particles' residuals, and their squares."""
    return {"means": (0.0, 0.0), "pairs": (0.0, 0.0)}


def _means(context: SiteContext) -> tuple[Tensor, Tensor]:
    means = context.statistics["means"].reshape(-1, 2, *(1,) * (context.cost.dim() - 1))
    return means[:, 0], means[:, 1]


def centre(cost: Tensor, variate: Tensor, context: SiteContext) -> tuple[Tensor, Tensor]:
    r"""Subtracts from cost and control variate their predictions by earlier steps and the other particles.

        C_i - m - ρ (1/(M-1) Σ_{j≠i} C_j - m),   ρ = c / (c + (s - c) / (M-1))

    ``m`` is the running mean. ``c`` is the running product of two particles' residuals, and ``s`` is their running
    square. ``ρ = 1`` is leave-one-out. ``ρ`` is 0 if the residuals of a row's particles are not correlated.
    """
    means, particles = _means(context), cost.shape[1]
    if particles == 1:
        return cost - means[0], variate - means[1]
    assert context.count is not None
    product, square = context.statistics["pairs"].unbind(1)
    noise = (square - product).clamp(min=0.0) / (particles - 1.0)
    weight = product.clamp(min=0.0) / (product.clamp(min=0.0) + noise).clamp(min=torch.finfo(noise.dtype).tiny)
    weight = torch.where(context.count > 0, weight, torch.ones_like(weight)).reshape(-1, *(1,) * (cost.dim() - 1))
    first, second = (
        (1.0 - weight) * (part - mean) + weight * leave_one_out(part)
        for part, mean in zip((cost, variate), means, strict=True)
    )
    return first, second


def update_means(
    cost: Tensor, variate: Tensor, context: SiteContext, decay: float, scale: Tensor | float = 1.0
) -> Mapping[str, Tensor]:
    """New running means; ``scale`` is the scale of the control variate."""
    assert context.count is not None
    new = torch.stack((site_mean(cost), site_mean(variate)), 1)
    found = {"means": update_mean(context.statistics["means"], new, context.count, decay)}
    particles = cost.shape[1]
    if particles > 1:
        residual = cost - scale * variate
        known = _means(context)[0] - scale * _means(context)[1]
        start = site_mean(residual).reshape(-1, *(1,) * (cost.dim() - 1))
        seen = (context.count > 0).reshape(start.shape)
        residual = residual - torch.where(seen, known, start)
        square = residual.square().mean(1, keepdim=True)
        product = (particles * residual.mean(1, keepdim=True).square() - square) / (particles - 1.0)
        pairs = torch.stack((site_mean(product), site_mean(square)), 1)
        found["pairs"] = update_mean(context.statistics["pairs"], pairs, context.count, decay)
    return found
