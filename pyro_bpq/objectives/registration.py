"""Shows critics that the user's optimiser trains to :class:`pyro.infer.SVI`, which steps what is in the param store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

import pyro
import torch
from pyro.params.param_store import ParamStoreDict
from torch import Tensor, nn


def register_critics(critics: nn.Module) -> str | None:
    """Puts the parameters of some critics into Pyro's param store, as :func:`pyro.module` does.

    The first of ``bpq_critics``, ``bpq_critics_1``, ... serves whose entries are none of another module's: it stays
    the same from step to step, and is the same again when a program is run anew. Entries that were loaded into the
    store (``ParamStoreDict.load``) together with the critics' ``state_dict`` hold equal values; the critics take their
    place, so that an optimiser finds its saved state by name.
    """
    named = dict(critics.named_parameters())
    if not named:
        return None
    store = pyro.get_param_store()
    module = next(name for name in _names() if _is_ours(name, named, store))
    stored = dict(store.named_parameters())
    for name, weight in named.items():
        key = f"{module}$$${name}"
        if stored.get(key, weight) is not weight:
            del store[key]
    pyro.module(module, critics)
    return module


def are_registered(critics: nn.Module) -> bool:
    """Whether Pyro's param store holds the parameters of some critics."""
    stored = {id(value) for _, value in pyro.get_param_store().named_parameters()}
    weights = list(critics.parameters())
    return bool(weights) and all(id(weight) in stored for weight in weights)


def _names() -> Iterator[str]:
    yield "bpq_critics"
    yield from (f"bpq_critics_{number}" for number in count(1))


def _is_ours(module: str, named: Mapping[str, Tensor], store: ParamStoreDict) -> bool:
    """Whether the store holds nothing under this name, or these weights, whatever else of theirs it holds."""
    start = f"{module}$$$"
    stored = {key.removeprefix(start): value for key, value in store.named_parameters() if key.startswith(start)}
    known = stored.keys() & named.keys()
    return not stored or (bool(known) and all(_is_same(named[name], stored[name]) for name in known))


def _is_same(weight: Tensor, stored: Tensor) -> bool:
    if weight is stored:
        return True
    is_alike = weight.shape == stored.shape and weight.dtype == stored.dtype
    return is_alike and torch.equal(weight, stored.to(weight.device))
