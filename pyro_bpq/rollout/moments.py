r"""First two moments of a site's distribution. They centre critics of values without finite support.

Let ``e_i = (x_i - μ_i) / σ_i``. The functions ``e_i`` and ``e_i² - 1`` have mean zero for every distribution with
finite mean and variance. Components need not be independent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Standardised(NamedTuple):
    """Centred powers of a value.

    Args:
        powers: ``e`` and ``e² - 1``, ``(..., D, 2)``, detached; zero where the variance is zero.
        expected: Expectation of the same functions of ``x``, with their centre and scale held fixed. It is zero, and
            it has a gradient in the distribution's parameters.
        mean: Mean ``(..., D)``, detached.
        spread: Standard deviation ``(..., D)``, detached; one where the standard deviation is zero.
    """

    powers: Tensor
    expected: Tensor
    mean: Tensor
    spread: Tensor


def has_moments(fn: Any) -> bool:
    """Whether a distribution provides a finite mean and variance of its values."""
    try:
        mean, variance = fn.mean, fn.variance
    except (AttributeError, NotImplementedError):
        return False
    shape = fn.batch_shape + fn.event_shape
    if mean.shape != shape or variance.shape != shape:
        return False
    return bool((mean.isfinite() & variance.isfinite()).all())


def standardise(value: Tensor, mean: Tensor, variance: Tensor) -> Standardised:
    r"""Returns centred powers of a value, and their expectation with its gradient.

    For the frozen centre ``m`` and scale ``s`` (the current mean and standard deviation)

        E[(x - m) / s] = (μ - m) / s,   E[((x - m) / s)² - 1] = (σ² + (μ - m)²) / s² - 1.

    Both are zero here. Their gradients are ``∇μ / s`` and ``∇σ² / s²``.

    Args:
        value: Values ``(..., D)``.
        mean: Means of the values, with gradient.
        variance: Variances of the values, with gradient.
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
