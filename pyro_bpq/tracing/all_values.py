r"""Gives every finite site each of its values, one in each row of a run."""

from __future__ import annotations

from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.rollout.features import Components, finite_components


class AllValues(Messenger):
    """Sets every latent site of finite support to its value ``k`` in row ``k``; reparameterised sites are drawn once.

    A site of fewer values than rows begins again with its first one. All other sites are drawn as usual. An object
    serves one run of guide and model.
    """

    def __init__(self, rows: int, nesting: int) -> None:
        super().__init__()
        self.rows, self.nesting = rows, nesting
        self._drawn: dict[str, Tensor] = {}
        self._index: dict[Any, Tensor] = {}

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if msg["is_observed"] or isinstance(fn, _Subsample):
            return
        split = None if fn.has_rsample else finite_components(fn)
        if split is None and not fn.has_rsample:
            return
        if len(fn.batch_shape) != self.nesting:
            raise UnsupportedProgramError(f"Site {msg['name']!r} has no dimension for the rows of its values.")
        msg["value"] = self._drawn_once(msg) if split is None else self._values(fn, split)
        msg["done"] = True

    def _drawn_once(self, msg: Any) -> Tensor:
        # The guide comes first; the model has its value.
        if msg["name"] not in self._drawn:
            drawn = msg["fn"](*msg["args"], **msg["kwargs"])
            self._drawn[msg["name"]] = drawn[:1].expand_as(drawn)
        return self._drawn[msg["name"]]

    def _values(self, fn: Any, split: Components) -> Tensor:
        parameters = split.parameters(fn)
        key = (split.cardinality, split.size, fn.batch_shape, parameters.device)
        if key not in self._index:
            index = torch.arange(self.rows, device=parameters.device) % split.cardinality
            self._index[key] = index.reshape(-1, *(1,) * self.nesting).expand(*fn.batch_shape, split.size)
        value = split.value(self._index[key], fn)
        return value.to(parameters.dtype) if split.kind in ("bernoulli", "one_hot") else value
