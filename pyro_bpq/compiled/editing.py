r"""Copies of recorded graphs that can be changed, and draws that Inductor can compile in place of those recorded."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_arg

_ATEN = torch.ops.aten
# Smallest exponential time: torch's own draws have no smaller one in single precision.
_SHORTEST = 2.0**-25
# Uniform numbers from which on torch's generator, four times as fast, is worth a call that nothing joins.
_MANY = 2048


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


def eager_draws(editor: Editor) -> None:
    """Draws coins by the kernel of eager steps, where Inductor would compare other uniform draws."""
    for node in _nodes(editor, _ATEN.bernoulli.default):
        with editor.module.graph.inserting_before(node):
            room = editor.call(_ATEN.empty_like.default, node.args[0])
            drawn = editor.call(_ATEN.bernoulli.Tensor, room, node.args[0])
        _replace(node, drawn)


def fused_draws(editor: Editor) -> None:
    r"""Draws coins and values from uniform numbers, which wait for nothing.

    ``u < p`` with ``u ~ Uniform(0, 1)`` has the probability ``p``. One value of several is drawn by a race, in place of
    ``multinomial``, which Inductor does not compile: the winner of ``argmin_v T_v`` with independent
    ``T_v ~ Exponential(p_v)`` is ``v`` with probability ``p_v / Σ_w p_w``. Eager steps do the same, after a dozen
    operators that check the probabilities.
    """
    call = editor.call
    for node in _nodes(editor, _ATEN.bernoulli.default):
        own = node.meta["val"]
        with editor.module.graph.inserting_before(node):
            uniform = call(_ATEN.rand.default, list(own.shape), dtype=torch.float32, device=own.device)
            is_one = call(_ATEN.lt.Tensor, uniform, node.args[0])
            drawn = call(_ATEN._to_copy.default, is_one, dtype=own.dtype)
        _replace(node, drawn)
    for node in _nodes(editor, _ATEN.multinomial.default):
        if node.args[1] != 1:
            continue
        weights = node.args[0]
        own = weights.meta["val"]  # type: ignore[union-attr]
        with editor.module.graph.inserting_before(node):
            uniform = call(_ATEN.rand.default, list(own.shape), dtype=own.dtype, device=own.device)
            log = call(_ATEN.log1p.default, call(_ATEN.neg.default, uniform))
            times = call(_ATEN.clamp.default, call(_ATEN.neg.default, log), _SHORTEST)
            drawn = call(_ATEN.argmax.default, call(_ATEN.div.Tensor, weights, times), -1, True)
        _replace(node, drawn)


def called_draws(editor: Editor) -> None:
    """Draws many uniform numbers on a CPU by torch's kernel, where Inductor would compute each from a counter."""
    for node in editor.module.graph.find_nodes(op="call_function", target=_ATEN.rand.default):
        own = node.meta["val"]
        if own.device.type == "cpu" and own.numel() >= _MANY:
            with editor.module.graph.inserting_before(node):
                room = editor.call(_ATEN.empty.memory_format, list(own.shape), dtype=own.dtype, device=own.device)
                drawn = editor.call(_ATEN.uniform.default, room)
            _replace(node, drawn)


def _nodes(editor: Editor, target: object) -> list[fx.Node]:
    return [node for node in editor.module.graph.nodes if node.target is target and not node.kwargs]


def _replace(node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
