"""The tensors of a multi-sample bound: its surrogate, the signals of its samples, and the features of its critics.

Log-weights ``log_w`` have the shape ``(outer, K, rows)``, in nats.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MEANS = ("geometric", "arithmetic", None)
# Critics see smaller log-weights, in nats, as this number.
_LOWEST = -1e4


def multi_sample_bound(log_w: Tensor, score: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
    """Minus the bound, detached, and its surrogate, both summed over outer samples and rows.

    ``score`` is ``log q`` of the sites that are not reparameterised, and ``signal`` that of
    :func:`leave_one_out_signal`, detached; both have the shape of ``log_w``.
    """
    bound = _bound(log_w)
    return -bound.detach().sum(), -(signal * score).sum() - bound.sum()


@torch.no_grad()
def leave_one_out_signal(log_w: Tensor, baseline: str | None) -> Tensor:
    """Signal of each sample, of the shape of ``log_w``: ``L̂ - L̂_-k`` with a baseline of :data:`MEANS`, else ``L̂``.

    ``L̂`` is the logarithm of the mean weight of all samples. In ``L̂_-k`` the weight of sample ``k`` is replaced by
    the geometric or arithmetic mean of the others. A single sample has no baseline.
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
    """Logarithms of the arithmetic and the geometric mean of the other samples' weights, for each sample."""
    number = log_w.shape[1]
    own = torch.eye(number, dtype=torch.bool, device=log_w.device).unsqueeze(-1)
    # (outer, k, samples, rows)
    others = log_w.unsqueeze(1).expand(-1, number, -1, -1)
    arithmetic = others.masked_fill(own, -math.inf).logsumexp(2) - math.log(number - 1)
    return arithmetic, others.masked_fill(own, 0.0).sum(2) / (number - 1)


@torch.no_grad()
def features_of_others(log_w: Tensor) -> Tensor:
    """The logarithms of both means of the others' weights, ``(outer, K, rows, 2)``; no features for ``K = 1``."""
    if log_w.shape[1] == 1:
        return log_w.new_zeros(*log_w.shape, 0)
    return torch.stack(_means_of_others(log_w), -1).clamp(min=_LOWEST)
