r"""A recorded run, and parts of it as functions of some of its values: straight lines of operators, without Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_bpq.record.key import Call, kind_of
from pyro_bpq.record.laws import Draw, rows_of
from pyro_bpq.record.operators import copied, effects_of, filled, written, written_arguments
from pyro_bpq.record.tape import Tape
from pyro_bpq.record.values import Node, Notes, Tensors, Value, results_of, values_in


@dataclass(frozen=True, eq=False, repr=False)  # torch's transforms ask for the representation
class Function:
    """A straight line of operators.

    Args:
        nodes: The operators, in their order.
        given: The values that it takes.
        wanted: The values that it gives.
        shapes: The shape of each value.
        dtypes: Its type.
        fixed: Tensors that are the same in every call, by value.
        asked: What the given values are called in the function that it was made from.
    """

    nodes: tuple[Node, ...]
    given: tuple[Value, ...]
    wanted: tuple[Value, ...]
    shapes: Sequence[Any] = ()
    dtypes: Sequence[torch.dtype] = ()
    fixed: Tensors = field(default_factory=dict)
    asked: tuple[Value, ...] = ()

    def at(self, tensors: Tensors, seed: int = 0) -> list[Tensor]:
        """The wanted values, from tensors by value, which stay as they are, as do the global generators."""
        taken = [tensors[value] for value in self.asked or self.given]
        with drawing(self, seed):
            return self(*(tensor.clone() for tensor in taken) if self.spoils else taken)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """The wanted values, from tensors in place of the given ones."""
        found: dict[Value, Tensor] = {**self.fixed, **dict(zip(self.given, tensors, strict=True))}

        def put(item: Any) -> Any:
            kind = item.__class__
            if kind is Value:
                return found[item]
            return [put(part) for part in item] if kind is list else tuple(map(put, item)) if kind is tuple else item

        for node, gone in zip(self.nodes, self._gone, strict=True):
            named = {name: put(value) for name, value in node.kwargs.items()} if node.kwargs else {}
            _bind(found, node.result, node.func(*map(put, node.args), **named))
            for old, new in node.written:
                found[new] = found[old]
            for value in gone:
                del found[value]
        return [found[value] for value in self.wanted]

    @cached_property
    def _gone(self) -> list[tuple[Value, ...]]:
        """For each node the values that nobody asks for later."""
        needed, gone = set(self.wanted) | set(self.given), list[tuple[Value, ...]]()
        for node in reversed(self.nodes):
            pairs = [value for pair in node.written for value in pair]
            own = {*node.reads, *values_in(node.result), *pairs} - needed
            needed |= own
            gone.append(tuple(own))
        return gone[::-1]

    @cached_property
    def _maker(self) -> dict[Value, int]:
        """The position of the node that makes each value."""
        return {value: i for i, node in enumerate(self.nodes) for value in results_of(node)}

    def cut(self, wanted: Iterable[Value], given: Set[Value]) -> Function:
        """The operators that make some values from given ones, and from those that no operator makes."""
        wanted = tuple(wanted)
        pending, needed, taken = [*wanted], set[int](), set[Value]()
        while pending:
            value = pending.pop()
            if value in given or value not in self._maker:
                taken.add(value)
                continue
            makers = [self._maker[value]]
            while makers:
                i = makers.pop()
                if i not in needed:
                    needed.add(i)
                    pending += self.nodes[i].reads
                    makers += self.nodes[i].after
        place = {i: new for new, i in enumerate(sorted(needed))}
        kept = (self.nodes[i] for i in place)
        nodes = tuple(n._replace(after=tuple(place[i] for i in n.after)) if n.after else n for n in kept)
        return replace(self, nodes=nodes, given=tuple(sorted(taken - self.fixed.keys())), wanted=wanted)

    def reading(self, sources: Set[Value]) -> Iterator[Node]:
        """The operators that depend on some values."""
        known = {*sources}
        for node in self.nodes:
            if not known.isdisjoint(node.reads):
                known.update(results_of(node))
                yield node

    def with_draws(self, change: Callable[[Draw], Any]) -> Function:
        """The same with something else in place of draws."""
        nodes = (n._replace(func=change(n.func)) if isinstance(n.func, Draw) else n for n in self.nodes)
        return replace(self, nodes=tuple(nodes))

    def in_double(self) -> Function:
        """The same in double precision."""
        nodes = (tree_map(lambda item: torch.float64 if item is torch.float32 else item, node) for node in self.nodes)
        return replace(self, nodes=tuple(nodes))

    @cached_property
    def draws(self) -> bool:
        """Whether an operator draws from a generator."""
        return any(isinstance(node.func, Draw) or effects_of(node.func).is_random for node in self.nodes)

    @cached_property
    def writes(self) -> bool:
        """Whether an operator writes in place."""
        # What an operator gives back may be what it wrote into; batch_norm gives a new tensor.
        kinds = ((node, effects_of(node.func)) for node in self.nodes)
        return any(node.written or (kind.writes and "batch_norm" not in kind.name) for node, kind in kinds)

    @cached_property
    def spoils(self) -> bool:
        """Whether an operator may write into what the function was given."""
        own = set[Value]()  # values in memory that operators of the function have made
        for node in self.nodes:
            kind = effects_of(node.func)
            targets = [*values_in(written_arguments(kind, node.args, node.kwargs)), *(old for old, _ in node.written)]
            if not own.issuperset(targets):
                return True
            read = node.reads if kind.name == "set_" else targets or node.reads
            if kind.allocates or own.issuperset(read):
                own.update(results_of(node))
        return False

    def without_writes(self, tensors: Tensors) -> Function:
        """The same, in which no operator writes in place; ``tensors`` are such as it gets, by value."""
        if not self.writes:
            return self
        noted = self.with_draws(lambda draw: draw.noted)
        with torch.no_grad():
            taken = [tensors[value].detach().clone() for value in self.given]
            return flat(torch.func.functionalize(noted), taken, self.given)

    def in_rows(self, moved: Set[Value], tensors: Tensors) -> Function:
        """The same for all rows at once; some values have rows."""
        given = tuple(dict.fromkeys((*moved, *self.given)))
        row = {value: tensors[value][0] if value in moved else tensors[value] for value in given}
        plain, dims = replace(self, given=given), tuple(0 if value in moved else None for value in given)
        try:
            plain = plain.without_writes(row)
            # With noise of its own the row of the sample would differ from the others in more than its value.
            run = torch.func.vmap(plain, dims, randomness="same")
            return flat(run, [tensors[value] for value in given], given)
        except (NotImplementedError, RuntimeError):
            # Torch does not run an operator for many rows at once.
            def by_rows(*tensors: Tensor) -> list[Tensor]:
                found = []
                for row in rows_of(len(tensors[0]), tensors, [dim == 0 for dim in dims]):
                    with drawing(plain):  # the same noise in each row
                        found.append(plain(*(own.clone() for own in row) if plain.spoils else row))
                return [torch.stack(parts) for parts in zip(*found, strict=True)]

            node = Node(by_rows, plain.given, {}, plain.wanted, plain.given)
            return replace(plain, nodes=(node,))


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
    fixed: Tensors = field(default_factory=dict, compare=False)
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


def _bind(found: dict[Value, Tensor], names: Any, result: Any) -> None:
    if names.__class__ is Value:
        found[names] = result
    elif names is not None:
        for name, part in zip(names, result, strict=True):
            _bind(found, name, part)


def flat(function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], asked: Sequence[Value] = ()) -> Function:
    """The operators that run when a function is called with some tensors, which have been ``asked`` for.

    What it draws here is for nobody: the global generators stay as they are.

    Raises:
        NotImplementedError: If a result was made by something else than operators.
    """
    with seeded(0), _untold(), Tape() as tape:
        given = tuple(map(tape.value_of, tensors))
        found = function(*tensors)
        wanted = tuple(map(tape.value_of, found))
    cut = Function(tuple(tape.nodes), (), (), tape.shapes, tape.dtypes).cut(wanted, {*given})
    if lost := [tape.opaque[value] for value in cut.given if value in tape.opaque]:
        raise NotImplementedError(lost[0])
    if tape.guards:
        raise NotImplementedError("a number is read")
    nodes = tuple(node._replace(func=_INSTEAD.get(node.func, node.func)) for node in cut.nodes)
    fixed = {value: tape.inputs[value] for value in cut.given if value not in given}
    return replace(cut, nodes=nodes, given=given, fixed=fixed, asked=tuple(asked))


# Operators that torch runs row by row, and functions that do the same for all rows at once.
_INSTEAD: Mapping[Any, Callable[..., Tensor]] = MappingProxyType(
    {
        torch.ops.aten.copy.default: copied,
        torch.ops.aten.fill.Scalar: filled,
        torch.ops.aten.fill.Tensor: filled,
        torch.ops.aten.index_put.default: written,
    }
)


def drawing(function: Function, seed: int = 0) -> contextlib.AbstractContextManager[None]:
    """Draws of a function leave the global generators as they are."""
    return seeded(seed) if function.draws else contextlib.nullcontext()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's global generators start from a seed, and are as before afterwards."""
    devices = [*range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        # torch.manual_seed() is slow: it formats the call stack for every kind of device that is absent.
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield


@contextlib.contextmanager
def _untold() -> Iterator[None]:
    """Torch writes no lines on standard error about operators that it runs row by row.

    It does not tell whether it would. So the lines are on afterwards, also where the user has turned them off.
    """
    functorch: Any = torch._C._functorch
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)


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
    def of(cls, tape: Tape, given: Tensors, marked: Iterable[Value] = ()) -> Recording:
        """What a tape has written down; values of sites, and indices of plates, are ``given``."""
        notes = {part.name: getattr(tape, part.name) for part in fields(Notes)}
        tensors = {**tape.inputs, **tape.before, **tape.noise, **given}
        noise, marks = frozenset(tape.noise), tuple(dict.fromkeys(marked))
        return cls(**notes, tensors=tensors, noise=noise, written=tape.written, marked=marks)

    @cached_property
    def whole(self) -> Function:
        """All operators."""
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

    @cached_property
    def plain(self) -> tuple[Function, dict[Value, Value]]:
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
        function = self.whole.cut(wanted, known if sees_all else known | self.opaque.keys())
        lost = [] if sees_all else [value for value in function.given if value not in known]
        if lost:
            raise Uncut(self.opaque.get(lost[0], "a tensor from elsewhere"))
        return function
