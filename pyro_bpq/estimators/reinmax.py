r"""ReinMax: straight-through of second order. Biased."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.estimators.temperature import Attached, Temperature, Tempered, temperature_at
from pyro_bpq.rollout.features import finite_components


@dataclass(frozen=True)
class ReinMax(Tempered, Attached):
    r"""The sampled value, with a gradient that is exact for quadratic costs of one component. Biased.

        z + s - stop(s),   s = 2 π_1 - ½ π_0,
        π_0 = softmax(θ),   π_1 = softmax(stop(log((z + softmax(θ/τ))/2) - θ) + θ)

    ReinMax uses a trapezoidal rule (Heun's) where straight-through uses Euler's rule. At ``τ = 1`` it has no bias for
    a single component with costs that are quadratic in its value. For Bernoulli (as a pair of values) and
    OneHotCategorical, also in ``to_event``, whose costs are differentiable in the value. The gradient through ``log q``
    of a OneHotCategorical with respect to its value is zero, as torch computes it.

    Args:
        temperature: Temperature ``τ`` of at least one, as the paper advises, or a function of the steps taken.

    Raises:
        OptionError: If an option is out of range.

    References:
        Bridging discrete and backpropagation: straight-through and beyond (Liu et al., 2023)
    """

    temperature: Temperature = 1.0

    def attach(self, fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        """The value, with the gradient of ``s``."""
        split = finite_components(fn)
        assert split is not None
        logits, hard = split.parameters(fn).expand(value.shape), value.detach()
        is_binary, temperature = split.kind == "bernoulli", temperature_at(self.temperature, 0)
        with torch.no_grad():
            half = 0.5 * (hard + _probs(logits / temperature, is_binary))
        first, plain = _derivative(half, logits, is_binary), _probs(logits, is_binary)
        slope = 2.0 * first - 0.5 * plain
        return value + (slope - slope.detach())


def _probs(logits: Tensor, is_binary: bool) -> Tensor:
    return logits.sigmoid() if is_binary else logits.softmax(-1)


def _derivative(probs: Tensor, logits: Tensor, is_binary: bool) -> Tensor:
    """A tensor whose derivative is that of a softmax at the point where the softmax equals ``probs``."""
    if is_binary:
        return probs * (1.0 - probs) * logits
    return probs * (logits - (probs * logits).sum(-1, keepdim=True))
