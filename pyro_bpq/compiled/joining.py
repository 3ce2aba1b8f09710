r"""Joins equal operators of a recorded graph: what a program repeats site by site becomes one operator on all of them.

A chain of ``T`` sites calls each operator of its log-probabilities and of their gradients ``T`` times. Operators that
are alike but for their tensors, and that do not wait for each other, are called once, on tensors with a leading axis of
``T`` rows. Two operators of the same *height*, the longest way to the end of the graph, never wait for each other. So
a graph is compiled in a time that hardly grows with the number of sites, but for what has to run one after the other.

Draws keep their order, and so does what reads or writes tensors that the graph changes in place. Sums of many terms are
added up in another order, so results agree up to rounding.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_arg

from pyro_bpq.compiled.graphs import (
    Editor,
    Storage,
    draws,
    kind_of_node,
    levels_of,
    nodes_in,
    simplify,
    sum_of,
    told,
    value_of,
    written_by,
)

_ATEN = torch.ops.aten
# Fewer operators than these are not worth a stack of their tensors.
_FEWEST = 8
# A stack copies its tensors: from some particles on, that costs more than the joined calls win.
_MOST_ELEMENTS = 16
# Elementwise operators that torch does not mark as such.
_ELEMENTWISE = frozenset(
    "aten.binary_cross_entropy_with_logits.default aten._to_copy.default aten.softplus_backward.default "
    "aten.tanh_backward.default aten.zeros_like.default aten.ones_like.default".split()
)
# Operators that do the same on each row once dimensions are counted from the second one on and shapes get one more.
_OF_SHAPE = frozenset(
    "aten.view.default aten._unsafe_view.default aten.expand.default aten.unsqueeze.default "
    "aten.select_backward.default aten.stack.default aten.new_zeros.default".split()
)
# The same for tensors that have dimensions.
_BY_ROW = frozenset(
    "aten.squeeze.dim aten.select.int aten.slice.Tensor aten.transpose.int aten.sum.dim_IntList aten.mean.dim "
    "aten.logsumexp.default aten._softmax.default aten._log_softmax.default aten._log_softmax_backward_data.default "
    "aten._softmax_backward_data.default aten.gather.default aten.scatter_add.default aten.cat.default".split()
)
_DIMENSIONS = frozenset({"dim", "dim0", "dim1"})
_SHAPES = frozenset({"size", "input_sizes"})
_FREE_DRAWS = frozenset({_ATEN.rand.default, _ATEN.randn.default})
_VIEWS = frozenset({_ATEN.view.default, _ATEN._unsafe_view.default})


def joined(editor: Editor, keeps_draws: bool) -> fx.GraphModule:
    """The graph with equal operators joined."""
    # What many results wait for is alike by its way to the end, what waits for inputs alone by its way from the start.
    for from_start in (False, True):
        simplify(editor.module.graph)
        _Writer(editor, keeps_draws).write(from_start)
    editor.module.recompile()
    return editor.module


def _is_elementwise(node: fx.Node) -> bool:
    return str(node.target) in _ELEMENTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _can_join(node: fx.Node, storage: Storage) -> bool:
    value = value_of(node)
    if node.op != "call_function" or value is None or value.numel() > _MOST_ELEMENTS:
        return False
    # Rows are copies: what is written later would not be seen in them.
    if draws(node) or written_by(node) or storage.is_written(node):
        return False
    inputs = [each for each in map(value_of, node.all_input_nodes) if each is not None and each.device == value.device]
    if not inputs or len(inputs) < len(node.all_input_nodes):
        return False
    # A tensor without dimensions does not decide on the type of a result, a row of them does.
    floats = {each.dtype for each in inputs if each.is_floating_point()}
    others = {each.dtype for each in inputs if not each.is_floating_point()} - {torch.bool}
    if len(floats) > 1 or len(others) > 1:
        return False
    dims = [each.dim() for each in inputs]
    name = str(node.target)
    return _is_elementwise(node) or name in _OF_SHAPE or (name in _BY_ROW and 0 not in dims)


def _signature(node: fx.Node) -> Any:
    """Equal for operators that are alike but for their tensors."""
    return node.target, told((node.args, node.kwargs), kind_of_node), kind_of_node(node)


class _Row(NamedTuple):
    """A row of a tensor."""

    base: fx.Node  # the tensor
    number: int  # which row


_Found = fx.Node | _Row


class _Writer:
    """Writes a graph anew."""

    def __init__(self, editor: Editor, keeps_draws: bool) -> None:
        self._editor = editor
        self._keeps_draws = keeps_draws
        self._source = editor.module.graph
        self._graph = fx.Graph()
        self._found: dict[fx.Node, _Found] = {}
        self._rows: dict[_Row, fx.Node] = {}
        self._storage = Storage(self._source.nodes)

    def write(self, from_start: bool) -> None:
        """Writes it."""
        nodes = list(self._source.nodes)
        self._editor.module.graph = self._graph
        levels = levels_of(nodes, self._storage, from_start, self._keeps_draws)
        groups: dict[Any, list[fx.Node]] = {}
        for node in nodes:
            key: Any = node
            if not self._keeps_draws and node.target in _FREE_DRAWS:
                key = _signature(node)
            elif _can_join(node, self._storage):
                key = levels[node], _signature(node)
            groups.setdefault(key, []).append(node)
            if node.op in ("placeholder", "get_attr"):
                self._found[node] = self._copied(node)
        for group in sorted(groups.values(), key=lambda group: min(levels[node] for node in group)):
            self._write(group)
        self._graph.output(map_arg(nodes[-1].args[0], self._result))
        self._graph.eliminate_dead_code()

    def _write(self, group: list[fx.Node]) -> None:
        if group[0] in self._found:
            return
        rows = [self._as_row(node) for node in group]
        if len(group) >= _FEWEST and None in rows:
            self._join(group)
            return
        for node, row in zip(group, rows, strict=True):
            if node.target is sum_of:
                self._found[node] = self._sum(nodes_in(node.args))
            elif row is not None:
                self._found[node] = row
            elif node.target is _ATEN.stack.default and self._is_first(node):
                self._found[node] = self._own_stack(node)
            elif node.op != "output":
                self._found[node] = self._copied(node)

    def _copied(self, node: fx.Node) -> fx.Node:
        made = self._graph.node_copy(node, self._node)
        if node.target in _VIEWS and not self._storage.is_written(node):
            # Rows lie one after the other, whatever the strides of their originals.
            made.target = _ATEN.reshape.default
        made.meta = dict(node.meta)
        return made

    # Rows

    def _as_row(self, node: fx.Node) -> _Row | None:
        """A row of a tensor that exists, if that is what an operator takes."""
        taken: Any = node.args[0] if node.target is operator.getitem else node
        if taken.target is _ATEN.select.int:
            source, dim, index = taken.args
        elif taken.target is _ATEN.unbind.int and taken is not node:
            (source, dim), index = (*taken.args, 0)[:2], node.args[1]
        else:
            return None
        base, value = self._found[source], value_of(source)
        if isinstance(base, _Row) or value is None or dim % value.dim():
            return None
        return _Row(base, index % value.shape[0])

    def _is_first(self, node: fx.Node) -> bool:
        """Whether a stack makes a first dimension."""
        value, (_, dim) = value_of(node), (*node.args, node.kwargs.get("dim", 0))[:2]
        return value is not None and isinstance(dim, int) and dim % value.dim() == 0

    def _node(self, node: fx.Node) -> fx.Node:
        return self._of(self._found[node])

    def _of(self, found: _Found) -> fx.Node:
        if isinstance(found, fx.Node):
            return found
        if found not in self._rows:
            self._rows[found] = self._editor.call(_ATEN.select.int, found.base, 0, found.number)
        return self._rows[found]

    def _result(self, node: fx.Node) -> fx.Node:
        """A result of the graph: a tensor of its own."""
        is_row = isinstance(self._found[node], _Row)
        return self._editor.call(_ATEN.clone.default, self._node(node)) if is_row else self._node(node)

    # Stacks and sums

    def _stack(self, members: Sequence[fx.Node]) -> fx.Node:
        """One tensor whose rows are some tensors."""
        pieces: list[fx.Node] = []
        for run in _runs([self._found[each] for each in members]):
            first = run[0]
            if isinstance(first, fx.Node) or len(run) == 1:
                pieces.append(self._editor.call(_ATEN.stack.default, [self._of(each) for each in run]))
            elif len(run) == len(first.base.meta["val"]):
                pieces.append(first.base)
            else:
                stop = first.number + len(run)
                pieces.append(self._editor.call(_ATEN.slice.Tensor, first.base, 0, first.number, stop))
        stack = pieces[0] if len(pieces) == 1 else self._editor.call(_ATEN.cat.default, pieces)
        if not stack.meta["val"].is_contiguous():
            stack = self._editor.call(_ATEN.clone.default, stack, memory_format=torch.contiguous_format)
        return stack

    def _own_stack(self, node: fx.Node) -> fx.Node:
        """The result of a stack."""
        members = nodes_in(node.args[0])
        stack = self._stack(members)
        is_result = any(user.op == "output" for user in node.users)
        if is_result or any(map(self._storage.is_written, (node, *members))):
            # It may be a tensor that exists, which is written later.
            stack = self._editor.call(_ATEN.clone.default, stack)
        return stack

    def _sum(self, terms: Sequence[fx.Node]) -> fx.Node:
        """The sum of some tensors of one shape."""
        ordered = sorted(terms, key=lambda each: self._place(self._found[each]))
        return self._editor.call(_ATEN.sum.dim_IntList, self._stack(ordered), [0])

    # Operators on all rows

    def _join(self, group: list[fx.Node]) -> None:
        node, size = group[0], len(group)
        if node.all_input_nodes:
            group = sorted(group, key=lambda each: self._place(self._found[each.all_input_nodes[0]]))
        schema = node.target._schema  # type: ignore[union-attr]
        dims = [value.dim() for each in node.all_input_nodes if (value := value_of(each)) is not None]
        rank = max(dims) if _is_elementwise(node) else None
        given = zip(schema.arguments, zip(*(each.args for each in group), strict=True), strict=False)
        args = [self._argument(argument.name, [*items], rank, node) for argument, items in given]
        kwargs = {name: self._argument(name, [each.kwargs[name] for each in group], rank, node) for name in node.kwargs}
        if rank is None:
            said = {argument.name for argument in schema.arguments[: len(args)]} | kwargs.keys()
            left = [argument for argument in schema.arguments if argument.name in _DIMENSIONS - said]
            kwargs |= {argument.name: _moved(argument.default_value) for argument in left}
        if node.target in (_ATEN.sum.dim_IntList, _ATEN.mean.dim) and not args[1]:
            args[1] = list(range(1, dims[0] + 1))
        joined = self._editor.call(_ATEN.reshape.default if node.target in _VIEWS else node.target, *args, **kwargs)
        shape, dtype, _ = kind_of_node(node)
        if kind_of_node(joined)[:2] != ((size, *shape), dtype):
            raise AssertionError(f"{node.target} does not work on rows")
        for i, each in enumerate(group):
            self._found[each] = _Row(joined, i)

    def _argument(self, name: str, items: list[Any], rank: int | None, node: fx.Node) -> Any:
        """An argument for all rows at once."""
        first = items[0]
        if isinstance(first, (tuple, list)) and any(isinstance(part, fx.Node) for part in first):
            return [self._argument("", [*part], rank, node) for part in zip(*items, strict=True)]
        if isinstance(first, fx.Node):
            return self._tensors(items, rank, node)
        if rank is None and name in _SHAPES:
            return [len(items), *first]
        return _moved(first) if rank is None and name in _DIMENSIONS and first is not None else first

    def _tensors(self, members: list[fx.Node], rank: int | None, node: fx.Node) -> fx.Node:
        size, value = len(members), members[0].meta["val"]
        if all(each is members[0] for each in members):
            if rank is not None:
                return self._node(members[0])
            row = self._editor.call(_ATEN.unsqueeze.default, self._node(members[0]), 0)
            stack = self._editor.call(_ATEN.expand.default, row, [size, *value.shape])
        else:
            stack = self._stack(members)
        if node.target is _ATEN.expand.default:
            rank = len(node.args[1])  # type: ignore[arg-type]
        if rank is not None and value.dim() < rank:
            ones = [1] * (rank - value.dim())
            stack = self._editor.call(_ATEN.reshape.default, stack, [size, *ones, *value.shape])
        return stack

    def _place(self, found: _Found) -> tuple[str, int]:
        """Sorts rows of a tensor by their number."""
        return (found.base.name, found.number) if isinstance(found, _Row) else ("", 0)


def _moved(dim: Any) -> Any:
    """Dimensions of a tensor with one more in front."""
    if isinstance(dim, (tuple, list)):
        return [_moved(each) for each in dim]
    return dim + 1 if dim >= 0 else dim


def _runs(found: Sequence[_Found]) -> Iterator[list[_Found]]:
    """Cuts a sequence where rows are not neighbours in one tensor."""

    def lane(at: tuple[int, _Found]) -> tuple[fx.Node, int] | None:
        return (at[1].base, at[1].number - at[0]) if isinstance(at[1], _Row) else None

    return ([each for _, each in run] for _, run in itertools.groupby(enumerate(found), lane))
