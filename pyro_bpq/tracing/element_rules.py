r"""Rules for the elements of a source that the result of an operator depends on.

A rule maps the arguments of an operator to the positions of its result: for each element of the result, the element of
the source that it depends on. It may name more than the truth, and never less. An operator without a rule mixes all
elements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, reduce
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

NONE, MANY = -1, -2
"""``NONE``: depends on no element of the source. ``MANY``: depends on several, or on an unknown one."""

SHAPING = frozenset(("dim", "keepdim"))
"""Names of arguments, given by name only, that rules must know. A rule that does not take them says nothing."""

# Largest number of places of a write by index that are followed.
_MOST_PLACES = 4096

Positions = np.ndarray
# Returns the positions of an argument, or raises Unknown.
_Find = Callable[[Any], Positions]


class Unknown(Exception):
    """Nothing is known of the elements that a tensor depends on."""


def tensors_in(items: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among some arguments, within lists too."""
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from tensors_in(item)


def _combine(*parts: Positions) -> Positions:
    """The positions of a result whose elements depend on all parts, broadcast."""
    return reduce(
        lambda a, b: np.where(a == NONE, b, np.where((b == NONE) | (b == a), a, MANY)),  # the same element, or many
        parts,
    )


def _reduce(positions: Positions, dims: Any, keepdim: bool) -> Positions:
    """The positions of a reduction over some dimensions."""
    axis = tuple(range(positions.ndim)) if dims is None or dims == [] else tuple(np.atleast_1d(dims).tolist())
    largest = np.iinfo(np.int32).max
    high = positions.max(axis=axis, keepdims=keepdim, initial=MANY)
    low = np.where(positions == NONE, largest, positions).min(axis=axis, keepdims=keepdim, initial=largest)
    return np.where(high == NONE, np.where(low == MANY, MANY, NONE), np.where(low == high, high, MANY))


def _spread(positions: Positions, dims: Any) -> Positions:
    """The positions of a result that depends on all of some dimensions and keeps them."""
    return np.broadcast_to(_reduce(positions, dims, True), positions.shape)


def _pointwise(find: _Find, *args: Any) -> Positions:
    return _combine(*map(find, tensors_in(args)))


def _sum(find: _Find, tensor: Any, dims: Any = None, keepdim: Any = False, *rest: Any) -> Positions:
    return _reduce(find(tensor), dims, bool(keepdim))


def _extreme(find: _Find, tensor: Any, dims: Any = None, keepdim: Any = False, *rest: Any) -> Positions:
    """Rule for ``max`` and ``min``: reductions, or elementwise operators if a second tensor is given."""
    return _pointwise(find, tensor, dims) if isinstance(dims, Tensor) else _sum(find, tensor, dims, keepdim)


def _along(find: _Find, tensor: Any, dim: int = -1, *rest: Any) -> Positions:
    return _spread(find(tensor), dim)


def _matmul(find: _Find, left: Any, right: Any) -> Positions:
    return _combine(_reduce(find(left), -1, True), _reduce(find(right), -2, True))


def _addmm(find: _Find, bias: Any, left: Any, right: Any, *rest: Any) -> Positions:
    return _combine(find(bias), _matmul(find, left, right))


def _mv(find: _Find, left: Any, right: Any) -> Positions:
    return _combine(_reduce(find(left), -1, False), _reduce(find(right), -1, False))


def _index(find: _Find, table: Any, indices: Any) -> Positions:
    """Rule for ``table[z]`` if the table does not depend on the source: entries depend on their index."""
    # If the table depends on the source, the next run may read other elements of it.
    if any(index is None or index.dtype is torch.bool for index in indices) or (find(table) != NONE).any():
        raise Unknown
    found = _combine(*map(find, indices))
    rest = tuple(table.shape[len(indices) :])
    return np.broadcast_to(found.reshape(found.shape + (1,) * len(rest)), found.shape + rest)


def _index_now(find: _Find, table: Any, indices: Any) -> Positions:
    """Rule for ``table[z]`` in this run only: so the table may depend on the source."""
    known = find(table)
    if (known == NONE).all() or any(index is not None and _reads(find, index) for index in indices):
        return _index(find, table, indices)
    with torch._C.DisableTorchFunction():
        picked = tuple(slice(None) if index is None else index.detach().cpu().numpy() for index in indices)
    return known[picked]


def _reads(find: _Find, tensor: Any) -> bool:
    """Whether a tensor is known to depend on the source."""
    with contextlib.suppress(Unknown):
        return bool((find(tensor) != NONE).any())
    return False


def _gather(find: _Find, tensor: Any, dim: int, index: Any, *rest: Any) -> Positions:
    """An entry depends on its index, and on at most all the elements that it may be taken from."""
    source, chosen = _reduce(find(tensor), dim, True), find(index)
    if not chosen.ndim:
        return _combine(chosen, _reduce(source, None, False))
    axis = dim % chosen.ndim
    kept = tuple(slice(None) if i == axis else slice(0, size) for i, size in enumerate(chosen.shape))
    return np.broadcast_to(_combine(chosen, source[kept]), chosen.shape)


def _select(find: _Find, tensor: Any, dim: int, index: Any) -> Positions:
    """Rule for ``index_select``: the same for whole slices."""
    source, chosen = _reduce(find(tensor), dim, True), find(index)
    shape = [1] * source.ndim
    shape[dim] = chosen.size
    return _combine(source, chosen.reshape(shape))


def _select_now(find: _Find, tensor: Any, dim: int, index: Any) -> Positions:
    """The same in this run only."""
    if _reads(find, index):
        return _select(find, tensor, dim, index)
    with torch._C.DisableTorchFunction():
        return np.take(find(tensor), np.atleast_1d(index.detach().cpu().numpy()), axis=dim)


def _take(find: _Find, tensor: Any, index: Any) -> Positions:
    return _combine(_reduce(find(tensor), None, False), find(index))


def _scatter(find: _Find, tensor: Any, dim: int, index: Any, source: Any, *rest: Any) -> Positions:
    """Rule for ``scatter`` and ``index_add``: an entry keeps its own, and may get any one along the dimension."""
    target = find(tensor)
    put = find(source) if isinstance(source, Tensor) else np.broadcast_to(np.int32(NONE), tuple(index.shape))
    chosen = find(index)
    if chosen.ndim < target.ndim:
        chosen = _reduce(chosen, None, False)
    else:
        chosen = _reduce(chosen, dim, True)
    put = _reduce(put, dim, True)
    if any(put.shape[i] not in (1, size) for i, size in enumerate(target.shape) if i != dim % target.ndim):
        raise Unknown
    return np.broadcast_to(_combine(target, put, chosen), target.shape)


def _put_now(find: _Find, target: Any, indices: Any, values: Any, *rest: Any) -> Positions:
    """Rule for ``target[i, z] = values`` in this run. An index that depends on the source may lead to any entry."""
    if any(index is None or index.dtype is torch.bool for index in indices):
        raise Unknown
    result, chosen = np.array(find(target)), [find(index) for index in indices]
    shape = np.broadcast_shapes(*(found.shape for found in chosen))
    written = np.broadcast_to(find(values), shape + result.shape[len(indices) :])
    written = _combine(_reduce(written, tuple(range(len(shape), written.ndim)), False), *chosen)
    if written.size > _MOST_PLACES:
        raise Unknown
    with torch._C.DisableTorchFunction():
        places = [np.broadcast_to(index.detach().cpu().numpy(), shape) for index in indices]
    fixed = [bool((found == NONE).all()) for found in chosen]
    for at in np.ndindex(shape):
        where = tuple(
            int(place[at]) if is_fixed else slice(None) for place, is_fixed in zip(places, fixed, strict=True)
        )
        result[where] = _combine(result[where], written[at])
    return result


def _masked_scatter(find: _Find, target: Any, mask: Any, source: Any) -> Positions:
    found = _combine(find(target), find(mask), _reduce(find(source), None, False))
    return np.broadcast_to(found, tuple(target.shape))


def _diagonal(find: _Find, tensor: Any, offset: int = 0, first: int = -2, second: int = -1) -> Positions:
    found = find(tensor)
    number = found.shape[-1]
    size = number + abs(offset)
    result = np.full((*found.shape[:-1], size, size), NONE, dtype=np.int32)
    result[..., np.arange(number) + max(-offset, 0), np.arange(number) + max(offset, 0)] = found
    return np.moveaxis(result, (-2, -1), (first, second))


def _pad(find: _Find, tensor: Any, pad: Sequence[int], *rest: Any) -> Positions:
    found = find(tensor)
    for i in range(len(pad) // 2):
        axis, ends = found.ndim - 1 - i, pad[2 * i : 2 * i + 2]
        found = found.take(range(max(-ends[0], 0), found.shape[axis] - max(-ends[1], 0)), axis)
        found = np.pad(
            found,
            [tuple(max(n, 0) for n in ends) if j == axis else (0, 0) for j in range(found.ndim)],
            constant_values=NONE,
        )
    return found


def _norm(find: _Find, tensor: Any, order: Any = 2, dims: Any = None, keepdim: Any = False, *rest: Any) -> Positions:
    return _reduce(find(tensor), dims, bool(keepdim))


def _topk(find: _Find, tensor: Any, number: int, dim: int = -1, *rest: Any) -> Positions:
    return np.repeat(_reduce(find(tensor), dim, True), number, dim)


def _glu(find: _Find, tensor: Any, dim: int = -1) -> Positions:
    return _combine(*np.split(find(tensor), 2, dim))


def _group_norm(find: _Find, tensor: Any, *rest: Any) -> Positions:
    found = find(tensor)
    others = [_reduce(find(part), None, False) for part in tensors_in(rest)]
    return _combine(_spread(found, list(range(1, found.ndim))), *others)


def _distances(find: _Find, left: Any, right: Any, *rest: Any) -> Positions:
    return _combine(_reduce(find(left), -1, True), _reduce(find(right), -1, True).swapaxes(-1, -2))


def _attention(find: _Find, query: Any, keys: Any, values: Any, *rest: Any) -> Positions:
    """A row of the result depends on its query, on all keys, and on all values."""
    others = [_reduce(find(part), None, False) for part in tensors_in(rest)]
    attended = _combine(_reduce(find(keys), (-2, -1), True), _reduce(find(values), -2, True))
    return _combine(_reduce(find(query), -1, True), attended, *others)


def _layer_norm(find: _Find, tensor: Any, shape: Any, weight: Any, bias: Any, *rest: Any) -> Positions:
    found = find(tensor)
    spread = _spread(found, list(range(found.ndim - len(shape), found.ndim)))
    return _combine(spread, *(find(part) for part in (weight, bias) if part is not None))


def _unknown(find: _Find, *args: Any) -> Positions:
    raise Unknown


_RULES: Mapping[str, Callable[..., Positions]] = MappingProxyType(
    {
        **dict.fromkeys(("_to_copy", "masked_fill", "masked_fill_", "binary_cross_entropy"), _pointwise),
        **dict.fromkeys(("binary_cross_entropy_with_logits", "where", "fill_", "zero_"), _pointwise),
        **dict.fromkeys(("sum", "mean", "logsumexp", "amax", "amin", "prod", "var", "std", "any", "all"), _sum),
        **dict.fromkeys(("argmax", "argmin", "nansum", "count_nonzero", "var_mean", "std_mean"), _sum),
        **dict.fromkeys(("max", "min"), _extreme),
        **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort"), _along),
        **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), _along),
        **dict.fromkeys(("linalg_vector_norm", "norm"), _norm),
        **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_"), _scatter),
        **dict.fromkeys(("scatter_reduce", "scatter_reduce_", "index_copy", "index_copy_"), _scatter),
        **dict.fromkeys(("index_add", "index_add_"), _scatter),
        **dict.fromkeys(("masked_scatter", "masked_scatter_"), _masked_scatter),
        **dict.fromkeys(("_scaled_dot_product_flash_attention_for_cpu",), _attention),
        **dict.fromkeys(("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"), _attention),
        **dict.fromkeys(("tril", "triu"), _pointwise),
        **dict.fromkeys(("mv", "dot"), _mv),
        **dict.fromkeys(("mm", "bmm"), _matmul),
        **dict.fromkeys(("addmm", "baddbmm"), _addmm),
        "addmv": lambda find, bias, left, right: _combine(find(bias), _mv(find, left, right)),
        "copy_": lambda find, target, source, *rest: find(source),
        "cat": lambda find, tensors, dim=0: np.concatenate([*map(find, tensors)], dim),
        "stack": lambda find, tensors, dim=0: np.stack([*map(find, tensors)], dim),
        "flip": lambda find, tensor, dims: np.flip(find(tensor), tuple(dims)),
        "repeat": lambda find, tensor, repeats: np.tile(find(tensor), tuple(repeats)),
        "roll": lambda find, tensor, shifts, dims=(): np.roll(find(tensor), tuple(shifts), tuple(dims) or None),
        "embedding": lambda find, table, index, *rest: _index(find, table, [index]),
        "topk": _topk,
        "mode": lambda find, tensor, dim=-1, keepdim=False: _sum(find, tensor, dim, keepdim),
        "median": _sum,
        "kthvalue": lambda find, tensor, k, dim=-1, keepdim=False: _sum(find, tensor, dim, keepdim),
        "index_select": _select,
        "diag_embed": _diagonal,
        "rot90": lambda find, tensor, number=1, dims=(0, 1): np.rot90(find(tensor), number, tuple(dims)),
        "take": _take,
        "constant_pad_nd": _pad,
        "glu": _glu,
        "native_group_norm": _group_norm,
        "_cdist_forward": _distances,
        "index": _index,
        "gather": _gather,
        "native_layer_norm": _layer_norm,
    }
)
# For rows, only this run matters: it shows whether rows meet.
_ROW_RULES: Mapping[str, Callable[..., Positions]] = MappingProxyType(
    {
        **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), _put_now),
        "index": _index_now,
        "index_select": _select_now,
        "embedding": lambda find, table, index, *rest: _index_now(find, table, [index]),
    }
)


class Plan:
    """What an operator does to positions.

    Attributes:
        is_view: Whether it only gives memory another shape.
        writes: Positions, or names, of the arguments that it writes into.
        rule: Its rule for elements.
        row_rule: Its rule for rows.
    """

    def __init__(self, func: Any) -> None:
        schema = getattr(func, "_schema", None)
        name = "" if schema is None else schema.name.removeprefix("aten::")
        returns, arguments = ([], []) if schema is None else (schema.returns, schema.arguments)
        self.is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        tags = getattr(func, "tags", ())
        # ``squeeze_`` and the like change a tensor's shape, not its memory. ``set_`` and ``resize_`` change memory.
        self.is_view |= torch.Tag.inplace_view in tags and not name.startswith(("set_", "resize_"))
        self.writes = tuple(
            argument.name if argument.kwarg_only else i
            for i, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        is_pointwise = torch.Tag.pointwise in tags and not any(isinstance(w, str) for w in self.writes)
        self.rule = _RULES.get(name, _pointwise if is_pointwise else _unknown)
        self.row_rule = _ROW_RULES.get(name, self.rule)


@cache
def plan_of(func: Any) -> Plan:
    """What an operator does to positions."""
    return Plan(func)
