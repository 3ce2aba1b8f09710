r"""Curvatures of costs in values that linear maps read, from squared weights.

If ``h = W u + b`` reads a value and a cost is a sum over the entries of ``h``, the cost's second derivative in entry
``d`` of ``u`` is

    Σ_j W_jd² ∂²cost/∂h_j².

Otherwise the second derivatives in ``h`` are probed by one random vector of signs, which neglects those in two entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_bpq.estimators.noise import uniform

# Operators that pass values on, one by one, as they are or shifted and scaled.
_PASSED_ON = frozenset(
    f"{name}Backward{i}"
    for name in (
        "Add Alias AsStrided Cat Clone Div Expand Mul Permute Reshape ReshapeAlias Rsub Select Slice Split "
        "SplitWithSizes Squeeze Stack Sub T ToCopy Transpose Unbind UnsafeView Unsqueeze View"
    ).split()
    for i in range(3)
)
# Those that give the same entries in the same order, and those of them that multiply by a number.
_SHIFTED = frozenset(
    f"{name}Backward{i}"
    for name in "Add Clone Neg ReshapeAlias Rsub Squeeze Sub UnsafeView Unsqueeze View".split()
    for i in range(3)
)
_SCALED = MappingProxyType({"MulBackward0": False, "DivBackward0": True})


@dataclass(frozen=True, eq=False)
class LinearRead:
    """A linear map that was applied to values.

    Args:
        source: Its argument ``u``, ``(..., F)``.
        weight: ``W``, ``(J, F)``, detached.
        output: ``W u + b``, ``(..., J)``.
        leaves: Names of the values that ``u`` consists of.
        scale: The factor ``(1,)`` between the entries of a value and those of ``u``, up to its sign, if ``u`` is that
            value in another shape, shifted and scaled. Otherwise ``None``.
    """

    source: Tensor
    weight: Tensor
    output: Tensor
    leaves: tuple[str, ...]
    scale: Tensor | None


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
        names = self._sources(source)
        if names:
            shaped = output if output.shape[-1:] == weight.shape[:1] else output.unsqueeze(-1)
            if shaped.shape[:-1] == source.shape[:-1]:
                # Not `shaped`: the costs read the output itself.
                self.found.append(LinearRead(source, weight.detach(), output, names, self._scale(source)))

    def _scale(self, source: Tensor) -> Tensor | None:
        """The factor between a leaf and what consists of it alone."""
        node: Any = source.grad_fn
        scale = torch.ones(1, dtype=source.dtype, device=source.device)
        while node is not None and getattr(node, "variable", None) is None:
            if node.name() in _SCALED:
                found = [getattr(node, key) for key in ("_saved_self", "_saved_other")]
                given = [factor for factor in found if factor is not None]
                if len(given) != 1 or given[0].dim() > 0:
                    return None
                # A number of Python is a tensor here that recorders know nothing of but in such operators.
                factor = given[0].detach() if given[0].requires_grad else given[0]
                scale = scale / factor if _SCALED[node.name()] else scale * factor
            elif node.name() not in _SHIFTED or getattr(node, "_saved_alpha", 1) != 1:
                return None
            before = [following for following, _ in node.next_functions if following is not None]
            if len(before) != 1:
                return None
            node = before[0]
        sizes = [leaf.numel() for leaf in self.leaves.values() if node is not None and leaf is node.variable]
        return scale if sizes == [source.numel()] else None

    def _sources(self, source: Tensor) -> tuple[str, ...]:
        """The leaves that a tensor consists of; none if anything but a shift or a scale was done to them."""
        names: dict[str, None] = {}
        seen: set[Any] = set()
        nodes: list[Any] = [source.grad_fn]
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
                return ()
            nodes += [following for following, _ in node.next_functions]
        return tuple(names)


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


def expansions(
    total: Tensor,
    reads: Sequence[LinearRead],
    leaves: Mapping[str, Tensor],
    blocks: Mapping[str, int],
    generator: torch.Generator | None,
    nesting: int | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """First and second derivatives of a sum of costs in the entries of leaves.

    Second ones are found as far as linear maps read the leaves.

    Args:
        total: The sum, a scalar.
        reads: The linear maps.
        leaves: The leaves by name.
        blocks: For some leaves the size ``K`` of the blocks within which mixed derivatives are found too; for the
            others the derivatives lie on the diagonal.
        generator: Draws the signs.
        nesting: If given, second derivatives are averaged over the leftmost of so many batch dimensions.

    Returns:
        For each leaf a tensor of its shape, and one of second derivatives, which may lack the size of the particles and
        has another dimension ``K`` for mixed derivatives. Leaves that nothing reads are left out.
    """
    outputs = [read.output for read in reads]
    asked = [*leaves.values(), *outputs]
    found = torch.autograd.grad(total, asked, create_graph=bool(outputs), allow_unused=True, retain_graph=True)
    slopes = {name: slope.detach() for name, slope in zip(leaves, found, strict=False) if slope is not None}
    return slopes, _curvatures(reads, found[len(leaves) :], leaves, blocks, generator, nesting)


def _curvatures(
    reads: Sequence[LinearRead],
    first: Sequence[Tensor | None],
    leaves: Mapping[str, Tensor],
    blocks: Mapping[str, int],
    generator: torch.Generator | None,
    nesting: int | None,
) -> dict[str, Tensor]:
    """Second derivatives in leaves, from first derivatives in the outputs of linear maps."""
    pairs = [(read, slope) for read, slope in zip(reads, first, strict=True) if slope is not None]
    pairs = [(read, slope) for read, slope in pairs if slope.requires_grad]
    if not pairs:
        return {}
    signs = [_signs(slope, generator) for _, slope in pairs]
    outputs, slopes = [read.output for read, _ in pairs], [slope for _, slope in pairs]
    probes = [sign.expand_as(slope) for sign, slope in zip(signs, slopes, strict=True)]
    second = torch.autograd.grad(slopes, outputs, probes, allow_unused=True, retain_graph=True)
    found: dict[str, Tensor] = {}
    for (read, _), sign, bent in zip(pairs, signs, second, strict=True):
        if bent is None:
            continue
        curved = bent.detach()
        if nesting is not None and read.scale is not None and curved.dim() == nesting + 1:
            # Each particle's own would be hardly better, and takes a product of matrices for each.
            curved = curved.mean(0, keepdim=True)
        curved = sign * curved
        curved = curved if curved.shape[-1:] == read.weight.shape[:1] else curved.unsqueeze(-1)
        for name in read.leaves:
            part = _in_leaf(read, curved, leaves[name], blocks.get(name))
            if part is not None:
                found[name] = found[name] + part if name in found else part
    return found


def _signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Random signs, the same for all rows."""
    assert generator is not None
    one = like.detach().new_ones(like.shape[-1:] if like.dim() else ())
    return torch.where(uniform(one, generator) < 0.5, -one, one)


def _in_leaf(read: LinearRead, curved: Tensor, leaf: Tensor, block: int | None) -> Tensor | None:
    """From second derivatives in the output of a map to those in a leaf."""
    if block is not None:
        if read.scale is None:
            return None
        weight = (read.scale * read.weight).reshape(len(read.weight), -1, block)
        mixed = (weight.unsqueeze(-1) * weight.unsqueeze(-2)).flatten(1)
        return _shaped(curved @ mixed, (*leaf.shape, block))
    if read.scale is not None:
        return _shaped(curved @ (read.scale * read.weight).square(), leaf.shape)
    squared = curved @ read.weight.square()
    # Each entry of the source reads at most one entry of the leaf, with a slope that enters squared.
    outer = torch.zeros_like(read.source, requires_grad=True)
    (back,) = torch.autograd.grad(read.source, leaf, outer, create_graph=True)
    (slope,) = torch.autograd.grad(back, outer, torch.ones_like(leaf))
    (found,) = torch.autograd.grad(read.source, leaf, squared * slope, retain_graph=True)
    return found


def _shaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor in the shape of a leaf; averages keep a first dimension of one."""
    return tensor.reshape(shape) if tensor.numel() == math.prod(shape) else tensor.reshape(1, *shape[1:])
