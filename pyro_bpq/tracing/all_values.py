r"""Gives every site each of its values, one in each row of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.rollout.features import Components


class AllValues(Messenger):
    """Sets every named site to its value ``k`` in row ``k``; a site with fewer values begins again.

    Args:
        components: Values of the sites, by name.
        shared: Sites that are drawn once, for all rows.
        rows: Number of rows.
        nesting: Number of batch dimensions; the rows are the leftmost.
    """

    def __init__(self, components: Mapping[str, Components], shared: frozenset[str], rows: int, nesting: int) -> None:
        super().__init__()
        self.components, self.shared, self.rows, self.nesting = components, shared, rows, nesting

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if msg["is_observed"] or (name not in self.components and name not in self.shared):
            return
        if len(fn.batch_shape) != self.nesting:
            raise UnsupportedProgramError(f"Site {name!r} has no dimension for the rows of its values.")
        if name in self.shared:
            drawn = fn(*msg["args"], **msg["kwargs"])
            msg["value"] = drawn[:1].expand_as(drawn)
        else:
            msg["value"] = self._values(fn, self.components[name])
        msg["done"] = True

    def _values(self, fn: Any, split: Components) -> Tensor:
        parameters = split.parameters(fn)
        index = torch.arange(self.rows, device=parameters.device) % split.cardinality
        shaped = index.reshape(-1, *(1,) * self.nesting).expand(*fn.batch_shape, 1)
        value = split.value(shaped, fn)
        return value.to(parameters.dtype) if split.kind in ("bernoulli", "one_hot") else value
