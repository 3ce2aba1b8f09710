r"""One backward pass through the costs of a run, for the slopes at sampled values and for the parameters alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.rollout.runs import Run

__all__ = ["SharedBackward", "inputs_of", "shared_backward"]


@dataclass(frozen=True)
class SharedBackward:
    """What a backward pass through the differentiable costs of a run has found.

    Args:
        slopes: Their gradient to the leaves of the run, by site, detached.
        differentiable: The same costs for the surrogate. If the pass was for the parameters too, they lead straight to
            them: the second pass, that of the step's loss, does not go through the program again.
    """

    slopes: Mapping[str, Tensor]
    differentiable: Tensor


def shared_backward(run: Run, share: float | None) -> SharedBackward:
    """Goes back once through the costs of a run.

    Args:
        run: A run with leaves.
        share: Weight of the run in the step's loss, if the pass is for the parameters too: hooks within the program see
            the gradients of the loss, and the result has first derivatives only. ``None`` for slopes alone.

    Returns:
        The slopes, and costs with the same value and gradient as before.
    """
    leaves = {name: record.leaf for name, record in run.sites.items() if record.leaf is not None}
    total = run.differentiable
    if not total.requires_grad:
        return SharedBackward({name: torch.zeros_like(leaf) for name, leaf in leaves.items()}, total)
    inputs = [] if share is None else inputs_of(total, list(leaves.values()))
    # A hook is called where a gradient is complete, which it is only in the pass of the loss.
    inputs = [] if any(tensor._backward_hooks for tensor in inputs) else inputs
    # The graph is kept: log-probabilities of the guide may share a part of it.
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
        # Estimators ask for slopes without recording gradients.
        with torch.enable_grad():
            total = _Known.apply(total.detach(), gradients, weight, *tensors)  # type: ignore[no-untyped-call]
    return SharedBackward(slopes, total)


class _Known(torch.autograd.Function):
    """A value whose gradients to some leaves are known, times a weight."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], weight: float, *inputs: Tensor) -> Tensor:
        ctx.gradients, ctx.weight = gradients, weight
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        factor = outer / ctx.weight
        # A scalar of one device cannot be multiplied with a tensor of another.
        return None, None, None, *(gradient * factor.to(gradient.device) for gradient in ctx.gradients)


def inputs_of(total: Tensor, leaves: Sequence[Tensor] = ()) -> list[Tensor]:
    """The leaves of a graph that collect gradients, but for some."""
    known, seen, found = {id(leaf) for leaf in leaves}, set(), []
    nodes = [total.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            found.append(variable)
        nodes += [following for following, _ in node.next_functions]
    return found
