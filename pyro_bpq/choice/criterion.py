r"""Compares unbiased gradient estimators of the same gradient by progress per second.

With a well-chosen step size, progress per second is proportional to ``1 / (t (1 + v))``. A step takes ``t`` seconds.
``v`` is the variance of the gradient over the squared norm of its mean. All candidates have the same mean, so the best
one has the least

    J = t Σ_p E|g_p|² / s_p

over the tensors ``p`` of model and guide, with a scale ``s_p`` that all candidates share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev

GAIN = 0.1
"""Smallest relative gain for which a choice changes."""
_BLOCKS = 4
_ERRORS = 2.0


def normalised(squares: Mapping[str, Sequence[Sequence[float]]], present: str) -> dict[str, list[float]]:
    r"""``Σ_p |g_p|² / s_p`` of each round; ``s_p`` is the mean of ``|g_p|²`` over the present choice's rounds."""
    scales = [fmean(one) for one in zip(*squares[present], strict=True)]
    weights = [1.0 / scale if scale > 0.0 else 0.0 for scale in scales]
    return {
        name: [sum(w * square for w, square in zip(weights, one, strict=True)) for one in rounds]
        for name, rounds in squares.items()
    }


def blocks(values: Sequence[float]) -> list[float]:
    """Means of consecutive quarters of the rounds; the median of shorter blocks is too low where rounds are skewed."""
    size = -(-len(values) // _BLOCKS)
    return [fmean(values[i : i + size]) for i in range(0, len(values), size)]


def median_of_means(values: Sequence[float]) -> float:
    """A mean that single outliers do not move."""
    return median(blocks(values))


def products(seconds: Mapping[str, float], moments: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """``J`` of each candidate: less is better."""
    return {name: seconds[name] * median_of_means(rounds) for name, rounds in moments.items()}


def better_than(seconds: Mapping[str, float], moments: Mapping[str, Sequence[float]], present: str) -> str:
    """Name of the candidate with the least ``J``, or ``present`` if the gain is below :data:`GAIN` or not significant.

    Args:
        seconds: Seconds of a step, by name of the candidate.
        moments: ``Σ_p |g_p|² / s_p`` of each round, by name.
        present: Name of the present choice.
    """
    values = products(seconds, moments)
    best = min(values, key=lambda name: values[name])
    if not values[best] < (1.0 - GAIN) * values[present]:
        return present
    pairs = zip(moments[present], moments[best], strict=True)
    gains = [seconds[present] * old - seconds[best] * new for old, new in pairs]
    error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    return best if values[present] - values[best] > _ERRORS * error else present
