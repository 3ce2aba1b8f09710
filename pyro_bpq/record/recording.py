r"""A recorded run: what depends on what, and what it would cost at other values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

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

    def known(self, value: Value) -> Tensor | None:
        """The numbers of a value that are the same in every run, as those of ``torch.arange``; ``None`` of others."""
        try:
            function = self.cut([value])
        except Uncut:
            return None
        return function.at(self.tensors)[0] if self.constants.issuperset(function.given) else None

    def labels(
        self, wanted: Sequence[Value], starts: Mapping[Value, Labels | Unknown]
    ) -> tuple[list[Labels | Unknown], int]:
        """What elements of a source each wanted value reads, and how many operators were followed.

        Args:
            wanted: The values.
            starts: The labels of the source, and of what was drawn from it, by value.
        """
        function, known = self.cut(wanted, starts, sees_all=True), self.known
        # A view that no operator shows may read anything.
        own = {value: Unknown(self.opaque[value]) for value in function.given if value in self.opaque} | {**starts}
        function = replace(function, nodes=tuple(function.reading(own.keys())))
        if function.writes:
            try:
                whole, names = self._without_writes
            except (RuntimeError, NotImplementedError, KeyError) as error:
                return [Unknown(str(error).split("\n")[0])] * len(wanted), 0
            function = whole.cut([names[value] for value in wanted], {*whole.given})
            own, known = {names[value]: of for value, of in own.items() if value in names}, lambda value: None
        read = Reader(function, own, known)
        return [read.labels(value) for value in function.wanted], len(function.nodes)

    @cached_property
    def _without_writes(self) -> tuple[Function, dict[Value, Value]]:
        """The operators that make the marked values, none of which writes in place; its values, by those of the run."""
        plain = self.cut(self.marked, sees_all=True).without_writes(self.tensors)
        return plain, dict(zip((*plain.asked, *self.marked), (*plain.given, *plain.wanted), strict=True))

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
