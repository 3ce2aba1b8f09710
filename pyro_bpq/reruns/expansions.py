r"""Curvatures of costs in values that linear maps read, from squared weights.

If ``h = W u + b`` reads a value and a cost is a sum over the entries of ``h``, the cost's second derivative in entry
``d`` of ``u`` is

    Σ_j W_jd² ∂²cost/∂h_j².

Otherwise the second derivatives in ``h`` are probed by one random vector of signs, which neglects those in two entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyro_bpq.estimators.noise import signs
from pyro_bpq.tracing.linear_reads import LinearRead


def expansions(
    total: Tensor,
    reads: Sequence[LinearRead],
    leaves: Mapping[str, Tensor],
    blocks: Mapping[str, int],
    generator: torch.Generator | None,
    nesting: int | None,
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
        nesting: Second derivatives are averaged over the leftmost of so many batch dimensions; ``None`` for no average.

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
    drawn = _signs([slope for _, slope in pairs], generator)
    outputs, slopes = [read.output for read, _ in pairs], [slope for _, slope in pairs]
    probes = [sign.expand_as(slope) for sign, slope in zip(drawn, slopes, strict=True)]
    second = torch.autograd.grad(slopes, outputs, probes, allow_unused=True, retain_graph=True)
    found: dict[str, Tensor] = {}
    for (read, _), sign, bent in zip(pairs, drawn, second, strict=True):
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


def _signs(slopes: Sequence[Tensor], generator: torch.Generator | None) -> list[Tensor]:
    """Random signs for each slope, the same for all of its rows."""
    assert generator is not None
    sizes = [slope.shape[-1] if slope.dim() else 1 for slope in slopes]
    parts = signs(slopes[0].new_empty(sum(sizes)), generator).split(sizes)
    return [part.reshape(slope.shape[-1:]).to(slope.dtype) for part, slope in zip(parts, slopes, strict=True)]


def _in_leaf(read: LinearRead, curved: Tensor, leaf: Tensor, block: int | None) -> Tensor | None:
    """From second derivatives in the output of a map to those in a leaf."""
    if block is not None:
        if read.scale is None:
            return None
        weight = (read.scale * read.weight).reshape(len(read.weight), -1, block)
        mixed = (weight.unsqueeze(-1) * weight.unsqueeze(-2)).flatten(1)
        return _shaped(curved @ mixed, (*leaf.shape, block))
    if read.scale is not None:
        return _shaped((curved @ read.weight.square()) * read.scale.square(), leaf.shape)
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
