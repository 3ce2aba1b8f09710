"""A reparameterised distribution whose noise can be enumerated."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all


class TwoPoint(TorchDistribution):
    r"""Replaces a reparameterised distribution in tests whose expectations must be exact.

    The value is a differentiable function of two-point noise,

        x = loc + scale · ε,   P(ε = -1) = P(ε = +1) = 1/2,

    and the log-probability is that of ``Normal(loc, scale)``. It is a formal cost, not the density of
    ``x``. The noise has the first two moments of a standard normal. So ``E[∂ log_prob] = 0`` holds for
    ``loc`` and for ``scale``, and estimators that drop the score of a pathwise site stay unbiased.

    Args:
        loc: Mean, any shape.
        scale: Standard deviation, positive; broadcast with ``loc`` to the ``batch_shape``.
        validate_args: As in ``torch.distributions``.
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}  # noqa: RUF012
    support = constraints.real
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, validate_args: bool | None = None) -> None:
        self.loc, self.scale = broadcast_all(loc, scale)
        super().__init__(self.loc.shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> TwoPoint:
        """Returns a copy with the parameters expanded to ``batch_shape``."""
        shape = torch.Size(batch_shape)
        new = TwoPoint(self.loc.expand(shape), self.scale.expand(shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws the noise and returns ``loc + scale * noise``."""
        shape = self._extended_shape(sample_shape)
        with torch.no_grad():
            noise = 2 * torch.bernoulli(self.loc.new_full(shape, 0.5)) - 1
        return self.transport(noise)

    def transport(self, noise: Tensor) -> Tensor:
        """Returns ``loc + scale * noise``, differentiable in ``loc`` and ``scale``."""
        return self.loc + self.scale * noise

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns the log-density of ``Normal(loc, scale)`` at ``value``, in nats."""
        if self._validate_args:
            self._validate_sample(value)
        standardised = (value - self.loc) / self.scale
        return -0.5 * standardised**2 - self.scale.log() - 0.5 * math.log(2 * math.pi)

    @property
    def mean(self) -> Tensor:
        """The mean, ``loc``."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """The variance, ``scale ** 2``."""
        return self.scale**2
