r"""Runs a program once for several particles in a dimension that it does not see.

:func:`torch.func.vmap` runs guide and model over the particles. Both see the values of one particle, so ``z[0]`` or
``z.sum()`` mean what they mean in a run of one. What they have recorded is then taken apart: each particle gets traces
of its own, with distributions that hold its own parameters. A program that vmap refuses has to run once per particle.
"""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pyro.poutine.runtime import effectful
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions import Distribution, Transform
from torch.overrides import TorchFunctionMode

__all__ = ["HiddenFactories", "Wrapped", "hidden_traces"]

# Type of the message by which handlers that draw in place of the generator learn which particle a value is for.
PARTICLE = "bpq_particle"


@effectful(type=PARTICLE)
def _tell(index: Tensor | None, number: int) -> None:
    """Tells the index of the particle, a tensor with the hidden dimension, and their number; ``None`` at the end."""


class Wrapped(TorchFunctionMode):
    """Collects the tensors with a hidden dimension that torch's functions return.

    Args:
        seen: Where they are collected.
    """

    def __init__(self, seen: list[weakref.ref[Tensor]]) -> None:
        super().__init__()
        self.seen = seen

    def __repr__(self) -> str:
        return f"Wrapped({len(self.seen)} tensors)"

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and _is_wrapped(result):
            self.seen.append(weakref.ref(result))
        return result

    def any_alive(self) -> bool:
        """Whether something keeps one of them, as by ``self.z = z``: after the run they are of no use."""
        if any(ref() is not None for ref in self.seen):
            # Traces hold cycles.
            gc.collect()
        return any(ref() is not None for ref in self.seen)


class HiddenFactories(TorchFunctionMode):
    """Gives new tensors of a program the hidden dimension from the start, so that it may write into them.

    Else ``kept = torch.zeros(3); kept[0] = z`` and ``torch.empty(3).normal_()`` would be refused.

    Args:
        number: Size of the hidden dimension.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __repr__(self) -> str:
        return f"HiddenFactories({self.number})"

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _FACTORIES or not isinstance(result, Tensor) or _is_wrapped(result):
            return result
        every = result.unsqueeze(0).repeat(self.number, *(1,) * result.dim())
        level = torch._C._functorch.maybe_current_level()
        assert level is not None
        return torch._C._functorch._add_batch_dim(every, 0, level)


_FACTORIES = frozenset(
    (
        *(torch.zeros, torch.ones, torch.empty, torch.full),
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
        *(Tensor.new, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full),
    )
)


def hidden_traces(
    run: Callable[[], tuple[Trace, Trace, Mapping[str, Any]]], number: int
) -> list[tuple[Trace, Trace, Mapping[str, Any]]]:
    """The traces of several particles from one run of the programs.

    Args:
        run: Runs them for one particle: traces of model and guide with log-probabilities, and drawn subsamples.
        number: Number of particles; each draws its own values.

    Returns:
        What ``run`` returns, for each particle.

    Raises:
        RuntimeError: If the programs do something that has no meaning for a hidden dimension, such as to let a value
            leave torch.
    """
    kept: list[Any] = []

    def one(index: Tensor) -> tuple[Tensor, ...]:
        tensors: list[Tensor] = []
        _tell(index, number)
        with HiddenFactories(number):
            found = run()
        kept.append(_map(found, lambda tensor: _Slot(tensors, tensor) if _is_wrapped(tensor) else tensor))
        return tuple(tensors)

    try:
        with warnings.catch_warnings():
            # Operators that run one particle after the other.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            stacked = torch.func.vmap(one, randomness="different")(torch.arange(number))
    finally:
        _tell(None, number)
    particles = list(zip(*(tensor.unbind(0) for tensor in stacked), strict=True)) or [()] * number
    return [_map(kept[0], functools.partial(_filled, own)) for own in particles]


def _filled(own: Sequence[Tensor], item: Any) -> Any:
    """What stands in a slot for a particle."""
    return own[item.index] if isinstance(item, _Slot) else item


class _Slot:
    """Stands for a tensor that every particle has its own of."""

    def __init__(self, tensors: list[Tensor], tensor: Tensor) -> None:
        self.index = len(tensors)
        tensors.append(tensor)


def _is_wrapped(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _map(item: Any, change: Callable[[Any], Any]) -> Any:
    """Changes all tensors within what a run has recorded; what holds none stays the same object."""
    if isinstance(item, (Tensor, _Slot)):
        return change(item)
    if isinstance(item, Trace):
        return _trace(item, change)
    if isinstance(item, dict):
        found = {key: _map(value, change) for key, value in item.items()}
        return found if _differ(found.values(), item.values()) else item
    if isinstance(item, (list, tuple)):
        parts = [_map(value, change) for value in item]
        if not _differ(parts, item):
            return item
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    if isinstance(item, (Distribution, Transform)):
        inside = {name: value for name, value in vars(item).items() if name != "_inv"}
        found = {name: _map(value, change) for name, value in inside.items()}
        if not _differ(found.values(), inside.values()):
            return item
        twin = copy.copy(item)
        vars(twin).update(found)
        if isinstance(twin, Transform):
            twin._inv = None
        return twin
    return item


def _trace(trace: Trace, change: Callable[[Any], Any]) -> Trace:
    """The sites of a trace; its arguments and its return value are left out."""
    found = Trace()
    for name, node in trace.nodes.items():
        if node["type"] == "sample":
            found.nodes[name] = {key: _map(value, change) for key, value in node.items()}  # type: ignore[assignment]
        elif node["type"] == "param":
            found.nodes[name] = node
    return found


def _differ(found: Any, items: Any) -> bool:
    return any(new is not old for new, old in zip(found, items, strict=True))
