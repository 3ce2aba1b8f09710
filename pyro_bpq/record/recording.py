r"""A recorded run: what depends on what, and what it would cost at other values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.record.elements import Labels, Reader, Unknown
from pyro_bpq.record.function import Function
from pyro_bpq.record.tape import Tape
from pyro_bpq.record.values import Notes, Value


class Uncut(Exception):
    """A part of a recording cannot run by itself."""


@dataclass(eq=False)
class Recording(Notes):
    """A run as operators.

    Args:
        tensors: What no operator has made, by value: inputs, values of sites, noise.
        noise: Leaves that are random numbers.
        written: Leaves that the run has written into: the tensor, and what was in it before.
        marked: Values whose elements will be asked for.

    For the rest see :class:`Notes`.
    """

    tensors: dict[Value, Tensor] = field(default_factory=dict)
    noise: Set[Value] = frozenset()
    written: dict[Value, tuple[Tensor, Tensor]] = field(default_factory=dict)
    marked: tuple[Value, ...] = ()
    _flat: dict[Any, Any] = field(default_factory=dict, repr=False)  # functions without writes

    @classmethod
    def of(cls, tape: Tape, given: Mapping[Value, Tensor], marked: Iterable[Value] = ()) -> Recording:
        """What a tape has written down; values of sites, and indices of plates, are ``given``."""
        notes = {part.name: getattr(tape, part.name) for part in fields(Notes)}
        tensors = {**tape.inputs, **tape.before, **tape.noise, **given}
        noise, marks = frozenset(tape.noise), tuple(dict.fromkeys(marked))
        return cls(**notes, tensors=tensors, noise=noise, written=tape.written, marked=marks)

    @cached_property
    def _whole(self) -> Function:
        return Function(tuple(self.nodes), (), (), self.shapes, self.dtypes)

    def lasts(self, values: Iterable[Value]) -> bool:
        """Whether no value is one that another run has anew."""
        return self.noise.isdisjoint(values) and self.written.keys().isdisjoint(values)

    def reads(self, value: Value, source: Value) -> bool:
        """Whether a value depends on the value of a site."""
        return bool(self.masks[value] & self.masks[source])

    @cached_property
    def known(self) -> Callable[[Value], Tensor | None]:
        """Gives the numbers of a value that are the same in every run, as those of ``torch.arange``."""

        @functools.cache
        def known(value: Value) -> Tensor | None:
            try:
                function = None if self.masks[value] else self.cut([value])
            except Uncut:
                return None
            if function is None or not self.constants.issuperset(function.given):
                return None
            return function(*(self.tensors[given] for given in function.given))[0]

        return known

    def labels(
        self, wanted: Sequence[Value], starts: Mapping[Value, Labels | Unknown]
    ) -> tuple[list[Labels | Unknown], int]:
        """What elements of a source each wanted value reads, and how many operators were followed.

        Args:
            wanted: The values.
            starts: The labels of the source, and of what was drawn from it, by value.
        """
        function, known, moved = self.cut(wanted, starts, sees_all=True), self.known, {value: value for value in starts}
        function = replace(function, nodes=tuple(function.reading(starts.keys())))
        if function.writes:
            try:
                whole, moved = self._without_writes(self.marked if {*wanted} <= {*self.marked} else tuple(wanted))
                function = whole.cut([moved[value] for value in wanted], {*whole.given})
            except (RuntimeError, NotImplementedError, KeyError) as error:
                return [Unknown(str(error).split("\n")[0])] * len(wanted), 0
            known = lambda value: None  # noqa: E731
        read = Reader(function, {moved[value]: own for value, own in starts.items() if value in moved}, known)
        return [read.labels(value) for value in function.wanted], len(function.nodes)

    def _without_writes(self, wanted: tuple[Value, ...]) -> tuple[Function, dict[Value, Value]]:
        """The operators that make some values, none of which writes in place; their values, by those of the run."""
        if wanted not in self._flat:
            function = self.cut(wanted, sees_all=True)
            given = [self.tensors[value] for value in function.given]
            with torch.random.fork_rng({tensor.device.index for tensor in given if tensor.is_cuda}):
                plain, _ = function.without_writes(given)
            pairs = zip((*function.given, *wanted), (*plain.given[: len(given)], *plain.wanted), strict=True)
            self._flat[wanted] = plain, dict(pairs)
        return self._flat[wanted]

    def cut(
        self,
        wanted: Iterable[Value],
        given: Iterable[Value] = (),
        redrawn: Set[Value] = frozenset(),
        sees_all: bool = False,
    ) -> Function:
        """The operators between some given values, or leaves of the run, and what is wanted.

        Sites that are ``redrawn`` are drawn anew. With ``sees_all`` it need not run:
        values may be on the way that cannot be made again.

        Raises:
            Uncut: If a value on the way cannot be made again.
        """
        known = {*self.tensors, *given} - redrawn
        function = self._whole.cut(wanted, known if sees_all else known | self.opaque.keys())
        lost = [] if sees_all else [value for value in function.given if value not in known]
        if lost:
            raise Uncut(self.opaque.get(lost[0], "a tensor from elsewhere"))
        return function
