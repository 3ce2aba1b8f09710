r"""Curvatures of costs in values that linear maps read, from squared weights.

If ``h = W u + b`` reads a value and a cost is a sum over the entries of ``h``, the cost's second derivative in entry
``d`` of ``u`` is

    Σ_j W_jd² ∂²cost/∂h_j².

Otherwise the second derivatives in ``h`` are probed by one random vector of signs, which neglects those in two entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Operators that pass values on, one by one, as they are or shifted and scaled.
_PASSED_ON = frozenset(
    f"{name}Backward{i}"
    for name in (
        "Add Alias AsStrided Cat Clone Div Expand Mul Permute Reshape ReshapeAlias Rsub Select Slice Split "
        "SplitWithSizes Squeeze Stack Sub T ToCopy Transpose Unbind UnsafeView Unsqueeze View"
    ).split()
    for i in range(3)
)
_VIEWS = frozenset(f"{name}Backward{i}" for name in ("Clone", "ReshapeAlias", "UnsafeView", "View") for i in range(3))


@dataclass(frozen=True, eq=False)
class LinearRead:
    """A linear map that was applied to values.

    Args:
        source: Its argument ``u``, ``(..., F)``.
        weight: ``W``, ``(J, F)``, detached.
        output: ``W u + b``, ``(..., J)``.
        leaves: Names of the values that ``u`` consists of.
        is_view: Whether ``u`` is a value in another shape.
    """

    source: Tensor
    weight: Tensor
    output: Tensor
    leaves: tuple[str, ...]
    is_view: bool


class LinearReads(TorchFunctionMode):
    """Notes the first linear map on every way from some leaves.

    Args:
        leaves: The leaves by name.

    Attributes:
        found: The linear maps.
    """

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.leaves = leaves
        self.found: list[LinearRead] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carries the operator out."""
        output = func(*args, **(kwargs or {}))
        pair = _linear(func, args, kwargs or {})
        if pair is not None and isinstance(output, Tensor) and output.requires_grad:
            self._note(*pair, output)
        return output

    def _note(self, source: Tensor, weight: Tensor, output: Tensor) -> None:
        if not source.requires_grad or weight.dim() != 2:
            return
        names, is_view = self._sources(source)
        if names:
            shaped = output if output.shape[-1:] == weight.shape[:1] else output.unsqueeze(-1)
            if shaped.shape[:-1] == source.shape[:-1]:
                # Not `shaped`: the costs read the output itself.
                self.found.append(LinearRead(source, weight.detach(), output, names, is_view))

    def _sources(self, source: Tensor) -> tuple[tuple[str, ...], bool]:
        """The leaves that a tensor consists of; none if anything but a shift or a scale was done to them."""
        names: dict[str, None] = {}
        seen: set[Any] = set()
        nodes: list[Any] = [source.grad_fn]
        is_view = True
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                names.update({name: None for name, leaf in self.leaves.items() if leaf is variable})
                continue
            if node.name() not in _PASSED_ON:
                return (), False
            is_view = is_view and node.name() in _VIEWS
            nodes += [following for following, _ in node.next_functions]
        return tuple(names), is_view and len(names) == 1


def _linear(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The argument and the weight ``(J, F)`` of an operator, if it is a linear map."""
    if func is torch.nn.functional.linear:
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        return (args[0] if args else kwargs["input"]), weight
    if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm):
        if len(args) != 2 or not all(isinstance(arg, Tensor) for arg in args):
            return None
        left, right = args
        if right.dim() == 2 and left.requires_grad:
            return left, right.t()
        if right.dim() == 1:
            is_matrix = left.dim() == 2 and right.requires_grad and right.numel() > 0
            return (right, left) if is_matrix else (left, right.unsqueeze(0))
    if func is torch.addmm and len(args) == 3 and not kwargs:
        return args[1], args[2].t()
    return None


def curvatures(
    total: Tensor,
    reads: Sequence[LinearRead],
    leaves: Mapping[str, Tensor],
    blocks: Mapping[str, int],
    generator: torch.Generator | None,
) -> dict[str, Tensor]:
    """Second derivatives of a sum of costs in the entries of leaves, as far as linear maps read these.

    Args:
        total: The sum, a scalar.
        reads: The linear maps.
        leaves: The leaves by name.
        blocks: For some leaves the size ``K`` of the blocks within which mixed derivatives are found too; for the
            others the derivatives lie on the diagonal.
        generator: Draws the signs.

    Returns:
        For each leaf a tensor of its shape, or with another dimension ``K`` for mixed derivatives. Leaves that no
        linear map reads are left out.
    """
    outputs = [read.output for read in reads]
    if not outputs or not total.requires_grad:
        return {}
    first = torch.autograd.grad(total, outputs, create_graph=True, allow_unused=True, retain_graph=True)
    pairs = [(read, slope) for read, slope in zip(reads, first, strict=True) if slope is not None]
    pairs = [(read, slope) for read, slope in pairs if slope.requires_grad]
    if not pairs:
        return {}
    signs = [_signs(slope, generator) for _, slope in pairs]
    probe = sum(((sign * slope).sum() for sign, (_, slope) in zip(signs, pairs, strict=True)), total.new_zeros(()))
    asked = [read.output for read, _ in pairs]
    second = torch.autograd.grad(probe, asked, allow_unused=True, retain_graph=True)
    found: dict[str, Tensor] = {}
    for (read, _), sign, bent in zip(pairs, signs, second, strict=True):
        if bent is None:
            continue
        curved = (sign * bent).detach()
        curved = curved if curved.shape[-1:] == read.weight.shape[:1] else curved.unsqueeze(-1)
        for name in read.leaves:
            part = _in_leaf(read, curved, leaves[name], blocks.get(name))
            if part is not None:
                found[name] = found[name] + part if name in found else part
    return found


def _signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Random signs, the same for all rows."""
    size = like.shape[-1:] if like.dim() else ()
    drawn = torch.randint(2, size, generator=generator)
    return (2 * drawn - 1).to(like)


def _in_leaf(read: LinearRead, curved: Tensor, leaf: Tensor, block: int | None) -> Tensor | None:
    """From second derivatives in the output of a map to those in a leaf."""
    if block is not None:
        if not read.is_view:
            return None
        weight = read.weight.reshape(len(read.weight), -1, block)
        mixed = (weight.unsqueeze(-1) * weight.unsqueeze(-2)).flatten(1)
        return (curved @ mixed).reshape(*leaf.shape, block)
    squared = curved @ read.weight.square()
    if read.is_view:
        return squared.reshape(leaf.shape)
    # Each entry of the source reads at most one entry of the leaf, with a slope that enters squared.
    outer = torch.zeros_like(read.source, requires_grad=True)
    (back,) = torch.autograd.grad(read.source, leaf, outer, create_graph=True)
    (slope,) = torch.autograd.grad(back, outer, torch.ones_like(leaf))
    (found,) = torch.autograd.grad(read.source, leaf, squared * slope, retain_graph=True)
    return found
