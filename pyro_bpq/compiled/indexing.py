r"""Functions of torch that read numbers on the way, which a recording would freeze.

``x[a]`` with an integer tensor ``a`` without dimensions takes the row whose number ``a`` holds, and ``one_hot`` looks
whether an index is in range. Here operators give the same results without reading.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_bpq.compiled.watch import draws_seed, refuse_read

# What hands out the memory of a tensor; no operator shows it.
_LEAVES_TORCH = frozenset((Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.untyped_storage))


class RecordedIndexing(TorchFunctionMode):
    """Lets programs use these functions while they are recorded."""

    def __repr__(self) -> str:
        return "RecordedIndexing()"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[0], Tensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(_is_scalar(part) for part in index):
                return selected(args[0], index)
        if func in _LEAVES_TORCH:
            refuse_read()
        if func is torch.randint and draws_seed():
            # Of a further run that draws nothing, or else the step is not recorded: any seed will do.
            return 0
        if func is torch.nn.functional.one_hot:
            return _one_hot(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def selected(value: Tensor, index: tuple[Any, ...]) -> Tensor:
    """``value[index]``, where some parts of the index are integer tensors without dimensions."""
    taken = sum(_dims(part) for part in index)
    dim, parts = 0, list[Any]()
    for part in index:
        if part is Ellipsis:
            dim += value.dim() - taken
        elif _is_scalar(part):
            size = value.shape[dim]
            row = torch.where(part < 0, part + size, part).long()
            value = value.index_select(dim, row.reshape(1))
            part = 0
        parts.append(part)
        dim += _dims(part)
    return value[tuple(parts)]


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        return torch.nn.functional.one_hot(tensor)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


def _is_scalar(part: Any) -> bool:
    if not isinstance(part, Tensor) or part.dim() > 0:
        return False
    return not (part.is_floating_point() or part.is_complex() or part.dtype in (torch.bool, torch.uint8))


def _dims(part: Any) -> int:
    """Number of dimensions that a part of an index takes."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 1
