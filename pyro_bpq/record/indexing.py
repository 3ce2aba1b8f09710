"""Functions of torch that read numbers on the way, in a form that does not: they stand in recordings in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MASKS = (torch.bool, torch.uint8)  # dtypes of index tensors that are masks, not positions


def is_position(index: object, *, masks: bool) -> bool:
    """Whether tensors in an index are only positions: no slice bounds, and scalar masks only if ``masks``."""
    if isinstance(index, (list, tuple)):
        return all(is_position(item, masks=masks) for item in index)
    if isinstance(index, Tensor):
        return masks or index.dim() > 0 or index.dtype not in MASKS
    if isinstance(index, slice):
        return not any(isinstance(bound, Tensor) for bound in (index.start, index.stop, index.step))
    return index is None or index is Ellipsis or isinstance(index, int)


def selected(value: Tensor, index: Any) -> Tensor:
    """``value[index]``, where some parts of the index are integer tensors without dimensions."""
    index = index if isinstance(index, tuple) else (index,)
    taken = sum(_dims(part) for part in index)
    dim, parts = 0, list[Any]()
    for part in index:
        if part is Ellipsis:
            dim += value.dim() - taken
        elif _is_scalar(part):
            value = value.index_select(dim, _row(part, value.shape[dim]))
            part = 0
        parts.append(part)
        dim += _dims(part)
    return value[tuple(parts)]


def put(target: Tensor, index: Any, value: Any) -> None:
    """``target[index] = value``, where some parts of the index are integer tensors without dimensions."""
    index = index if isinstance(index, tuple) else (index,)
    places = torch.arange(target.numel(), device=target.device).reshape(target.shape)
    at = selected(places, index)
    new = torch.as_tensor(value, dtype=target.dtype, device=target.device).expand(at.shape)
    target.copy_(target.flatten().index_put((at.flatten(),), new.flatten()).reshape(target.shape))


def one_hot(tensor: Tensor, num_classes: int) -> Tensor:
    """One-hot rows of whole numbers."""
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


def remade(data: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor of numbers and tensors, within lists too."""
    if isinstance(data, (list, tuple)):
        return torch.stack([remade(part, dtype, device) for part in data])
    if isinstance(data, Tensor):
        return data.detach().to(dtype=dtype, device=device)
    return torch.full((), data, dtype=dtype, device=device)


def copied(tensor: Tensor, source: Tensor, _: bool = False) -> Tensor:
    """What is in a tensor after ``tensor.copy_(source)``."""
    return source.to(tensor.dtype).expand(tensor.shape)


def filled(tensor: Tensor, number: Any) -> Tensor:
    """What is in a tensor after ``tensor.fill_(number)``."""
    return torch.as_tensor(number, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def written(tensor: Tensor, index: Sequence[Any], values: Tensor, accumulate: bool = False) -> Tensor:
    """``tensor.index_put(index, values)``; torch does not run writes by a mask of the whole for many rows at once."""
    is_mask = len(index) == 1 and index[0].dtype in MASKS and index[0].shape == tensor.shape
    if is_mask and values.dim() == 0 and not accumulate:
        return torch.where(index[0].bool(), values, tensor)
    return torch.ops.aten.index_put(tensor, [*index], values, accumulate)


def _row(part: Tensor, size: int) -> Tensor:
    return torch.where(part < 0, part + size, part).long().reshape(1)


def _is_scalar(part: Any) -> bool:
    if not isinstance(part, Tensor) or part.dim() > 0:
        return False
    return not (part.is_floating_point() or part.is_complex() or part.dtype in MASKS)


def _dims(part: Any) -> int:
    """Number of dimensions that a part of an index takes."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, Tensor) and part.dtype in MASKS:
        return part.dim()
    return 1
