r"""Straight-through: the sampled value with the gradient of a probability. Biased."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.estimators.temperature import Attached


@dataclass(frozen=True)
class StraightThrough(Attached):
    r"""The sampled value, with the gradient of its mean. Biased; a reference.

        z = b + p - stop(p)

    Serves Bernoulli and OneHotCategorical, also in ``to_event``, whose costs are differentiable in the value. The
    gradient through ``log q`` of a OneHotCategorical with respect to its value is zero, as torch computes it.

    References:
        | Estimating or propagating gradients through stochastic neurons for conditional computation
          (Bengio et al., 2013)
    """

    def attach(self, fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        """The value, with the gradient of the distribution's mean."""
        mean = fn.mean
        return value + (mean - mean.detach())
