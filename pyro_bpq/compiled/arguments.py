r"""The arguments of a call, as far as a compiled step cannot take them as they are."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_bpq.record.key import Call

# Number of calls in a row with new arrays from which on they are told of.
_MANY = 4


class Arguments:
    """The arguments of the last call, as far as a recording cannot take them as they are."""

    def __init__(self) -> None:
        # The arrays of numpy of the last call, and the number of calls in a row that had new ones.
        self._arrays: list[weakref.ref[Any]] = []
        self._new_arrays = 0
        # The float arguments of the last call, by position, and those that have changed.
        self._floats: dict[int, float] = {}
        self._varying: set[int] = set()

    def new_arrays(self, call: Call) -> list[int]:
        """The arrays of numpy that were not there in the last call: a recording holds for the very same ones."""
        last, self._arrays = self._arrays, [weakref.ref(array) for _, array in call.arrays]
        known = {id(array) for array in (reference() for reference in last) if array is not None}
        new = [i for i, (_, array) in enumerate(call.arrays) if id(array) not in known]
        self._new_arrays = self._new_arrays + 1 if new else 0
        return new

    @property
    def has_many_new_arrays(self) -> bool:
        """Whether several calls in a row had new arrays."""
        return self._new_arrays >= _MANY

    def with_tensors(self, program: Any) -> Any:
        """The program with tensors in place of float arguments that change from step to step."""
        leaves, tree = tree_flatten((program.args, program.kwargs))
        floats = {i: leaf for i, leaf in enumerate(leaves) if issubclass(type(leaf), float)}
        if not floats:
            return program
        self._varying |= {i for i, value in floats.items() if self._floats.get(i, value) != value}
        self._floats = floats
        for i in self._varying & floats.keys():
            leaves[i] = torch.tensor(floats[i], dtype=torch.get_default_dtype())
        args, kwargs = tree_unflatten(leaves, tree)
        return program._replace(args=args, kwargs=kwargs)
