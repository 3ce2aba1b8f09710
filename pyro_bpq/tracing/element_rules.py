r"""Rules for the elements of a source that the result of an operator depends on.

A rule maps the arguments of an operator to the positions of its result: for each element of the result, the element of
the source that it depends on. It may name more than the truth, and never less. An operator without a rule mixes all
elements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial, reduce
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_bpq.tracing.ledger import signature_of

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


def _moved(move: Callable[..., Tensor], find: _Find, *args: Any) -> Positions:
    """Rule for operators that only move elements: torch moves their positions. Zeros that fill depend on none."""

    def numbers(arg: Any) -> Any:
        return torch.from_numpy(np.asarray(find(arg) - NONE)) if isinstance(arg, Tensor) else arg

    with torch._C.DisableTorchFunction():
        moved = move(*([numbers(item) for item in arg] if isinstance(arg, list) else numbers(arg) for arg in args))
        return moved.numpy() + NONE


def _group_norm(find: _Find, tensor: Any, *rest: Any) -> Positions:
    found = find(tensor)
    others = [_reduce(find(part), None, False) for part in tensors_in(rest)]
    return _combine(_spread(found, list(range(1, found.ndim))), *others)


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


# Operators that share a rule.
_SHARED: Mapping[str, Callable[..., Positions]] = MappingProxyType(
    {
        "_to_copy masked_fill masked_fill_ where fill_ zero_ tril triu": _pointwise,
        "binary_cross_entropy binary_cross_entropy_with_logits": _pointwise,
        "sum mean logsumexp amax amin prod var std any all argmax argmin nansum count_nonzero": _sum,
        "var_mean std_mean median": _sum,
        "max min": _extreme,
        "cumsum cumprod logcumsumexp cummax cummin sort _softmax _log_softmax _safe_softmax": _along,
        "linalg_vector_norm norm": lambda find, tensor, order=2, *rest, **dims: _sum(find, tensor, *rest, **dims),
        "mode": lambda find, tensor, dim=-1, keepdim=False: _sum(find, tensor, dim, keepdim),
        "kthvalue": lambda find, tensor, k, dim=-1, keepdim=False: _sum(find, tensor, dim, keepdim),
        "scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_": _scatter,
        "index_copy index_copy_ index_add index_add_": _scatter,
        "masked_scatter masked_scatter_": lambda find, target, mask, source: np.broadcast_to(
            _combine(find(target), find(mask), _reduce(find(source), None, False)), tuple(target.shape)
        ),
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention": _attention,
        "_scaled_dot_product_efficient_attention": _attention,
        "mv dot": _mv,
        "mm bmm": _matmul,
        "addmm baddbmm": lambda find, bias, left, right, *rest: _combine(find(bias), _matmul(find, left, right)),
        "addmv": lambda find, bias, left, right: _combine(find(bias), _mv(find, left, right)),
        "copy_": lambda find, target, source, *rest: find(source),
        "glu": lambda find, tensor, dim=-1: _combine(*np.split(find(tensor), 2, dim)),
        "topk": lambda find, tensor, number, dim=-1, *rest: np.repeat(_reduce(find(tensor), dim, True), number, dim),
        "take": lambda find, tensor, index: _combine(_reduce(find(tensor), None, False), find(index)),
        "embedding": lambda find, table, index, *rest: _index(find, table, [index]),
        "index": _index,
        "index_select": _select,
        "gather": _gather,
        "native_group_norm": _group_norm,
        "native_layer_norm": _layer_norm,
        "_cdist_forward": lambda find, left, right, *rest: _combine(
            _reduce(find(left), -1, True), _reduce(find(right), -1, True).swapaxes(-1, -2)
        ),
    }
)
_RULES = MappingProxyType({name: rule for names, rule in _SHARED.items() for name in names.split()})
_MOVING = frozenset("cat stack flip repeat roll rot90 diag_embed constant_pad_nd".split())
# For rows, only this run matters: it shows whether rows meet.
_ROW_RULES: Mapping[str, Callable[..., Positions]] = MappingProxyType(
    {
        **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), _put_now),
        "index": _index_now,
        "index_select": _select_now,
        "embedding": lambda find, table, index, *rest: _index_now(find, table, [index]),
    }
)


class Plan(NamedTuple):
    """What an operator does to positions."""

    is_view: bool  # whether it only gives memory another shape
    writes: tuple[int | str, ...]  # positions, or names, of the arguments that it writes into
    rule: Callable[..., Positions]
    row_rule: Callable[..., Positions]


@cache
def plan_of(func: Any) -> Plan:
    """What an operator does to positions."""
    name, writes, is_view = signature_of(func)
    tags = getattr(func, "tags", ())
    # ``squeeze_`` and the like change a tensor's shape, not its memory. ``set_`` and ``resize_`` change memory.
    is_view |= torch.Tag.inplace_view in tags and not name.startswith(("set_", "resize_"))
    is_pointwise = torch.Tag.pointwise in tags and not any(isinstance(target, str) for target in writes)
    rule = partial(_moved, func) if name in _MOVING else _RULES.get(name, _pointwise if is_pointwise else _unknown)
    return Plan(is_view, writes, rule, _ROW_RULES.get(name, rule))
