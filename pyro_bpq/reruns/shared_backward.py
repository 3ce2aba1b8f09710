r"""One backward pass through the costs of a run, for slopes at sampled values and for parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.rollout.runs import Run
from pyro_bpq.tracing.linear_reads import nodes_behind


@dataclass(frozen=True)
class SharedBackward:
    """The result of a backward pass through the differentiable costs of a run."""

    slopes: Mapping[str, Tensor]  # the gradient of the costs to the leaves of the run, by site, detached
    # The same costs for the surrogate. If the pass also gave gradients of parameters, these costs depend on the
    # parameters directly. The backward pass of the step's loss then skips the program.
    differentiable: Tensor


def shared_backward(run: Run, share: float | None) -> SharedBackward:
    """Runs one backward pass through the costs of a run.

    ``share`` is the weight of the run in the step's loss, if the pass also gives gradients of parameters: hooks within
    the program then see gradients of the loss, and the result has first derivatives only. ``None`` gives slopes only.
    """
    leaves = {name: record.leaf for name, record in run.sites.items() if record.leaf is not None}
    total = run.differentiable
    if not total.requires_grad:
        return SharedBackward({name: torch.zeros_like(leaf) for name, leaf in leaves.items()}, total)
    inputs = [] if share is None else inputs_of(total, list(leaves.values()))
    # A hook has to see the complete gradient, which only the backward pass of the loss gives.
    inputs = [] if any(tensor._backward_hooks for tensor in inputs) else inputs
    # Log-probabilities of the guide may share a part of the graph, so it is kept.
    weight = 1.0 if share is None else share
    outer = torch.full_like(total, weight)
    found = torch.autograd.grad(total, [*leaves.values(), *inputs], outer, retain_graph=True, allow_unused=True)
    slopes = {
        name: torch.zeros_like(leaf) if slope is None else slope / weight
        for (name, leaf), slope in zip(leaves.items(), found, strict=False)
    }
    pairs = [(t, g) for t, g in zip(inputs, found[len(leaves) :], strict=True) if g is not None]
    if pairs:
        tensors, gradients = zip(*pairs, strict=True)
        # Estimators ask for slopes under no_grad().
        with torch.enable_grad():
            total = _Known.apply(total.detach(), gradients, weight, *tensors)  # type: ignore[no-untyped-call]
    return SharedBackward(slopes, total)


def with_gradients(value: Tensor, leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """A value with known gradients."""
    if not leaves:
        return value
    return _Known.apply(value, gradients, 1.0, *leaves)  # type: ignore[no-untyped-call]


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
    """A value with known gradients to some leaves; the known gradients are multiplied by a weight."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], weight: float, *inputs: Tensor) -> Tensor:
        ctx.gradients, ctx.weight = gradients, weight
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        factor = outer / ctx.weight
        # The scalar may be on another device than the gradient.
        return None, None, None, *(gradient * factor.to(gradient.device) for gradient in ctx.gradients)


def inputs_of(total: Tensor, leaves: Sequence[Tensor] = ()) -> list[Tensor]:
    """The leaves of an autograd graph that collect gradients, without the given ``leaves``."""
    known = {id(leaf) for leaf in leaves}
    variables = (getattr(node, "variable", None) for node in nodes_behind(total))
    return [variable for variable in variables if variable is not None and id(variable) not in known]
