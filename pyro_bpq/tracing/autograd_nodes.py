"""Walks autograd's graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def nodes_behind(tensor: Tensor) -> Iterator[Any]:
    """The nodes of autograd's graph that a tensor was computed by, each once, those nearest first.

    Nodes of leaves have an attribute ``variable``, the leaf.
    """
    seen, nodes = set[Any](), [tensor.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes += [following for following, _ in node.next_functions]
