"""Types of numbers: data may have another one than parameters, and half precision holds few numbers."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def in_single(value: Tensor) -> Tensor:
    """A value in single precision at least: in half precision squares overflow, and torch solves no systems."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def common_type(*values: Tensor) -> torch.dtype:
    """The type that numbers of all values can have."""
    return functools.reduce(torch.promote_types, (value.dtype for value in values))
