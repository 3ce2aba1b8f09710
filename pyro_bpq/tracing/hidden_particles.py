r"""Runs a program once for several particles, in a dimension that the program does not see.

:func:`torch.func.vmap` runs guide and model over the particles. Both see the values of one particle, so ``z[0]`` and
``z.sum()`` mean the same as in a run of one particle. The recorded traces are then split: each particle gets its own
traces, with distributions that hold its own parameters. A program that vmap refuses must run once per particle.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import effectful
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions import Distribution, Transform
from torch.overrides import TorchFunctionMode

from pyro_bpq.tracing.plain_values import flags_of
from pyro_bpq.tracing.sandbox import LentBuffers, Wrapped, is_wrapped
from pyro_bpq.tracing.traced_run import TracedRun, record_run
from pyro_bpq.tracing.tracer import Args, Kwargs, Part, importance_traces
from pyro_bpq.tracing.watch import TraceOptions, Watch, samples

# Traces of model and guide with log-probabilities, and the drawn subsamples.
_Traces = tuple[Trace, Trace, Mapping[str, Any]]

# Type of the message that tells handlers that draw in place of the generator which particle a value is for.
PARTICLE = "bpq_particle"


@effectful(type=PARTICLE)
def _tell(index: Tensor | None, number: int) -> None:
    """Announces the particle index (a tensor with the hidden dimension) and count; ``None`` at the end."""


class HiddenFactories(TorchFunctionMode):
    """Creates the tensors of a program with the hidden dimension, so that the program may write into them.

    Without this, vmap would refuse ``kept = torch.zeros(3); kept[0] = z`` and ``torch.empty(3).normal_()``.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _FACTORIES or not isinstance(result, Tensor) or is_wrapped(result):
            return result
        every = result.unsqueeze(0).repeat(self.number, *(1,) * result.dim())
        level = torch._C._functorch.maybe_current_level()
        assert level is not None
        return torch._C._functorch._add_batch_dim(every, 0, level)


class KnownParameters(Messenger):
    """Leaves out the initial values of parameters that exist, as in ``pyro.param("w", torch.randn(3))``.

    Handlers from outside keep what they are told, and would keep tensors of the hidden run.
    """

    def _pyro_param(self, msg: Any) -> None:
        given = msg["args"][1:]
        if given and msg["name"] in pyro.get_param_store() and isinstance(given[0], Tensor) and is_wrapped(given[0]):
            msg["args"] = msg["args"][:1]


_FACTORIES = frozenset(
    (
        *(torch.zeros, torch.ones, torch.empty, torch.full),
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
        *(Tensor.new, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full),
    )
)


def trace_particles(
    model: Part,
    guide: Part,
    args: Args,
    kwargs: Kwargs,
    options: TraceOptions,
    is_checked: bool = True,
    has_buffers: bool = True,
) -> list[TracedRun]:
    """Runs guide and model once for all particles, untracked, in a dimension that they do not see.

    If ``is_checked``, the programs must keep no tensor of the run. If they may call modules with buffers and the run
    fails, buffers stay as they were.

    Raises:
        RuntimeError: If the programs cannot run in a hidden dimension.
    """
    start, number = torch.get_rng_state(), options.num_particles

    def run() -> _Traces:
        watch = Watch(options)
        # Validation reads values, which vmap forbids. An earlier run of one particle has passed validation.
        with watch, KnownParameters(), pyro.validation_enabled(False):
            model_trace, guide_trace, _ = importance_traces(model, watch, guide, args, kwargs)
        if watch.untraced or watch.enumerated or watch.attached or watch.costs:
            raise RuntimeError(
                "programs with cost statements, enumerated sites, infer={'_do_not_trace': True} or estimators that "
                "attach gradients cannot run in a hidden dimension"
            )
        return model_trace, guide_trace, watch.subsamples

    wrapped = Wrapped()
    with LentBuffers() if has_buffers else contextlib.nullcontext() as lent:
        with wrapped if is_checked else contextlib.nullcontext():
            traces = _hidden_traces(run, number)
        if is_checked and wrapped.any_alive():
            raise RuntimeError("the programs keep a tensor of the run, as by self.z = z")
        if lent is not None:
            lent.keep()
    rng, flags = (start, torch.get_rng_state()), flags_of(args, kwargs)
    return [
        record_run(model_trace, guide_trace, samples(guide_trace), number, subsamples, rng, flags)
        for model_trace, guide_trace, subsamples in traces
    ]


def _hidden_traces(run: Callable[[], _Traces], number: int) -> list[_Traces]:
    """Returns what ``run`` gives for each particle, from one call; each particle draws its own values."""
    kept: list[Any] = []

    def one(index: Tensor) -> tuple[Tensor, ...]:
        tensors: list[Tensor] = []

        def emptied(tensor: Tensor) -> Any:
            if not is_wrapped(tensor):
                return tensor
            tensors.append(tensor)
            return _Slot(len(tensors) - 1)

        _tell(index, number)
        with HiddenFactories(number):
            found = run()
        kept.append(_map(found, emptied))
        return tuple(tensors)

    try:
        with warnings.catch_warnings():
            # vmap warns about operators that run one particle after the other.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            stacked = torch.func.vmap(one, randomness="different")(torch.arange(number))
    finally:
        _tell(None, number)
    rows = [tensor.unbind(0) for tensor in stacked]

    def particle(i: int) -> Any:
        return _map(kept[0], lambda item: rows[item.index][i] if isinstance(item, _Slot) else item)

    return [particle(i) for i in range(number)]


@dataclass(frozen=True)
class _Slot:
    """Placeholder for a tensor of which each particle has its own."""

    index: int


def _map(item: Any, change: Callable[[Any], Any]) -> Any:
    """Applies ``change`` to all tensors in a recorded item; a part without tensors stays the same object."""
    if isinstance(item, (Tensor, _Slot)):
        return change(item)
    if isinstance(item, Trace):
        # Its arguments and its return value are left out.
        copied = Trace()
        for name, node in item.nodes.items():
            if node["type"] == "sample":
                copied.nodes[name] = {key: _map(value, change) for key, value in node.items()}  # type: ignore[assignment]
            elif node["type"] == "param":
                copied.nodes[name] = node
        return copied
    if isinstance(item, dict):
        return _changed(item, change) or item
    if isinstance(item, (list, tuple)):
        parts = _changed(dict(enumerate(item)), change)
        if parts is None:
            return item
        return type(item)(*parts.values()) if hasattr(item, "_fields") else type(item)(parts.values())
    if isinstance(item, (Distribution, Transform)):
        found = _changed({name: value for name, value in vars(item).items() if name != "_inv"}, change)
        if found is None:
            return item
        twin = copy.copy(item)
        vars(twin).update(found)
        if isinstance(twin, Transform):
            twin._inv = None
        return twin
    return item


def _changed(parts: dict[Any, Any], change: Callable[[Any], Any]) -> dict[Any, Any] | None:
    """Applies ``change`` to all tensors in some parts; ``None`` if it changes nothing."""
    found = {key: _map(value, change) for key, value in parts.items()}
    return found if any(found[key] is not value for key, value in parts.items()) else None
