r"""The tensors of a multi-sample bound: its surrogate, what the sites of each sample see, and what critics see."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MEANS = ("geometric", "arithmetic", None)
# Log-weights below this, in nats, look alike to critics.
_LOWEST = -1e4


def multi_sample_bound(log_w: Tensor, score: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
    r"""Minus the bound, and what has its gradient in expectation.

    Args:
        log_w: Log-weights ``(outer, K, rows)`` in nats, with gradient.
        score: ``log q`` of the sites that are not reparameterised, same shape, with gradient.
        signal: What they see, same shape, detached, see :func:`leave_one_out_signal`.

    Returns:
        The sum over outer samples and rows, detached, and the surrogate, a scalar.
    """
    bound = _bound(log_w)
    return -bound.detach().sum(), -(signal * score).sum() - bound.sum()


@torch.no_grad()
def leave_one_out_signal(log_w: Tensor, baseline: str | None) -> Tensor:
    """What the sites of each sample see: ``L̂ - L̂_-k``, or ``L̂`` alone.

    Args:
        log_w: Log-weights ``(outer, K, rows)`` in nats.
        baseline: ``"geometric"``, ``"arithmetic"`` or ``None``.

    Returns:
        Signals of the same shape, detached.
    """
    signal = _bound(log_w).unsqueeze(1).expand_as(log_w)
    return signal if baseline is None or log_w.shape[1] == 1 else signal - _without_each(log_w, baseline)


def _bound(log_w: Tensor) -> Tensor:
    return log_w.logsumexp(1) - math.log(log_w.shape[1])


def _without_each(log_w: Tensor, baseline: str) -> Tensor:
    """``L̂_-k`` of every sample."""
    arithmetic, geometric = _means_of_others(log_w)
    if baseline == "arithmetic":
        return arithmetic
    number = log_w.shape[1]
    return torch.logaddexp(arithmetic + math.log(number - 1), geometric) - math.log(number)


def _means_of_others(log_w: Tensor) -> tuple[Tensor, Tensor]:
    """For every sample the logarithms of the arithmetic and the geometric mean of the others' weights."""
    number = log_w.shape[1]
    own = torch.eye(number, dtype=torch.bool, device=log_w.device).unsqueeze(-1)
    # (outer, k, samples, rows)
    others = log_w.unsqueeze(1).expand(-1, number, -1, -1)
    arithmetic = others.masked_fill(own, -math.inf).logsumexp(2) - math.log(number - 1)
    return arithmetic, others.masked_fill(own, 0.0).sum(2) / (number - 1)


@torch.no_grad()
def features_of_others(log_w: Tensor) -> Tensor:
    """What critics see of the other samples: with it a signal follows from the sample's own weight.

    Args:
        log_w: Log-weights ``(outer, K, rows)`` in nats.

    Returns:
        Logarithms of the arithmetic and the geometric mean of the others' weights, ``(outer, K, rows, 2)``, detached;
        no features for ``K = 1``.
    """
    if log_w.shape[1] == 1:
        return log_w.new_zeros(*log_w.shape, 0)
    # A sample that cannot occur has weight zero.
    return torch.stack(_means_of_others(log_w), -1).clamp(min=_LOWEST)
