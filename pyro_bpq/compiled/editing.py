r"""Copies of recorded graphs that can be changed: each operator knows what its result looks like."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_arg


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
                value = value_of(node)
                if value is not None:
                    # Each tensor was recorded in a mode of its own.
                    node.meta["val"] = torch.empty_strided(
                        value.shape, value.stride(), dtype=value.dtype, device=value.device
                    )

    def __repr__(self) -> str:
        return f"Editor({len(self.module.graph.nodes)} nodes)"

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Adds an operator to the graph of the copy, where the graph inserts."""
        made = self.module.graph.call_function(target, args, kwargs)
        given, named = map_arg((args, kwargs), value_of)
        with self._mode:
            made.meta["val"] = target(*given, **named)
        return made
