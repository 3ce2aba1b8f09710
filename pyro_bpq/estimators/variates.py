r"""Small networks as free-form control variates. Their weights are running statistics of a site.

They change only after the step. So the network that corrects an estimate has not seen its rollout.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bpq.critics.nets import check_hidden
from pyro_bpq.errors import check_option
from pyro_bpq.estimators.base import SiteContext, Statistics, check_decay, site_mean
from pyro_bpq.estimators.scaled import means_statistics, running_means


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

    References:
        | Backpropagation through the void (Grathwohl et al., 2018), Eq. 6
    """

    hidden: tuple[int, ...] = (32,)
    lr: float = 0.01
    decay: float = 0.98
    seed: int = 0

    def __post_init__(self) -> None:
        check_hidden(self)
        check_option(self, "lr", self.lr >= 0.0, "a number that is not negative")
        check_decay(self)

    def statistics(self, inputs: int, extra: tuple[float, ...] = ()) -> Statistics:
        """Initial weights and moments of their gradient, as flat vectors, and the spread of the costs.

        ``extra`` are initial values of further trained numbers, which stand behind the weights.
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
        return context.per_site(context.statistics["spread"]) * value.reshape(context.cost.shape)

    def train(self, weights: Tensor, objective: Tensor, context: SiteContext) -> dict[str, Tensor]:
        """New statistics after one step of Adam along the derivative of ``objective``, ``(G,)``, to ``weights``."""
        assert context.count is not None
        (gradient,) = torch.autograd.grad(objective.sum(), weights)
        with torch.no_grad():
            old, step = context.statistics, (context.count + 1.0).unsqueeze(1)
            first = torch.lerp(gradient, old["first"], 0.9)
            second = torch.lerp(gradient.square(), old["second"], 0.99)
            moved = first / (1.0 - 0.9**step)
            size = (second / (1.0 - 0.99**step)).sqrt()
            new = weights.detach() - self.lr * moved / size.clamp(min=torch.finfo(size.dtype).tiny)
            square = (context.cost - running_means(context)[0]).square()
            mean_square = context.running_mean("square", site_mean(square), self.decay)
            spread = mean_square.sqrt().clamp(min=torch.finfo(mean_square.dtype).tiny ** 0.5)
            return {"phi": new, "first": first, "second": second, "square": mean_square, "spread": spread}

    def _layers(self, inputs: int) -> list[tuple[int, int]]:
        return list(itertools.pairwise((inputs, *self.hidden, 1)))
