r"""A recorded run of guide and model: its costs as functions of the values of its sites."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_bpq.record.function import Function, flat
from pyro_bpq.record.operators import kind_of
from pyro_bpq.record.recording import Recording, Uncut
from pyro_bpq.record.tape import Value

# Largest number of cost elements in rows that run at once.
MOST_ELEMENTS = 1 << 21

Bound = Mapping[Value, Tensor]
"""The tensors of a run by value."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recording whose values have names.

    Args:
        recording: The operators.
        sites: The value of each latent site.
        costs: The value of each cost, or of its opposite, and the sign.
        arguments: Values of the arguments by their position.
        subsamples: Values of the indices that plates have drawn, by name of the plate.
    """

    recording: Recording
    sites: Mapping[str, Value]
    costs: Mapping[str, tuple[Value, float]]
    arguments: Mapping[int, Value]
    subsamples: Mapping[str, Value]
    # Functions that were asked for, by what was asked.
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    def bound(self, values: Mapping[str, Tensor], subsamples: Mapping[str, Any], arguments: Any) -> Bound:
        """The tensors of another run with the same operators.

        Args:
            values: The values of its sites.
            subsamples: The indices that its plates have drawn.
            arguments: Its arguments.
        """
        leaves = tree_leaves(arguments) if self.arguments else []
        found = dict(self.recording.leaves)
        found.update({value: leaves[i] for i, value in self.arguments.items()})
        found.update({value: subsamples[name] for name, value in self.subsamples.items() if name in subsamples})
        found.update({value: values[name].detach() for name, value in self.sites.items() if name in values})
        return found

    def can_cut(self, cost: str, site: str) -> bool:
        """Whether a cost is known at other values of a site."""
        return (cost, site) in self._cuttable

    @cached_property
    def _cuttable(self) -> frozenset[tuple[str, str]]:
        found = set()
        for cost, (value, _) in self.costs.items():
            try:
                function = self.recording.cut([value])
            except Uncut:
                continue
            found |= {(cost, name) for name, own in self.sites.items() if own in function.given}
        return frozenset(found)

    def at_rows(
        self, costs: Sequence[str], bound: Bound, moved: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Costs ``(rows, batch)`` where some sites have other values ``(rows, batch, event)``; detached."""
        names, sites, number = tuple(costs), tuple(moved), len(next(iter(moved.values())))
        size = sum(torch.Size(self.recording.shapes[self.costs[c][0]]).numel() for c in names)  # type: ignore[arg-type]
        rows = max(1, min(number, MOST_ELEMENTS // max(size, 1)))
        parts = []
        for start in range(0, number, rows):
            own = {name: value[start : start + rows] for name, value in moved.items()}
            parts.append(self._at_few(names, sites, bound, own))
        return {name: torch.cat([part[i] for part in parts]) for i, name in enumerate(names)}

    @torch.no_grad()
    def _at_few(
        self, costs: tuple[str, ...], sites: tuple[str, ...], bound: Bound, moved: Mapping[str, Tensor]
    ) -> list[Tensor]:
        number = len(next(iter(moved.values())))
        tensors = {**bound, **{self.sites[name]: value for name, value in moved.items()}}
        key = costs, sites, number
        if key not in self._made:
            self._made[key] = self._flat(costs, sites, tensors)
        function, given, constants = self._made[key]
        with _quiet(function):
            found = function(*(tensors[value] for value in given), *constants)
        each = zip(found, costs, strict=True)
        return [
            sign * (cost if cost.dim() > len(self.recording.shapes[value]) else cost.expand(number, *cost.shape))  # type: ignore[arg-type]
            for (cost, name) in each
            for value, sign in [self.costs[name]]
        ]

    def _flat(
        self, costs: tuple[str, ...], sites: tuple[str, ...], tensors: Bound
    ) -> tuple[Function, tuple[Value, ...], list[Tensor]]:
        """The function of all rows, the values that it takes, and constants."""
        moved = {self.sites[name] for name in sites}
        function = self.recording.cut([self.costs[name][0] for name in costs], moved)
        given, constants = function.given, list[Tensor]()
        with torch.random.fork_rng():
            if function.writes:
                plain = [self.recording.leaves[value].detach().clone() for value in given]
                function, constants = flat(torch.func.functionalize(_called(function)), plain)
            dims = (*(0 if value in moved else None for value in given), *(None for _ in constants))
            if all(dim is None for dim in dims):
                return function, given, constants
            asked = [tensors[value] for value in given]
            run = torch.func.vmap(_called(function), dims, randomness="different")
            function, more = flat(run, [*asked, *constants])
        return function, given, constants + more


def _called(function: Function) -> Callable[..., Any]:
    return lambda *tensors: tuple(function(*tensors))


@contextlib.contextmanager
def _quiet(function: Function) -> Iterator[None]:
    """Draws of a function leave the global generators as they are."""
    if any(kind_of(node.func).is_random for node in function.nodes):
        with torch.random.fork_rng():
            yield
    else:
        yield


def arguments_in(tape: Any, args: Any, kwargs: Any) -> dict[int, Value]:
    """The positions of the arguments that a tape knows, and their values; the tape must be active."""
    leaves = enumerate(tree_leaves((args, kwargs)))
    return {i: tape.value_of(leaf) for i, leaf in leaves if isinstance(leaf, Tensor) and tape.knows(leaf)}
