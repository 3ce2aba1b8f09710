r"""What recorded operators cost, counted instead of timed: calls, floating-point operations, bytes written.

A count is the same in every run and on every machine; a clock is not. Weights turn counts into seconds of one CPU and
one thread; only ratios of such seconds are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from pyro_bpq.record.function import values_in
from pyro_bpq.record.operators import effects_of
from pyro_bpq.record.recorded import Recorded
from pyro_bpq.record.values import Node, Value

# Seconds of a call of an operator with Python's share, of an operation of a matrix product, of one of a convolution,
# of a byte of a result, and of a step's Python that no operator is called for.
OPERATOR, FLOP, CONVOLVED, BYTE, STEP = 8.3e-6, 1.3e-11, 3.2e-11, 3.3e-10, 1.8e-3

Shapes = Sequence[Any]


class Work(NamedTuple):
    """Seconds that rows of one call share, and seconds that each row adds."""

    shared: float = 0.0
    added: float = 0.0

    def seconds(self, rows: int = 1) -> float:
        """Estimated seconds of so many rows at once."""
        return self.shared + rows * self.added


def work_of_run(recorded: Recorded) -> Work:
    """The cost of a recorded run."""
    run = recorded.recording
    found: Work = recorded.kept("work", lambda: work_of(run.nodes, run.shapes, run.dtypes))
    return found


def work_at(recorded: Recorded, costs: Iterable[str], sites: Iterable[str]) -> Work:
    """The cost of a row of :meth:`Bound.at_rows`."""
    run = recorded.recording
    function = run.cut([recorded.named[name] for name in costs], sees_all=True)
    return work_of(function.reading({recorded.drawn[name].value for name in sites}), run.shapes, run.dtypes)


def work_of(nodes: Iterable[Node], shapes: Shapes, dtypes: Sequence[torch.dtype]) -> Work:
    """The cost of some operators."""
    shared = added = 0.0
    for node in nodes:
        kind = effects_of(node.func)
        shared += OPERATOR
        if kind.is_view:
            continue
        for value in values_in(node.result):
            if shapes[value] is not None:
                added += BYTE * prod(shapes[value]) * dtypes[value].itemsize
        rule = _RULES.get(kind.name)
        if rule is not None:
            added += rule(node, shapes)
        if (times := _DRAWN.get(kind.name)) and node.args[0].__class__ is Value:
            added += times * BYTE * prod(shapes[node.args[0]]) * dtypes[node.args[0]].itemsize
    return Work(shared, added)


def _product(node: Node, shapes: Shapes) -> float:
    left, right = [shapes[value] for value in values_in(node.args)][-2:]
    return FLOP * 2 * prod(left) * (right[-1] if len(right) > 1 else 1)


def _convolution(node: Node, shapes: Shapes) -> float:
    value, weight, *_ = node.args
    result = next(values_in(node.result))
    # Channels come in full blocks of 16, as CPUs compute them.
    first, second = (16 * -(-size // 16) for size in shapes[weight][:2])
    image = shapes[value] if node.args[6] else shapes[result]
    return CONVOLVED * 2 * shapes[value][0] * prod(image[2:]) * first * second * prod(shapes[weight][2:])


def _attention(node: Node, shapes: Shapes) -> float:
    query, key = node.args[:2]
    return FLOP * 4 * prod(shapes[query]) * shapes[key][-2]


def _recurrent(node: Node, shapes: Shapes) -> float:
    value, *weights = [*values_in(node.args)]
    return FLOP * 2 * prod(shapes[value][:-1]) * sum(prod(shapes[weight]) for weight in weights[:2])


_RULES: Mapping[str, Callable[[Node, Shapes], float]] = MappingProxyType(
    {
        **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot"), _product),
        "convolution": _convolution,
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "mkldnn_rnn_layer": _recurrent,
    }
)
# Operators that draw: how many times the bytes of their argument are written in the time.
_DRAWN: Mapping[str, int] = MappingProxyType({"bernoulli": 4, "multinomial": 9, "_standard_gamma": 20})
