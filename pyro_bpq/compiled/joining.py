r"""Joins equal operators of a recorded graph: what a program repeats site by site becomes one operator on all of them.

A chain of ``T`` sites calls each operator of its log-probabilities and of their gradients ``T`` times. Operators that
are alike but for their tensors, and that do not wait for each other, are called once, on tensors with a leading axis of
``T`` rows. Two operators of the same *height*, the longest way to the end of the graph, never wait for each other. So
a graph is compiled in a time that hardly grows with the number of sites, but for what has to run one after the other.

Draws keep their order, and so does what reads or writes tensors that the graph changes in place. Sums of many terms are
added up in another order, so results agree up to rounding.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from pyro_bpq.compiled.editing import Editor, value_of

__all__ = ["joined"]

_ATEN = torch.ops.aten
# Fewer operators than these are not worth a stack of their tensors.
_FEWEST = 8
# Larger tensors spend their time on elements, not on calls, and a stack copies them.
_MOST_ELEMENTS = 4096
# Elementwise operators that torch does not mark as such.
_ELEMENTWISE = frozenset(
    {
        _ATEN.binary_cross_entropy_with_logits.default,
        _ATEN._to_copy.default,
        _ATEN.softplus_backward.default,
        _ATEN.tanh_backward.default,
        _ATEN.zeros_like.default,
        _ATEN.ones_like.default,
    }
)
# Operators that do the same on each row once dimensions are counted from the second one on and shapes get one more.
_BY_ROW = frozenset(
    {
        _ATEN.view.default,
        _ATEN._unsafe_view.default,
        _ATEN.expand.default,
        _ATEN.unsqueeze.default,
        _ATEN.squeeze.dim,
        _ATEN.select.int,
        _ATEN.slice.Tensor,
        _ATEN.select_backward.default,
        _ATEN.transpose.int,
        _ATEN.sum.dim_IntList,
        _ATEN.mean.dim,
        _ATEN.logsumexp.default,
        _ATEN._softmax.default,
        _ATEN._log_softmax.default,
        _ATEN._log_softmax_backward_data.default,
        _ATEN._softmax_backward_data.default,
        _ATEN.gather.default,
        _ATEN.stack.default,
        _ATEN.cat.default,
    }
)
_DIMENSIONS = frozenset({"dim", "dim0", "dim1"})
_SHAPES = frozenset({"size", "input_sizes"})
_FREE_DRAWS = frozenset({_ATEN.rand.default, _ATEN.randn.default})
_VIEWS = frozenset({_ATEN.view.default, _ATEN._unsafe_view.default})


def joined(editor: Editor, keeps_draws: bool) -> fx.GraphModule:
    """The graph with equal operators joined.

    Args:
        editor: The graph; it is changed.
        keeps_draws: Whether draws keep their order.
    """
    # What many results wait for is alike by its way to the end, what waits for inputs alone by its way from the start.
    for from_start in (False, True):
        _simplify(editor.module.graph)
        _Writer(editor, keeps_draws).write(from_start)
    editor.module.recompile()
    return editor.module


def _sum_of(terms: Sequence[Tensor]) -> Tensor:
    """Stands for a sum of many terms of one shape."""
    return torch.stack(list(terms)).sum(0)


# What the operators of a graph write, and in which order they have to stay.


class _Storage:
    """Whose memory the results of operators are.

    Args:
        nodes: The operators.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._root: dict[fx.Node, fx.Node] = {}
        self.written: set[fx.Node] = set()
        for node in nodes:
            self.written.update(map(self.root, written_by(node)))
            self._root[node] = self._own(node)

    def root(self, node: fx.Node) -> fx.Node:
        """The operator that made the memory of a result."""
        return self._root.get(node, node)

    def reads(self, node: fx.Node) -> set[fx.Node]:
        """Memory that an operator sees and that is written somewhere."""
        return {self.root(each) for each in node.all_input_nodes} & self.written

    def _own(self, node: fx.Node) -> fx.Node:
        if node.op != "call_function" or not node.all_input_nodes:
            return node
        if node.target is operator.getitem:
            return self.root(node.all_input_nodes[0])
        schema = getattr(node.target, "_schema", None)
        shares = schema is not None and any(each.alias_info is not None for each in schema.returns)
        return self.root(node.all_input_nodes[0]) if shares else node


def written_by(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that an operator writes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            yield from _nodes_in(value)


def _levels(nodes: Sequence[fx.Node], storage: _Storage, from_start: bool, keeps_draws: bool) -> dict[fx.Node, int]:
    """A number for each operator that grows along every way: operators of one level do not wait for each other."""
    before: dict[fx.Node, list[fx.Node]] = {}
    writer: dict[fx.Node, fx.Node] = {}
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    last_draw: fx.Node | None = None
    for node in nodes:
        ahead = list(node.all_input_nodes)
        if keeps_draws and _draws(node):
            ahead += [] if last_draw is None else [last_draw]
            last_draw = node
        writes = {storage.root(each) for each in written_by(node)}
        for root in storage.reads(node) | writes:
            ahead += [writer[root]] if root in writer else []
            if root in writes:
                ahead += readers.pop(root, [])
                writer[root] = node
            else:
                readers[root].append(node)
        before[node] = ahead
    levels = dict.fromkeys(nodes, 0)
    if from_start:
        for node in nodes:
            levels[node] = max((levels[each] + 1 for each in before[node]), default=0)
    else:
        for node in reversed(nodes):
            for each in before[node]:
                levels[each] = min(levels[each], levels[node] - 1)
    return levels


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


# Simplifications that show which operators are alike.


def _simplify(graph: fx.Graph) -> None:
    """Drops operators that do nothing, keeps one of those with equal inputs, and joins additions to sums."""
    storage = _Storage(graph.nodes)
    versions, known = Counter[fx.Node](), dict[Any, fx.Node]()
    for node in list(graph.nodes):
        versions.update({storage.root(each) for each in written_by(node)})
        if node.op != "call_function" or _draws(node) or any(True for _ in written_by(node)):
            continue
        if storage.root(node) in storage.written and not _is_view(node):
            continue
        if _does_nothing(node):
            same = node.all_input_nodes[0]
        else:
            seen = tuple((each, versions[storage.root(each)]) for each in node.all_input_nodes)
            same = known.setdefault((node.target, _told(node.args), _told(node.kwargs), seen), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    _join_sums(graph)


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.target is operator.getitem or (
        schema is not None and any(each.alias_info is not None for each in schema.returns)
    )


def _does_nothing(node: fx.Node) -> bool:
    if node.target not in (_ATEN.expand.default, _ATEN.view.default, _ATEN.sum.default):
        return False
    own, source = value_of(node), value_of(node.all_input_nodes[0])
    if own is None or source is None or own.shape != source.shape or own.dtype != source.dtype:
        return False
    return own.dim() == 0 or node.target is not _ATEN.sum.default


def _told(item: Any) -> Any:
    if isinstance(item, (tuple, list)):
        return tuple(map(_told, item))
    if isinstance(item, dict):
        return tuple((key, _told(value)) for key, value in item.items())
    # True == 1 == 1.0, but not for an operator.
    return item if isinstance(item, fx.Node) else (type(item), str(item))


def _join_sums(graph: fx.Graph) -> None:
    """Puts one sum in the place of additions one after the other, as autograd makes them for shared parameters."""
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in seen or not _is_plain_addition(node):
            continue
        terms: list[fx.Node] = []
        waiting = [node.args[1], node.args[0]]
        while waiting:
            term = waiting.pop()
            if _is_plain_addition(term) and len(term.users) == 1 and _kind(term) == _kind(node):
                waiting += [term.args[1], term.args[0]]
                seen.add(term)
            else:
                terms.append(term)
        if len(terms) > _FEWEST and all(_kind(term) == _kind(node) for term in terms):
            with graph.inserting_before(node):
                joined = graph.call_function(_sum_of, (terms,))
            joined.meta = node.meta
            node.replace_all_uses_with(joined)
    graph.eliminate_dead_code()


def _is_plain_addition(node: Any) -> bool:
    is_addition = isinstance(node, fx.Node) and node.target is _ATEN.add.Tensor and not node.kwargs
    value = value_of(node) if is_addition else None
    return value is not None and value.is_floating_point() and all(isinstance(each, fx.Node) for each in node.args)


# Groups of operators that are alike.


def _kind(node: fx.Node) -> Any:
    value = value_of(node)
    return None if value is None else (value.shape, value.dtype, value.device)


def _nodes_in(item: Any) -> Iterator[fx.Node]:
    if isinstance(item, fx.Node):
        yield item
    elif isinstance(item, (tuple, list)):
        for part in item:
            yield from _nodes_in(part)


def _is_elementwise(node: fx.Node) -> bool:
    return node.target in _ELEMENTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _can_join(node: fx.Node, storage: _Storage) -> bool:
    value = value_of(node)
    if node.op != "call_function" or value is None or value.numel() > _MOST_ELEMENTS or _draws(node):
        return False
    if not (_is_elementwise(node) or node.target in _BY_ROW) or any(True for _ in written_by(node)):
        return False
    if storage.root(node) in storage.written and not _is_view(node):
        return False
    inputs = [value_of(each) for each in node.all_input_nodes]
    if not inputs or any(each is None or each.device != value.device for each in inputs):
        return False
    # A tensor without dimensions does not decide on the type of a result, a row of them does.
    floats = {each.dtype for each in inputs if each is not None and each.is_floating_point()}
    others = {each.dtype for each in inputs if each is not None and not each.is_floating_point()} - {torch.bool}
    is_plain = all(each is not None and each.dim() > 0 for each in inputs) or _is_elementwise(node)
    return len(floats) <= 1 and len(others) <= 1 and (is_plain or node.target is not _ATEN.gather.default)


def _signature(node: fx.Node) -> Any:
    """Equal for operators that are alike but for their tensors."""

    def told(item: Any) -> Any:
        return ("tensor", _kind(item)) if isinstance(item, fx.Node) else _told(item)

    def all_told(item: Any) -> Any:
        return tuple(map(all_told, item)) if isinstance(item, (tuple, list)) else told(item)

    return node.target, all_told(node.args), tuple((k, all_told(v)) for k, v in node.kwargs.items()), _kind(node)


@dataclass(frozen=True)
class _Row:
    """A row of a tensor.

    Args:
        base: The tensor.
        index: Which row.
    """

    base: fx.Node
    index: int


_Found = fx.Node | _Row


class _Writer:
    """Writes a graph anew.

    Args:
        editor: The graph.
        keeps_draws: Whether draws keep their order.
    """

    def __init__(self, editor: Editor, keeps_draws: bool) -> None:
        self._editor = editor
        self._keeps_draws = keeps_draws
        self._source = editor.module.graph
        self._graph = fx.Graph()
        self._found: dict[fx.Node, _Found] = {}
        self._rows: dict[_Row, fx.Node] = {}
        # Rows of stacks that were made of single tensors.
        self._stacked: dict[fx.Node, _Row] = {}
        self._sizes: dict[fx.Node, int] = {}
        self._storage = _Storage(self._source.nodes)

    def write(self, from_start: bool) -> None:
        """Writes it.

        Args:
            from_start: Whether to join operators at the same distance from the start, or from the end.
        """
        nodes = list(self._source.nodes)
        self._editor.module.graph = self._graph
        levels = _levels(nodes, self._storage, from_start, self._keeps_draws)
        groups: dict[Any, list[fx.Node]] = {}
        for node in nodes:
            key: Any = node
            if not self._keeps_draws and node.target in _FREE_DRAWS:
                key = _signature(node)
            elif _can_join(node, self._storage):
                key = levels[node], _signature(node)
            groups.setdefault(key, []).append(node)
        by_level: dict[int, list[list[fx.Node]]] = defaultdict(list)
        for node in nodes:
            if node.op in ("placeholder", "get_attr"):
                self._found[node] = self._copied(node)
        for group in groups.values():
            by_level[min(levels[node] for node in group)].append(group)
        for level in sorted(by_level):
            for group in by_level[level]:
                self._write(group)
        self._graph.output(map_arg(nodes[-1].args[0], self._result))
        self._graph.eliminate_dead_code()

    def _write(self, group: list[fx.Node]) -> None:
        node = group[0]
        if node in self._found:
            return
        if len(group) >= _FEWEST and not self._all_rows(group):
            self._join(group)
            return
        for node in group:
            row = self._as_row(node)
            if node.target is _sum_of:
                self._found[node] = self._sum(list(_nodes_in(node.args)))
            elif row is not None:
                self._found[node] = row
            elif node.target is _ATEN.stack.default and self._is_first(node):
                self._found[node] = self._stack(list(_nodes_in(node.args[0])))
            elif node.op != "output":
                self._found[node] = self._copied(node)

    def _copied(self, node: fx.Node) -> fx.Node:
        made = self._graph.node_copy(node, self._node)
        made.meta = dict(node.meta)
        return made

    # Rows

    def _as_row(self, node: fx.Node) -> _Row | None:
        """A row of a tensor that exists, if that is what an operator takes."""
        if node.target is _ATEN.select.int:
            source, dim, index = node.args
        elif node.target is operator.getitem and node.args[0].target is _ATEN.unbind.int:  # type: ignore[union-attr]
            taken, index = node.args
            source, dim = (*taken.args, 0)[:2]  # type: ignore[union-attr]
        else:
            return None
        base, value = self._found[source], value_of(source)  # type: ignore[index]
        if isinstance(base, _Row) or value is None or dim % value.dim():  # type: ignore[operator]
            return None
        self._sizes[base] = value.shape[0]
        return _Row(base, index % value.shape[0])  # type: ignore[operator, arg-type]

    def _all_rows(self, group: list[fx.Node]) -> bool:
        return all(self._as_row(node) is not None for node in group)

    def _is_first(self, node: fx.Node) -> bool:
        """Whether a stack makes a first dimension."""
        value = value_of(node)
        return value is not None and (*node.args, 0)[1] % value.dim() == 0  # type: ignore[operator]

    def _node(self, node: fx.Node) -> fx.Node:
        found = self._found[node]
        return self._of(found)

    def _of(self, found: _Found) -> fx.Node:
        if isinstance(found, fx.Node):
            return found
        if found not in self._rows:
            self._rows[found] = self._editor.call(_ATEN.select.int, found.base, 0, found.index)
        return self._rows[found]

    def _result(self, node: fx.Node) -> fx.Node:
        """A result of the graph: a tensor of its own."""
        found = self._found[node]
        if isinstance(found, fx.Node):
            return found
        return self._editor.call(_ATEN.clone.default, self._of(found))

    # Stacks and sums

    def _stack(self, members: Sequence[fx.Node]) -> fx.Node:
        """One tensor whose rows are some tensors."""
        is_written = any(self._storage.root(each) in self._storage.written for each in members)
        found = [self._found[each] for each in members]
        if not is_written:
            found = [self._stacked.get(each, each) if isinstance(each, fx.Node) else each for each in found]
        pieces: list[fx.Node] = []
        for run in _runs(found):
            first = run[0]
            if isinstance(first, _Row) and len(run) > 1:
                is_whole = len(run) == self._sizes[first.base]
                stop = first.index + len(run)
                pieces.append(
                    first.base if is_whole else self._editor.call(_ATEN.slice.Tensor, first.base, 0, first.index, stop)
                )
            else:
                pieces.append(self._editor.call(_ATEN.stack.default, [self._of(each) for each in run]))
        stack = pieces[0] if len(pieces) == 1 else self._editor.call(_ATEN.cat.default, pieces)
        self._sizes[stack] = len(found)
        if not is_written:
            for i, each in enumerate(found):
                if isinstance(each, fx.Node):
                    self._stacked[each] = _Row(stack, i)
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
        args = [
            self._argument(schema.arguments[i].name, [each.args[i] for each in group], rank, node)
            for i in range(len(node.args))
        ]
        kwargs = {name: self._argument(name, [each.kwargs[name] for each in group], rank, node) for name in node.kwargs}
        if rank is None:
            given = {argument.name for argument in schema.arguments[: len(args)]} | kwargs.keys()
            left = [argument for argument in schema.arguments if argument.name in _DIMENSIONS - given]
            kwargs |= {argument.name: _moved(argument.default_value) for argument in left}
        if node.target in (_ATEN.sum.dim_IntList, _ATEN.mean.dim) and not args[1]:
            args[1] = list(range(1, dims[0] + 1))
        joined = self._editor.call(_ATEN.reshape.default if node.target in _VIEWS else node.target, *args, **kwargs)
        self._sizes[joined] = size
        for i, each in enumerate(group):
            self._found[each] = _Row(joined, i)

    def _argument(self, name: str, items: list[Any], rank: int | None, node: fx.Node) -> Any:
        """An argument for all rows at once."""
        first = items[0]
        if isinstance(first, (tuple, list)) and any(isinstance(part, fx.Node) for part in first):
            parts = zip(*items, strict=True)
            return [self._argument("", list(part), rank, node) for part in parts]
        if isinstance(first, fx.Node):
            return self._tensors(items, rank, node)
        if rank is not None:
            return first
        if name in _SHAPES:
            return [len(items), *first]
        if name in _DIMENSIONS and first is not None:
            return _moved(first)
        return first

    def _tensors(self, members: list[fx.Node], rank: int | None, node: fx.Node) -> fx.Node:
        size, value = len(members), value_of(members[0])
        assert value is not None
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
        if isinstance(found, fx.Node):
            found = self._stacked.get(found, found)
        return (found.base.name, found.index) if isinstance(found, _Row) else ("", 0)


def _moved(dim: Any) -> Any:
    """Dimensions of a tensor with one more in front."""
    if isinstance(dim, (tuple, list)):
        return [_moved(each) for each in dim]
    return dim + 1 if dim >= 0 else dim


def _runs(found: Sequence[_Found]) -> Iterator[list[_Found]]:
    """Cuts a sequence where rows are not neighbours in one tensor."""
    run: list[_Found] = []
    for each in found:
        if run and not _follows(run[-1], each):
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def _follows(one: _Found, other: _Found) -> bool:
    if isinstance(one, _Row) and isinstance(other, _Row):
        return one.base is other.base and other.index == one.index + 1
    return isinstance(one, fx.Node) and isinstance(other, fx.Node)
