r"""Sets the values of latent sites of a program."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from pyro.distributions import OneHotCategorical
from pyro.poutine.messenger import Messenger
from torch import Tensor

__all__ = ["Substitute", "relaxed_log_prob"]


class Substitute(Messenger):
    """Sets the values of named latent sites; all other sites are drawn as usual.

    Args:
        values: Value of each site, by name; also the indices of subsampled plates.
        relaxed: Sites whose values may lie between the values of their support. ``log q`` and ``log p`` of a one-hot
            site are then linear in the value. torch instead rounds to the nearest vertex: jumps and no slope.
    """

    def __init__(self, values: Mapping[str, Any], relaxed: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.values, self.relaxed = values, relaxed

    def __repr__(self) -> str:
        return f"Substitute({', '.join(self.values)})"

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]
            msg["done"] = True
            if msg["name"] in self.relaxed:
                msg["fn"] = _linear(msg["fn"])


def relaxed_log_prob(fn: Any, value: Tensor) -> Tensor:
    """Log-probability at a value that may lie between support values, as in :class:`Substitute`."""
    found: Tensor = _unchecked(_linear(fn)).log_prob(value)
    return found


def _unchecked(fn: Any) -> Any:
    """Returns a copy of the distribution that does not check values."""
    fn = copy.copy(fn)
    fn._validate_args = False
    if hasattr(fn, "base_dist"):
        fn.base_dist = _unchecked(fn.base_dist)
    return fn


class _LinearOneHot(OneHotCategorical):
    def log_prob(self, value: Tensor) -> Tensor:
        # A value of probability zero has a logit of -inf; the clamp keeps 0 * -inf from becoming NaN.
        return (value * self.logits.clamp(min=max(-1e6, torch.finfo(self.logits.dtype).min))).sum(-1)


def _linear(fn: Any) -> Any:
    """Returns the distribution, with a one-hot base distribution made linear in the value."""
    if isinstance(fn, torch.distributions.OneHotCategorical):
        return _LinearOneHot(logits=fn.logits, validate_args=False)
    if hasattr(fn, "base_dist"):
        base = _linear(fn.base_dist)
        if base is not fn.base_dist:
            fn = copy.copy(fn)
            fn.base_dist = base
    return fn
