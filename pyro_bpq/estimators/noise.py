r"""Noise that estimators draw themselves."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["normal", "uniform"]


def uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform noise in the open interval (0, 1), of the shape, dtype and device of ``like``."""
    noise = torch.rand(like.shape, generator=generator, dtype=torch.float64)
    tiny = torch.finfo(like.dtype).eps
    return noise.clamp(tiny, 1.0 - tiny).to(like.device, like.dtype)


def normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal noise of the shape, dtype and device of ``like``."""
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device, like.dtype)
