r"""Replaces draws of a recorded graph by ones that Inductor can compile, or by those that eager steps make."""

from __future__ import annotations

import copy

import torch
from torch import fx

__all__ = ["eager_draws", "fused_draws"]

_ATEN = torch.ops.aten
# Smallest exponential time: torch's own draws have no smaller one in single precision.
_SHORTEST = 2.0**-25


def eager_draws(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy that draws coins by the kernel of eager steps, where Inductor would compare other uniform draws.

    Args:
        graph: The graph.
    """
    copied = copy.deepcopy(graph)
    for node in copied.graph.nodes:
        if node.target is _ATEN.bernoulli.default:
            with copied.graph.inserting_before(node):
                room = copied.graph.call_function(_ATEN.empty_like.default, (node.args[0],))
                drawn = copied.graph.call_function(_ATEN.bernoulli.Tensor, (room, node.args[0]))
            node.replace_all_uses_with(drawn)
            copied.graph.erase_node(node)
    copied.recompile()
    return copied


def fused_draws(graph: fx.GraphModule) -> fx.GraphModule:
    r"""A copy that draws one value of several by a race, in place of ``multinomial``, which Inductor does not compile.

    The winner of ``argmin_v T_v`` with independent ``T_v ~ Exponential(p_v)`` is ``v`` with probability
    ``p_v / Σ_w p_w``. Eager steps do the same, after a dozen operators that check the probabilities.

    Args:
        graph: The graph.
    """
    copied = copy.deepcopy(graph)
    add = copied.graph.call_function
    for node in copied.graph.nodes:
        if node.target is _ATEN.multinomial.default and node.args[1] == 1:
            weights = node.args[0]
            with copied.graph.inserting_before(node):
                uniform = add(_ATEN.rand_like.default, (weights,))
                log = add(_ATEN.log1p.default, (add(_ATEN.neg.default, (uniform,)),))
                times = add(_ATEN.clamp.default, (add(_ATEN.neg.default, (log,)), _SHORTEST))
                drawn = add(_ATEN.argmax.default, (add(_ATEN.div.Tensor, (weights, times)), -1, True))
            node.replace_all_uses_with(drawn)
            copied.graph.erase_node(node)
    copied.recompile()
    return copied
