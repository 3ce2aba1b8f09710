r"""Parts of a recorded run as functions of some of its values: straight lines of operators, without Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_bpq.record.indexing import copied, filled, written
from pyro_bpq.record.laws import Draw, DrawRows, rows_of
from pyro_bpq.record.operators import effects_of
from pyro_bpq.record.tape import Tape
from pyro_bpq.record.values import Node, Value


def values_in(item: Any) -> Iterator[Value]:
    """The values among the arguments or results of a node, within lists too."""
    if item.__class__ is Value:
        yield item
    elif item.__class__ is tuple or item.__class__ is list:
        for part in item:
            yield from values_in(part)


def results_of(node: Node) -> list[Value]:
    """The values that a node makes, those that it writes included."""
    own = [node.result] if node.result.__class__ is Value else [*values_in(node.result)]
    return own + [new for _, new in node.written] if node.written else own


@dataclass(frozen=True, eq=False, repr=False)  # torch's transforms ask for the representation
class Function:
    """A straight line of operators.

    Args:
        nodes: The operators, in their order.
        given: The values that it takes.
        wanted: The values that it gives.
        shapes: The shape of each value.
        dtypes: Its type.
    """

    nodes: tuple[Node, ...]
    given: tuple[Value, ...]
    wanted: tuple[Value, ...]
    shapes: Sequence[Any] = ()
    dtypes: Sequence[torch.dtype] = ()

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """The wanted values, from tensors in place of the given ones."""
        found: dict[Value, Tensor] = dict(zip(self.given, tensors, strict=True))

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
        nodes = tuple(self.nodes[i] for i in sorted(needed))
        return replace(self, nodes=nodes, given=tuple(sorted(taken)), wanted=wanted)

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

        def wide(item: Any) -> Any:
            return torch.float64 if item is torch.float32 else item

        return replace(self, nodes=tuple(tree_map(wide, node) for node in self.nodes))

    @cached_property
    def draws(self) -> bool:
        """Whether an operator draws from a generator."""
        return any(isinstance(node.func, (Draw, DrawRows)) or effects_of(node.func).is_random for node in self.nodes)

    @cached_property
    def writes(self) -> bool:
        """Whether an operator writes in place."""
        # What an operator gives back may be what it wrote into; batch_norm gives a new tensor.
        kinds = ((node, effects_of(node.func)) for node in self.nodes)
        return any(node.written or (kind.writes and "batch_norm" not in kind.name) for node, kind in kinds)

    def without_writes(self, tensors: Sequence[Tensor]) -> tuple[Function, list[Tensor]]:
        """The same, in which no operator writes in place, and the constants that it takes besides.

        ``tensors`` are such as it is called with.
        """
        if not self.writes:
            return self, []
        noted = self.with_draws(lambda draw: draw.noted)
        with torch.no_grad():
            return flat(torch.func.functionalize(noted), [t.detach().clone() for t in tensors])


def _bind(found: dict[Value, Tensor], names: Any, result: Any) -> None:
    if names.__class__ is Value:
        found[names] = result
    elif names is not None:
        for name, part in zip(names, result, strict=True):
            _bind(found, name, part)


def flat(function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]) -> tuple[Function, list[Tensor]]:
    """The operators that run when a function is called with some tensors; and the constants that they take besides.

    The function takes these constants behind the tensors.

    Raises:
        NotImplementedError: If a result was made by something else than operators.
    """
    with Tape() as tape:
        given = tuple(map(tape.value_of, tensors))
        found = function(*tensors)
        wanted = tuple(map(tape.value_of, found))
    cut = Function(tuple(tape.nodes), given, wanted, tape.shapes, tape.dtypes).cut(wanted, {*given})
    if lost := [tape.opaque[value] for value in cut.given if value in tape.opaque]:
        raise NotImplementedError(lost[0])
    if tape.guards:
        raise NotImplementedError("a number is read")
    constants = [value for value in cut.given if value not in given]
    nodes = tuple(node._replace(func=_INSTEAD.get(node.func, node.func)) for node in cut.nodes)
    return replace(cut, nodes=nodes, given=(*given, *constants)), [tape.inputs[value] for value in constants]


# Operators that torch runs row by row, and functions that do the same for all rows at once.
_INSTEAD: Mapping[Any, Callable[..., Tensor]] = MappingProxyType(
    {
        torch.ops.aten.copy.default: copied,
        torch.ops.aten.fill.Scalar: filled,
        torch.ops.aten.fill.Tensor: filled,
        torch.ops.aten.index_put.default: written,
    }
)


class InRows:
    """A function that runs row by row."""

    def __init__(self, function: Function, has_rows: Sequence[bool]) -> None:
        self.function, self.has_rows, self.draws = function, has_rows, function.draws

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """The wanted values of all rows."""
        number = next(len(tensor) for tensor, own in zip(tensors, self.has_rows, strict=True) if own)
        found = []
        for row in rows_of(number, tensors, self.has_rows):
            with drawing(self.function):  # the same noise in each row
                found.append(self.function(*row))
        return [torch.stack(parts) for parts in zip(*found, strict=True)]


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
