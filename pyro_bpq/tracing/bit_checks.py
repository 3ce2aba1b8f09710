r"""Checks large Bernoulli values in a fraction of the time of Pyro's validation."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Independent

# Smallest number of entries for which copying a distribution takes less time than its check.
_LARGE = 1 << 14


def score_bits_unchecked(trace: Any) -> dict[str, Any]:
    """Puts distributions into a trace that do not check values which are seen to be zeros and ones here.

    All other values go through Pyro's validation, which says what is wrong with them.

    Returns:
        The distributions that were there, by name of the site; put them back after the scoring.
    """
    own = {}
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and isinstance(site["value"], Tensor) and site["value"].numel() >= _LARGE:
            value = site["value"].detach()
            if _is_validated(site["fn"], value) and _are_bits(value):
                own[name], site["fn"] = site["fn"], _unvalidated(site["fn"])
    return own


def _is_validated(fn: Any, value: Tensor) -> bool:
    """Whether torch would check the entries of a value of Bernoulli components, whose shape fits."""
    if not value.is_floating_point():
        return False
    base = fn
    while isinstance(base, Independent) and _is_of_library(base):
        base = base.base_dist
    if not (isinstance(base, Bernoulli) and _is_of_library(base) and base._validate_args):
        return False
    shape = fn.batch_shape + fn.event_shape
    return value.dim() >= len(fn.event_shape) and value.shape == shape[len(shape) - value.dim() :]


def _is_of_library(fn: Any) -> bool:
    return bool(type(fn).log_prob.__module__.startswith(("torch.", "pyro.")))


def _are_bits(value: Tensor) -> bool:
    """Whether all entries are zero or one: the only numbers that are their squares."""
    # Comparisons of tensors take several times as long.
    return float(torch.addcmul(value, value, value, value=-1.0).abs_().sum()) == 0.0


def _unvalidated(fn: Any) -> Any:
    """A copy of a distribution that does not check values."""
    if isinstance(fn, Independent):
        own = copy.copy(fn)
        own.base_dist = _unvalidated(fn.base_dist)
        return own
    # Later readers find these in the distribution itself.
    _ = fn.logits
    own = copy.copy(fn)
    own._validate_args = False
    return own
