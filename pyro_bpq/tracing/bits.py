r"""Draws and checks large Bernoulli values in a fraction of the time that torch and Pyro take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Independent

from pyro_bpq.tracing.substitute import unchecked

# Smallest number of entries for which this takes less time than it saves.
_LARGE = 1 << 14


def draw_bits(msg: Any) -> Tensor | None:
    """Draws the value of a sample statement on a CPU, if it is large and all Bernoulli; else ``None``.

    An entry is 1 with its probability, rounded to the resolution of torch's uniform numbers: 2^-24 in single precision.
    Torch draws each entry by itself, with twice as many random numbers.
    """
    fn = msg["fn"]
    if not isinstance(fn, (Bernoulli, Independent)) or (fn.batch_shape + fn.event_shape).numel() < _LARGE:
        return None
    if msg["args"] or msg["kwargs"] or not _is_library_bernoulli(fn, "sample", "__call__"):
        return None
    base = _base(fn)
    shape, dtype = base.batch_shape, base.probs.dtype
    is_served = base.probs.device.type == "cpu" and dtype in (torch.float32, torch.float64)
    if not is_served:
        return None
    # Half the distance of two of torch's uniform numbers.
    half_step = torch.finfo(dtype).eps / 4.0
    with torch.no_grad():
        return (torch.rand(shape, dtype=dtype) < base.probs - half_step).to(dtype)


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
                # Later readers find these in the distribution itself.
                _ = _base(site["fn"]).logits
                own[name], site["fn"] = site["fn"], unchecked(site["fn"])
    return own


def _is_validated(fn: Any, value: Tensor) -> bool:
    """Whether torch would check the entries of a value of Bernoulli components, whose shape fits."""
    if not (value.is_floating_point() and _is_library_bernoulli(fn, "log_prob") and _base(fn)._validate_args):
        return False
    shape = fn.batch_shape + fn.event_shape
    return value.dim() >= len(fn.event_shape) and value.shape == shape[len(shape) - value.dim() :]


def _base(fn: Any) -> Any:
    while isinstance(fn, Independent):
        fn = fn.base_dist
    return fn


def _is_library_bernoulli(fn: Any, *methods: str) -> bool:
    """Whether a distribution is all independent Bernoulli components, and its methods are those of torch or Pyro."""
    while isinstance(fn, Independent) and _is_of_library(fn, methods):
        fn = fn.base_dist
    return isinstance(fn, Bernoulli) and _is_of_library(fn, methods)


def _is_of_library(fn: Any, methods: Sequence[str]) -> bool:
    return all(getattr(type(fn), name).__module__.startswith(("torch.", "pyro.")) for name in methods)


def _are_bits(value: Tensor) -> bool:
    """Whether all entries are zero or one: the only numbers that are their squares."""
    # Comparisons of tensors take several times as long.
    return float(torch.addcmul(value, value, value, value=-1.0).abs_().sum()) == 0.0
