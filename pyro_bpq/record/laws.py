"""Distributions with other tensors in place of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from pyro.poutine.runtime import effectful
from torch import Tensor
from torch.distributions import Distribution, Transform
from torch.distributions.utils import lazy_property


def mapped(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with other tensors; a part without tensors, or whose tensors stay, is the same object."""
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, dict):
        return _changed(item, change) or item
    if isinstance(item, (list, tuple)):
        parts = _changed(dict(enumerate(item)), change)
        if parts is None:
            return item
        return type(item)(*parts.values()) if hasattr(item, "_fields") else type(item)(parts.values())
    if isinstance(item, (Distribution, Transform)):
        found = _changed({name: value for name, value in vars(item).items() if name not in _CACHES}, change)
        if found is None:
            return item
        twin = copy.copy(item)
        vars(twin).update(found)
        vars(twin).update({name: None for name in _CACHES & vars(twin).keys()})
        return twin
    return item


# What transforms and conditional distributions remember of their last call.
_CACHES = frozenset(("_inv", "_cached_x_y"))


def _changed(parts: Mapping[Any, Any], change: Callable[[Tensor], Tensor]) -> dict[Any, Any] | None:
    found = {key: mapped(value, change) for key, value in parts.items()}
    return found if any(found[key] is not value for key, value in parts.items()) else None
