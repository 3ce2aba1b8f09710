r"""Whether Python reads the same numbers in another call, without running its programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_bpq.record.function import Function
from pyro_bpq.record.key import Call, kind_of
from pyro_bpq.record.recorded import Recorded
from pyro_bpq.record.recording import Uncut
from pyro_bpq.record.values import Value

# Largest number of entries whose numbers are compared.
_MOST = 4096


@dataclass(frozen=True)
class Check:
    """The numbers that Python reads where no site reaches, as a function of the tensors of a call.

    Args:
        nodes: What stands for them: equal ones read equal numbers of equal tensors.
        stored: The parameters whose kinds matter.
        reached: Where a call has the tensors, by value.
        fixed: Other tensors.
        sized: Those of the numbers that count entries.
    """

    nodes: tuple[Any, ...] = ()
    stored: tuple[str, ...] = ()
    reached: tuple[tuple[Value, int], ...] = ()
    sized: frozenset[Value] = frozenset()
    fixed: Mapping[Value, Tensor] = field(default_factory=dict, compare=False)
    function: Function | None = field(default=None, compare=False)

    @torch.no_grad()
    def numbers(self, call: Call) -> tuple[Any, ...]:
        """The numbers that the call reads."""
        store = dict(pyro.get_param_store().named_parameters()) if self.stored else {}
        kinds = tuple(kind_of(store[name]) if name in store else None for name in self.stored)
        if self.function is None:
            return kinds
        tensors = {**self.fixed, **{value: call.tensors[i] for value, i in self.reached}}
        return *kinds, *(
            int(tensor.count_nonzero()) if value in self.sized else tensor.cpu().numpy().tobytes()
            for value, tensor in zip(self.function.wanted, self.function.at(tensors), strict=True)
        )


def check_of(recorded: Recorded) -> Check | None:
    """The check of a recorded run; ``None`` if what Python has read cannot be told in advance."""
    recording = recorded.recording
    wanted = tuple(dict.fromkeys(guard.value for guard in recording.guards))
    stored = tuple(recorded.stored)
    if not wanted:
        return Check(stored=stored)
    try:
        function = recording.cut(wanted)
    except Uncut:
        return None
    place = {value: i for i, value in recorded.reached.items()}
    others = [value for value in function.given if value not in place]
    size = sum(math.prod(recording.shapes[value]) for value in wanted)
    is_new = not (recording.lasts(others) and {*recorded.subsamples.values()}.isdisjoint(others))
    if function.draws or size > _MOST or is_new:
        return None
    sized = frozenset(
        guard.value
        for guard in recording.guards
        if isinstance(guard.read, tuple) and recording.dtypes[guard.value] is torch.bool
    )
    reached = tuple((value, place[value]) for value in function.given if value in place)
    fixed = {value: recording.tensors[value] for value in others}
    return Check((function.nodes, wanted), stored, reached, sized, fixed, function)
