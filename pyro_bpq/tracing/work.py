r"""What a computation costs, counted instead of timed: calls of operators, floating-point operations, bytes written.

A count is the same in every run and on every machine; a clock is not. Weights turn counts into seconds, of steps that
run eagerly or compiled. They were fitted once, to the times of some programs on one CPU and one thread; only ratios of
such seconds are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any

from torch import Tensor

from pyro_bpq.tracing.ledger import OperatorMode, signature_of


@dataclass(frozen=True)
class Weights:
    """Seconds that things take: ratios matter."""

    operator: float = 8.3e-6  # A call of an operator, with Python's share in a Pyro program
    flop: float = 1.3e-11  # A floating-point operation of a matrix product or of attention
    convolved: float = 3.2e-11  # one of a convolution
    byte: float = 3.3e-10  # A byte of a result
    step: float = 1.8e-3  # A step's Python that no operator is called for
    making: float = 0.0  # What it takes to make a compiled step, for each operator


EAGER = Weights()
"""Seconds of steps that run eagerly."""
COMPILED = Weights(operator=7.4e-8, flop=1.9e-11, convolved=2.3e-11, byte=1.3e-10, step=7.5e-4, making=8.5e-3)
"""Seconds of compiled steps, from the work of the same steps when they run eagerly."""


@dataclass(frozen=True)
class Work:
    """The cost of a computation."""

    operators: int = 0  # number of calls of operators
    # Floating-point operations of matrix products and attention; two for each multiplication and addition
    flops: int = 0
    convolved: int = 0  # the same of convolutions, with channels in full blocks of 16, as CPUs compute them
    bytes: int = 0  # bytes of the results of operators; a random draw counts for as many as are written in its time

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Work) -> Work:
        return Work(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def of_rows(self, rows: int) -> Work:
        """The cost of so many rows at once: the calls are the same."""
        return Work(self.operators, rows * self.flops, rows * self.convolved, rows * self.bytes)

    def times(self, number: int) -> Work:
        """The cost of so many computations, one after the other."""
        return Work(*(number * a for a in astuple(self)))

    def seconds(self, weights: Weights = EAGER) -> float:
        """Estimated seconds."""
        calls, products = weights.operator * self.operators, weights.flop * self.flops
        return calls + products + weights.convolved * self.convolved + weights.byte * self.bytes

    def step_seconds(self, weights: Weights = EAGER) -> float:
        """Estimated seconds of a step that does this work."""
        return self.seconds(weights) + weights.step


class WorkMode(OperatorMode):
    """Counts all operators that run inside ``with WorkMode() as mode:``, those of backward passes included."""

    def __init__(self) -> None:
        super().__init__()
        self._operators = self._flops = self._convolved = self._bytes = 0

    @property
    def total(self) -> Work:
        """The cost so far."""
        return Work(self._operators, self._flops, self._convolved, self._bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._operators += 1
        formula, is_view, drawn = _rule(func)
        if formula is not None:
            flops, convolved = formula(*args, **kwargs, out_val=result)
            self._flops, self._convolved = self._flops + flops, self._convolved + convolved
        if not is_view:
            self._bytes += _size(result)
        if drawn:
            self._bytes += drawn * _size(args[0])
        return result


def _size(result: object) -> int:
    if isinstance(result, Tensor):
        return result.numel() * result.element_size()
    return sum(map(_size, result)) if isinstance(result, (list, tuple)) else 0


@cache
def _rule(func: Any) -> tuple[Callable[..., tuple[int, int]] | None, bool, int]:
    """The formula of an operator's floating-point operations, if it has one; whether its result is a view; draws."""
    # The table comes with a module that is not needed otherwise.
    from torch.utils.flop_counter import flop_registry

    name, _, is_view = signature_of(func)
    if not name:
        return None, False, 0
    known = flop_registry.get(func._overloadpacket)
    table = None if known is None or name in _OWN else (lambda *args, **kwargs: (known(*args, **kwargs), 0))
    return _OWN.get(name, table), is_view, _DRAWN.get(name, 0)


def _of_convolution(value: Tensor, weight: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> tuple[int, int]:
    is_transposed = kwargs["transposed"] if "transposed" in kwargs else args[4]
    return 0, _products(value, weight, value if is_transposed else out_val)


def _of_convolution_backward(
    grad: Tensor, value: Tensor, weight: Tensor, *args: Any, out_val: Any, **kwargs: Any
) -> tuple[int, int]:
    is_transposed, wanted = args[4], kwargs["output_mask"] if "output_mask" in kwargs else args[7]
    return 0, sum(wanted[:2]) * _products(value, weight, value if is_transposed else grad)


def _products(value: Tensor, weight: Tensor, image: Tensor) -> int:
    """Operations of a convolution, with channels in full blocks of 16, as CPUs compute them."""
    first, second = (16 * -(-size // 16) for size in weight.shape[:2])
    return 2 * value.shape[0] * prod(image.shape[2:]) * first * second * prod(weight.shape[2:])


def _of_recurrent(value: Tensor, *args: Any, out_val: Any, **kwargs: Any) -> tuple[int, int]:
    return 2 * prod(value.shape[:-1]) * sum(arg.numel() for arg in args[:2]), 0


# Operators that torch's table lacks, or for which a CPU needs another one.
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_OWN: Mapping[str, Callable[..., tuple[int, int]]] = MappingProxyType(
    {
        "convolution": _of_convolution,
        "convolution_backward": _of_convolution_backward,
        _ATTENTION: lambda query, key, *args, **kwargs: (4 * query.numel() * key.shape[-2], 0),
        f"{_ATTENTION}_backward": lambda grad, query, key, *args, **kwargs: (10 * query.numel() * key.shape[-2], 0),
        "mkldnn_rnn_layer": _of_recurrent,
    }
)
# Operators that draw: how many times the bytes of their argument are written in the time.
_DRAWN: Mapping[str, int] = MappingProxyType({"bernoulli": 4, "multinomial": 9, "_standard_gamma": 20})
