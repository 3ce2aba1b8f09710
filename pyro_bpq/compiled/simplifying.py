r"""Simplifications of a recorded graph that show which of its operators are alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from pyro_bpq.compiled.editing import value_of
from pyro_bpq.compiled.storage import Storage, draws, written_by

_ATEN = torch.ops.aten
_NOTHING = frozenset({_ATEN.expand.default, _ATEN.view.default, _ATEN.sum.default})
# Reductions of all elements, and those of named dimensions, which rows of a tensor have as well.
_REDUCTIONS: Mapping[Any, Any] = MappingProxyType(
    {_ATEN.sum.default: _ATEN.sum.dim_IntList, _ATEN.mean.default: _ATEN.mean.dim}
)
# Fewer terms than these are not worth a stack of them.
_FEWEST_TERMS = 5


def simplify(graph: fx.Graph) -> None:
    """Drops operators that do nothing, keeps one of those with equal inputs, and joins additions to sums."""
    storage = Storage(graph.nodes)
    versions, known = Counter[fx.Node](), dict[Any, fx.Node]()
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
            same = known.setdefault((node.target, told(node.args), told(node.kwargs), seen), node)
        # Each result of the graph has memory of its own.
        if same is not node and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    _join_sums(graph, storage)


def sum_of(terms: Sequence[Tensor]) -> Tensor:
    """Stands for a sum of many terms of one shape."""
    return torch.stack(list(terms)).sum(0)


def told(item: Any) -> Any:
    """What tells arguments of operators apart."""
    if isinstance(item, (tuple, list)):
        return tuple(map(told, item))
    if isinstance(item, dict):
        return tuple((key, told(value)) for key, value in item.items())
    # True == 1 == 1.0, but not for an operator.
    return item if isinstance(item, fx.Node) else (type(item), str(item))


def kind_of_node(node: fx.Node) -> Any:
    """Shape, type and device of a result; ``None`` if it is no tensor."""
    value = value_of(node)
    return None if value is None else (value.shape, value.dtype, value.device)


def _does_nothing(node: fx.Node) -> bool:
    if node.target not in _NOTHING or kind_of_node(node) != kind_of_node(node.all_input_nodes[0]):
        return False
    return node.target is not _ATEN.sum.default or kind_of_node(node)[0] == ()


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
