r"""First two moments of a site's distribution, by which critics of values without finite support are centred.

With ``e_i = (x_i - μ_i) / σ_i`` the functions ``e_i`` and ``e_i² - 1`` have mean zero whatever the distribution is,
as long as mean and variance are finite; components need not be independent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Standardised", "has_moments", "standardise"]


class Standardised(NamedTuple):
    """Centred powers of a value.

    Args:
        powers: ``e`` and ``e² - 1``, ``(..., D, 2)``, detached; zero where the variance is.
        expected: Expectation of the same functions of ``x``, their centre and scale held fixed: zero, with
            the gradient of the distribution's parameters.
        mean: Mean ``(..., D)``, detached.
        spread: Standard deviation ``(..., D)``, detached, one where it is zero.
    """

    powers: Tensor
    expected: Tensor
    mean: Tensor
    spread: Tensor


def has_moments(fn: Any) -> bool:
    """Whether a distribution tells a finite mean and variance of its values."""
    try:
        mean, variance = fn.mean, fn.variance
    except (AttributeError, NotImplementedError):
        return False
    shape = fn.batch_shape + fn.event_shape
    if mean.shape != shape or variance.shape != shape:
        return False
    return bool((mean.isfinite() & variance.isfinite()).all())


def standardise(value: Tensor, mean: Tensor, variance: Tensor) -> Standardised:
    r"""Centred powers of a value, and the gradient of their expectation.

    For the frozen centre ``m`` and scale ``s`` (the current mean and standard deviation)

        E[(x - m) / s] = (μ - m) / s,   E[((x - m) / s)² - 1] = (σ² + (μ - m)²) / s² - 1,

    both zero here, with gradients ``∇μ / s`` and ``∇σ² / s²``.

    Args:
        value: Values ``(..., D)``.
        mean: Their means, with gradient.
        variance: Their variances, with gradient.

    Returns:
        The powers and their expectations.
    """
    centre, square = mean.detach(), variance.detach()
    is_random = square > 0
    spread = torch.where(is_random, square, torch.ones_like(square)).sqrt()
    unit = ((value.detach() - centre) / spread).masked_fill(~is_random, 0.0)
    powers = torch.stack((unit, (unit.square() - 1.0).masked_fill(~is_random, 0.0)), -1)
    first = (mean - centre) / spread
    second = (variance - square) / spread.square()
    expected = torch.stack((first, second), -1).masked_fill(~is_random.unsqueeze(-1), 0.0)
    return Standardised(powers, expected, centre, spread)
