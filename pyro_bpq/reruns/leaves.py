r"""Leaves: those that a run reaches or a value has gradients to, their gradients, and other values of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.record.watch import leaf_of


def gradients_of(value: Tensor, leaves: Sequence[Tensor], **options: Any) -> dict[Tensor, Tensor]:
    """The gradient of a scalar to each of the leaves that it reads; ``options`` are those of ``torch.autograd``."""
    if not (leaves and value.requires_grad):
        return {}
    found = torch.autograd.grad(value, leaves, allow_unused=True, **options)
    return {leaf: gradient for leaf, gradient in zip(leaves, found, strict=True) if gradient is not None}


def with_gradients(value: Tensor, leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """A value with known gradients."""
    return _Known.apply(value, gradients, *leaves) if leaves else value  # type: ignore[no-untyped-call]


def add_gradients(leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Adds gradients to ``.grad``, as ``backward`` does."""
    given = set[int]()
    with torch.no_grad():
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if leaf.grad is not None:
                leaf.grad.add_(gradient)
                continue
            # Two leaves may not share a gradient, which optimisers write into.
            is_own = gradient.is_contiguous() and gradient.data_ptr() not in given
            leaf.grad = gradient if is_own else gradient.clone(memory_format=torch.contiguous_format)
            given.add(leaf.grad.data_ptr())


class _Known(torch.autograd.Function):
    """A value with known gradients to some leaves."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        # The scalar may be on another device than the gradient.
        return None, None, *(gradient * outer.to(gradient.device) for gradient in ctx.gradients)


def inputs_of(*totals: Tensor, blocked: Container[str] = ()) -> list[Tensor]:
    """The leaves of an autograd graph that collect gradients; no way leads through ``blocked`` operators."""
    seen, nodes, found = set[Any]((None,)), [total.grad_fn for total in totals], list[Tensor]()
    while nodes:
        node: Any = nodes.pop()
        if node in seen or (blocked and node.name().partition("Backward")[0].lower() in blocked):
            continue
        seen.add(node)
        found += [] if getattr(node, "variable", None) is None else [node.variable]
        nodes += [following for following, _ in node.next_functions]
    return found


def traced_leaves(trace: Any) -> dict[str, Tensor]:
    """The leaf parameters in a trace, by name."""
    values = {name: site["value"] for name, site in trace.nodes.items() if site["type"] == "param"}
    leaves = {name: leaf_of(value) for name, value in values.items() if isinstance(value, Tensor)}
    return {name: leaf for name, leaf in leaves.items() if leaf.is_leaf and leaf.requires_grad}


def guide_leaves(traced: TracedRun, guide: Any) -> dict[str, Tensor]:
    """The leaf parameters that a run of the guide reached, by name."""
    leaves = traced_leaves(traced.guide_trace)
    # One program may wrap a policy and an environment.
    for part in (guide, *(guide.args if isinstance(guide, functools.partial) else ())):
        module = poutine.unwrap(part) if callable(part) else part
        if isinstance(module, nn.Module):
            seen = {id(leaf) for leaf in leaves.values()}
            leaves.update({name: p for name, p in module.named_parameters() if id(p) not in seen})
    return leaves


@contextlib.contextmanager
def swapped(leaves: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Gives parameters other values within the context."""
    own = {name: leaf.data for name, leaf in leaves.items() if name in values}
    try:
        for name in own:
            leaves[name].data = values[name]
        yield
    finally:
        for name, value in own.items():
            leaves[name].data = value
