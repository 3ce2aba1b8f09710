r"""The order that operators of a graph have to keep: whose results they read, and whose memory they write."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx


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

    def __repr__(self) -> str:
        return f"Storage({len(self._root)} operators)"

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
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    schema = getattr(node.target, "_schema", None)
    return node.target is operator.getitem or (
        schema is not None and any(each.alias_info is not None for each in schema.returns)
    )


def written_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that an operator writes in place."""
    schema = getattr(node.target, "_schema", None)
    found: list[fx.Node] = []
    if schema is not None and schema.is_mutable:
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += nodes_in(node.args[i] if i < len(node.args) else node.kwargs.get(argument.name))
    return found


def draws(node: fx.Node) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def levels_of(nodes: Sequence[fx.Node], storage: Storage, from_start: bool, keeps_draws: bool) -> dict[fx.Node, int]:
    """A number for each operator that grows along every way: operators of one level do not wait for each other."""
    ahead = _waited_for(nodes, storage, keeps_draws)
    levels = dict.fromkeys(nodes, 0)
    if from_start:
        for node in nodes:
            levels[node] = max((levels[each] + 1 for each in ahead[node]), default=0)
    else:
        for node in reversed(nodes):
            for each in ahead[node]:
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


def nodes_in(item: Any) -> Iterator[fx.Node]:
    """The operators among the arguments of another one."""
    if isinstance(item, fx.Node):
        yield item
    elif isinstance(item, (tuple, list)):
        for part in item:
            yield from nodes_in(part)
