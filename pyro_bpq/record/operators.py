"""What an operator of torch does besides computing new tensors: reads, writes, sizes that depend on values, draws.

Functions that read numbers on the way have a form here that does not: it stands in recordings in their place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SHAPE_FROM = MappingProxyType({"masked_select": 1, "index": 1, "sparse_mask": 1, "_pack_padded_sequence": 1})
_UNTAGGED_SHAPES = re.compile(
    r"(_coalesce|_?to_sparse|nonzero_numpy|repeat_interleave|tensor_split|unique_dim|_nested_tensor_from_mask)\..*"
    r"|where\."
)
_METADATA = re.compile(
    r"(sym_|_is_|is_(?!nonzero)|_use_|_dim|_nested_get|_debug_|_has_|\w*attention)\w*|_fused_sdp_choice|size|dim"
    r"|numel|stride|(dense|sparse)_dim|result_type|_version|cudnn_is_acceptable|_batch_norm_impl_index"
)
# Operators whose results share memory though their schemas do not tell.
_SHARING = re.compile(r"_?unsafe_\w+|lift|\w*sparse\w*")
# Operators that pass entries on, one by one and in their order.
PASSING = frozenset("view _unsafe_view reshape unsqueeze squeeze expand clone alias detach _to_copy".split())
# Elementwise operators that fail at some whole numbers.
_PARTIAL = frozenset(("div", "floor_divide", "fmod", "pow", "remainder"))


class Effects(NamedTuple):
    """What an operator does besides computing new tensors from its arguments."""

    name: str = ""
    reads: bool = False  # gives numbers to Python
    is_sized: bool = False  # the shape of the result depends on values
    shape_from: int | None = None  # position of the argument with these values; None: any argument
    writes: tuple[int | str, ...] = ()  # positions, or names, of the arguments that it writes into
    is_view: bool = False  # the result is another view of an argument's memory
    allocates: bool = False  # the result has memory of its own
    is_blank: bool = False  # only the shape of its argument matters
    is_random: bool = False  # draws from a generator
    is_total: bool = False  # never fails because of a value
    takes_type: bool = False  # takes the type of its result as an argument


@cache
def effects_of(func: Any) -> Effects:
    """What an operator does."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # a function, or a higher-order operator
        return Effects(getattr(func, "__name__", str(func)))
    name = schema.name.removeprefix("aten::")
    writes = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    opaque = any("Tensor" not in str(result.type) for result in schema.returns)
    sized = torch.Tag.dynamic_output_shape in func.tags or name in _SHAPE_FROM
    sized = sized or bool(_UNTAGGED_SHAPES.fullmatch(f"{name}.{schema.overload_name}"))
    if "batch_norm" in name:
        # In training, it updates its running statistics, but its schema does not declare the write.
        writes += tuple(position for position, argument in enumerate(schema.arguments) if "running" in argument.name)
    tensors = sum("Tensor" in str(argument.type) for argument in schema.arguments)
    kind = Effects(
        name,
        reads=torch.Tag.data_dependent_output in func.tags or (opaque and not _METADATA.fullmatch(name)),
        is_sized=sized,
        shape_from=_SHAPE_FROM.get(name),
        writes=writes,
        is_view=any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns),
        # A value that decided the shape of the argument has been read already.
        is_blank=tensors == 1 and bool(re.fullmatch(r"new_\w+|\w+_like", name)),
        # On the CPU attention with dropout is made of other operators.
        is_random=torch.Tag.nondeterministic_seeded in func.tags and not name.endswith("attention_for_cpu"),
        takes_type=any(argument.name == "dtype" for argument in schema.arguments),
    )
    is_total = kind.is_view or (torch.Tag.pointwise in func.tags and name.rstrip("_") not in _PARTIAL)
    # What is made of other operators, as inference mode shows, may give back what it took.
    hides = _SHARING.fullmatch(name) or func._can_decompose()
    allocates = not hides and all(result.alias_info is None for result in schema.returns)
    return kind._replace(is_total=is_total, allocates=allocates)


def sizing(kind: Effects, args: Any) -> Any:
    """The arguments of an operator that decide on the shape of its result."""
    found = args if kind.shape_from is None else args[kind.shape_from]
    if isinstance(found, list):  # indices of a tensor: only masks do
        return [index for index in found if isinstance(index, Tensor) and index.dtype in MASKS]
    return found


def written_arguments(kind: Effects, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that a call writes into."""
    if not kind.writes or ("batch_norm" in kind.name and not any(arg is True for arg in args)):
        return []  # batch_norm takes its running statistics as they are
    named = kwargs or {}
    return [named.get(key) if isinstance(key, str) else args[key] if key < len(args) else None for key in kind.writes]


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


def has_scalars(index: Any) -> bool:
    """Whether some parts of an index are integer tensors without dimensions."""
    return any(map(_is_scalar, index if isinstance(index, tuple) else (index,)))


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
