r"""Recorded graphs as they are rewritten: copies, the order that operators have to keep, and simplifications."""

from __future__ import annotations

import copy
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_arg

from pyro_bpq.record.operators import PASSING, effects_of, written_arguments

_ATEN = torch.ops.aten
_NOTHING = frozenset({_ATEN.expand.default, _ATEN.view.default, _ATEN.sum.default})
# Reductions of all elements, and those of named dimensions, which rows of a tensor have as well.
_REDUCTIONS: Mapping[Any, Any] = MappingProxyType(
    {_ATEN.sum.default: _ATEN.sum.dim_IntList, _ATEN.mean.default: _ATEN.mean.dim}
)
_ONES = frozenset(("ones", "new_ones", "ones_like"))
# Fewer terms than these are not worth a stack of them.
_FEWEST_TERMS = 5


def value_of(node: fx.Node) -> Tensor | None:
    """What the result of an operator looks like; ``None`` if it is no tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


class Editor:
    """A copy of a graph.

    Attributes:
        module: The copy.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self.module = copy.deepcopy(graph)
        self._mode = FakeTensorMode()
        with self._mode:
            for node in self.module.graph.nodes:
                if (own := value_of(node)) is not None:
                    made = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device)
                    node.meta["val"] = made

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Adds an operator to the graph of the copy, where the graph inserts."""
        made = self.module.graph.call_function(target, args, kwargs)
        given, named = map_arg((args, kwargs), value_of)
        with self._mode:
            made.meta["val"] = target(*given, **named)
        return made


class Storage:
    """Whose memory the results of operators are.

    Attributes:
        written: Operators whose memory is written by others.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._root: dict[fx.Node, fx.Node] = {}
        self.written: set[fx.Node] = set()
        for node in nodes:
            self.written.update(map(self.root, written_by(node)))
            self._root[node] = self.root(node.all_input_nodes[0]) if _shares(node) else node

    def root(self, node: fx.Node) -> fx.Node:
        """The operator that made the memory of a result."""
        return self._root.get(node, node)

    def is_written(self, node: fx.Node) -> bool:
        """Whether the memory of a result is written by some other operator."""
        return self.root(node) in self.written

    def reads(self, node: fx.Node) -> set[fx.Node]:
        """Memory that an operator sees and that is written somewhere."""
        return {self.root(each) for each in node.all_input_nodes} & self.written


def _shares(node: fx.Node) -> bool:
    """Whether a result lies in the memory of the first input."""
    results = getattr(getattr(node.target, "_schema", None), "returns", ())
    is_view = node.target is operator.getitem or any(each.alias_info is not None for each in results)
    return is_view and node.op == "call_function" and bool(node.all_input_nodes)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that an operator writes in place."""
    return nodes_in(written_arguments(effects_of(node.target), node.args, node.kwargs))


def draws(node: fx.Node) -> bool:
    """Whether an operator draws random numbers."""
    return effects_of(node.target).is_random


def levels_of(nodes: Sequence[fx.Node], storage: Storage, from_start: bool, keeps_draws: bool) -> dict[fx.Node, int]:
    """A number for each operator that grows along every way: operators of one level do not wait for each other."""
    ahead = _waited_for(nodes, storage, keeps_draws)
    levels = dict.fromkeys(nodes, 0)
    for node in nodes if from_start else reversed(nodes):
        for each in ahead[node]:
            if from_start:
                levels[node] = max(levels[node], levels[each] + 1)
            else:
                levels[each] = min(levels[each], levels[node] - 1)
    return levels


def _waited_for(nodes: Sequence[fx.Node], storage: Storage, keeps_draws: bool) -> dict[fx.Node, list[fx.Node]]:
    found: dict[fx.Node, list[fx.Node]] = {}
    writer: dict[fx.Node, fx.Node] = {}
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    last_draw: list[fx.Node] = []
    for node in nodes:
        ahead = list(node.all_input_nodes)
        if keeps_draws and draws(node):
            ahead += last_draw
            last_draw = [node]
        writes = set(map(storage.root, written_by(node)))
        for root in storage.reads(node) | writes:
            ahead += [writer[root]] if root in writer else []
            if root in writes:
                ahead += readers.pop(root, [])
                writer[root] = node
            else:
                readers[root].append(node)
        found[node] = ahead
    return found


def nodes_in(item: Any) -> list[fx.Node]:
    """The operators among the arguments of another one."""
    found: list[fx.Node] = []
    map_arg(item, found.append)
    return found


def simplify(graph: fx.Graph) -> None:
    """Drops operators that do nothing, keeps one of those with equal inputs, and joins additions to sums."""
    storage = Storage(graph.nodes)
    versions, known, filled = Counter[fx.Node](), dict[Any, fx.Node](), dict[fx.Node, float]()
    for node in list(graph.nodes):
        writes = written_by(node)
        versions.update({storage.root(each) for each in writes})
        if node.op != "call_function" or draws(node) or writes:
            continue
        if storage.root(node) is node and node in storage.written:
            continue
        _name_dimensions(node)
        if _does_nothing(node):
            same = node.all_input_nodes[0]
        else:
            seen = tuple((each, versions[storage.root(each)]) for each in node.all_input_nodes)
            key: Any = node.target, told((node.args, node.kwargs)), seen
            if not storage.is_written(node) and (number := _number_of(node, filled)) is not None:
                filled[node], key = number, (number, kind_of_node(node))
            same = known.setdefault(key, node)
        # Each result of the graph has memory of its own.
        if same is not node and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    _join_sums(graph, storage)


def sum_of(terms: Sequence[Tensor]) -> Tensor:
    """Stands for a sum of many terms of one shape."""
    return torch.stack(list(terms)).sum(0)


def told(item: Any, of: Callable[[fx.Node], Any] = lambda node: node) -> Any:
    """What tells arguments of operators apart; of a tensor what ``of`` says."""
    if isinstance(item, (tuple, list)):
        return tuple(told(part, of) for part in item)
    if isinstance(item, dict):
        return tuple((key, told(value, of)) for key, value in item.items())
    # True == 1 == 1.0, but not for an operator.
    return of(item) if isinstance(item, fx.Node) else (type(item), str(item))


def kind_of_node(node: fx.Node) -> Any:
    """Shape, type and device of a result; ``None`` if it is no tensor."""
    value = value_of(node)
    return None if value is None else (value.shape, value.dtype, value.device)


def _does_nothing(node: fx.Node) -> bool:
    if node.target not in _NOTHING or kind_of_node(node) != kind_of_node(node.all_input_nodes[0]):
        return False
    return node.target is not _ATEN.sum.default or kind_of_node(node)[0] == ()


def _number_of(node: fx.Node, filled: Mapping[fx.Node, float]) -> float | None:
    """The number that all elements of a result are; ``None`` if they may differ."""
    name, value = effects_of(node.target).name, value_of(node)
    if value is None or not value.is_floating_point():
        return None
    if name in _ONES:
        return 1.0
    # Numbers of Python may stand for tensors.
    first = next(map(filled.get, node.all_input_nodes), None) if name in PASSING or name == "neg" else None
    return -first if first is not None and name == "neg" else first


def _name_dimensions(node: fx.Node) -> None:
    """Writes a reduction of all elements as one of all dimensions."""
    value = value_of(node.all_input_nodes[0]) if node.target in _REDUCTIONS else None
    if value is not None and value.dim():
        node.target, node.args = _REDUCTIONS[node.target], (node.args[0], list(range(value.dim())))


def _join_sums(graph: fx.Graph, storage: Storage) -> None:
    """Puts one sum in the place of additions one after the other, as autograd makes them for shared parameters."""
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in seen or not _is_plain_addition(node):
            continue
        terms: list[fx.Node] = []
        waiting = [node.args[1], node.args[0]]
        while waiting:
            term: Any = waiting.pop()
            if _is_plain_addition(term) and len(term.users) == 1 and kind_of_node(term) == kind_of_node(node):
                waiting += [term.args[1], term.args[0]]
                seen.add(term)
            else:
                terms.append(term)
        # A sum reads its terms later than the additions did.
        fits = all(kind_of_node(term) == kind_of_node(node) and not storage.is_written(term) for term in terms)
        if fits and len(terms) >= _FEWEST_TERMS:
            with graph.inserting_before(node):
                joined = graph.call_function(sum_of, (terms,))
            joined.meta = node.meta
            node.replace_all_uses_with(joined)
    graph.eliminate_dead_code()


def _is_plain_addition(node: Any) -> bool:
    is_addition = isinstance(node, fx.Node) and node.target is _ATEN.add.Tensor and not node.kwargs
    value = value_of(node) if is_addition else None
    return value is not None and value.is_floating_point() and all(isinstance(each, fx.Node) for each in node.args)
