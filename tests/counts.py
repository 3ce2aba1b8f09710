"""Count distributions that enumeration knows up to a largest value; the mass above it is below rounding in tests."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor


class _Listed:
    """Lists the values below ``most``."""

    has_enumerate_support = True
    most = 16

    def enumerate_support(self: Any, expand: bool = True) -> Tensor:
        values = torch.arange(float(self.most), dtype=self.mean.dtype).reshape(-1, *(1,) * len(self.batch_shape))
        return values.expand(-1, *self.batch_shape) if expand else values


class ListedPoisson(_Listed, dist.Poisson):
    pass


class ListedNegativeBinomial(_Listed, dist.NegativeBinomial):
    pass


class ListedGeometric(_Listed, dist.Geometric):
    pass
