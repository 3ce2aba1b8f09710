r"""Which element of a source each element of a value reads: a component, a row of a plate, a particle.

*Labels* are an array of the rank of a value. A dimension in which labels are alike has size one. A rule maps the labels
of an operator's arguments to those of its result. It may name more than the truth, and never less. An operator without
a rule makes its results unknown, by its name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, reduce
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bpq.record.function import Function
from pyro_bpq.record.operators import MASKS, copied, effects_of, filled, one_hot, remade, selected, written
from pyro_bpq.record.values import Value, values_in

NONE, MANY = -1, -2
"""``NONE``: reads no element of the source. ``MANY``: reads several, or an unknown one."""

Labels = np.ndarray


class Unknown(Exception):
    """Nothing is known of the elements that a value reads."""


def _no_labels() -> Labels:
    return np.array(NONE, np.int32)


def combined(*parts: Labels) -> Labels:
    """Labels of a result whose elements read what elements of all parts read, broadcast."""
    told = [part for part in parts if part.size != 1 or part.item() != NONE] or [parts[0]]
    found = reduce(lambda a, b: np.where(a == NONE, b, np.where((b == NONE) | (b == a), a, MANY)), told)
    missing = max([part.ndim for part in parts]) - found.ndim
    return found.reshape((1,) * missing + found.shape) if missing else found


def alike(labels: Labels) -> Labels:
    """The same labels, with size one where they are alike."""
    for axis, size in enumerate(labels.shape):
        if size > 1:
            first = labels.take([0], axis)
            labels = first if bool((labels == first).all()) else labels
    return labels


def over(labels: Labels, dims: Any, keepdim: bool = True) -> Labels:
    """Labels of a reduction over some dimensions."""
    axis = tuple(range(labels.ndim)) if dims is None or dims == [] else tuple(np.atleast_1d(dims).tolist())
    largest = np.iinfo(np.int32).max
    high = labels.max(axis=axis, keepdims=keepdim, initial=MANY)
    low = np.where(labels == NONE, largest, labels).min(axis=axis, keepdims=keepdim, initial=largest)
    return np.where(low == largest, NONE, np.where(low == high, high, MANY))


class Reader:
    """Follows elements through a function.

    Args:
        function: The operators; none writes in place.
        starts: Labels of the source, by value.
        known: Gives the numbers of an index that are the same in every run, or ``None``.
    """

    def __init__(
        self, function: Function, starts: Mapping[Value, Labels | Unknown], known: Callable[[Value], Tensor | None]
    ) -> None:
        self.shapes, self.dtypes, self.known = function.shapes, function.dtypes, known
        self.found: dict[Value, Labels | Unknown] = dict(starts)
        for node in function.nodes:
            if not self.found.keys().isdisjoint(node.reads):
                self._follow(node)

    def _follow(self, node: Any) -> None:
        labels: Any
        self.results = [*values_in(node.result)]
        try:
            labels = rule_of(node.func)(self, *node.args, **{k: v for k, v in node.kwargs.items() if k in _SHAPING})
            # Of tensors that are given by name, each element reads all.
            named = [over(self(value), None, False) for value in values_in([*node.kwargs.values()])]
            labels = [combined(own, *named) for own in labels] if isinstance(labels, list) else combined(labels, *named)
        except Unknown as error:
            labels = error
        except (ValueError, IndexError, TypeError, ArithmeticError, RuntimeError):
            labels = Unknown(effects_of(node.func).name)
        each = labels if isinstance(labels, list) else [labels] * len(self.results)
        for value, own in zip(self.results, each, strict=False):
            self.found[value] = own if isinstance(own, Unknown) else self._fitted(own, value)

    def _fitted(self, labels: Labels, value: Value) -> Labels:
        shape = self.shape(value)
        if labels.ndim == len(shape) and all(own in (1, size) for own, size in zip(labels.shape, shape, strict=True)):
            return labels.astype(np.int32, copy=False)
        # Of a rule that is not exact, each element reads all.
        return over(labels, None, False).reshape((1,) * len(shape))

    def shape(self, item: Any) -> tuple[int, ...]:
        """The shape of a value."""
        shape = self.shapes[item]
        if shape is None:
            raise Unknown("a nested tensor")
        return tuple(shape)

    def __call__(self, item: Any) -> Labels:
        """The labels of an argument."""
        if item.__class__ is not Value:
            return _no_labels()
        found = self.found.get(item)
        if isinstance(found, Unknown):
            raise found
        return np.full((1,) * len(self.shape(item)), NONE, np.int32) if found is None else found

    def labels(self, value: Value) -> Labels | Unknown:
        """The labels of a value, or why they are unknown."""
        try:
            return alike(self(value))
        except Unknown as error:
            return error

    def whole(self, item: Any) -> Labels:
        """The labels of an argument in its whole shape."""
        return np.broadcast_to(self(item), self.shape(item))


Rule = Callable[..., Any]
_SHAPING = frozenset(("dim", "keepdim", "dims", "left"))  # arguments given by name that rules must know


def _pointwise(read: Reader, *args: Any, **_: Any) -> Labels:
    return combined(_no_labels(), *map(read, values_in(args)))


def _along(func: Any, read: Reader, *args: Any, **named: Any) -> Labels:
    """Rule for operators along dimensions, which they reduce or keep."""
    arguments = func._schema.arguments
    given = {own.name: own.default_value for own in arguments}
    given |= {**dict(zip(given, args, strict=False)), **named}
    keepdim = given.get("keepdim", "dim" in given)
    return combined(*(over(read(tensor), given.get("dim"), keepdim) for tensor in values_in(args)))


def _spread(*dims: tuple[int, ...] | None, keepdim: bool = True) -> Rule:
    """Rule for an entry that reads each tensor along these dimensions; ``None``: all of it. The last ones go on."""

    def rule(read: Reader, *args: Any, **_: Any) -> Labels:
        parts, found = map(read, values_in(args)), []
        for part, axes in zip(parts, itertools.chain(dims, itertools.repeat(dims[-1])), strict=False):
            own = None if axes is None else tuple(axis for axis in axes if -part.ndim <= axis < part.ndim)
            found.append(over(part, own, keepdim and axes is not None))
        return combined(*found)

    return rule


def _batch_norm(read: Reader, tensor: Any, *rest: Any) -> Labels:
    own, ndim = read(tensor), len(read.shape(tensor))
    parts = [read(part).reshape(1, -1, *(1,) * (ndim - 2)) for part in values_in(rest)]
    is_training = next((flag for flag in rest if isinstance(flag, bool)), True)
    return combined(over(own, (0, *range(2, ndim))) if is_training else own, *parts)


def _layer_norm(read: Reader, tensor: Any, shape: Any, weight: Any = None, bias: Any = None, *_: Any) -> Labels:
    own = read(tensor)
    spread = over(own, tuple(range(own.ndim - len(shape), own.ndim)))
    return combined(spread, *(read(part) for part in values_in((weight, bias))))


def _solve(read: Reader, matrix: Any, right: Any, left: bool = True) -> Labels:
    """Rule for ``X`` of ``matrix @ X = right``: a column reads its right side, and all of the matrix."""
    return combined(over(read(matrix), (-2, -1)), over(read(right), -2 if left else -1))


def _by_matrix(read: Reader, matrix: Any, *rest: Any) -> list[Labels]:
    """Rule for functions of matrices: what is found of one of them reads all of it, and of its right side."""
    whole, parts = read.shape(matrix), [*values_in((matrix, *rest))]
    fits = [len(shape) == len(whole) or shape == whole[:-1] for shape in map(read.shape, parts)]
    pairs = zip(map(read, parts), fits, strict=True)
    found = combined(*(over(own, tuple(range((len(whole) - 2) * fit, own.ndim)), False) for own, fit in pairs))
    return [found.reshape(*found.shape, *(1,) * (len(read.shape(own)) - found.ndim)) for own in read.results]


def _recurrent(read: Reader, tensor: Any, *rest: Any) -> list[Labels]:
    """Rule for layers ``(time, batch, features)``: rows of the batch stay apart."""
    weights, states = rest[:4], rest[4:6]
    own = [over(read(part), (0, -1)) for part in values_in((tensor, *states))]
    found = combined(*own, *(over(read(part), None, False) for part in values_in(weights)))
    return [found] * 3


def _moved(func: Any, read: Reader, *args: Any, **named: Any) -> Any:
    """Rule for operators that only move elements: torch moves their labels. Zeros that fill read none."""

    def numbers(item: Any) -> Any:
        if item.__class__ is Value:
            return torch.from_numpy(np.array(read.whole(item) - NONE, order="C"))
        return [*map(numbers, item)] if item.__class__ in (list, tuple) else item

    if any(isinstance(arg, torch.dtype) for arg in args):  # a view as numbers of another type
        return read(args[0])
    found = func(*map(numbers, args), **named)
    parts = [alike(part.numpy() + NONE) for part in (found if isinstance(found, (list, tuple)) else [found])]
    return parts if isinstance(found, (list, tuple)) else parts[0]


def _index(read: Reader, table: Any, index: Sequence[Any]) -> Labels:
    """Rule for ``table[i, :, j]``: an entry reads its indices, and what it may be taken from."""
    dims = [i for i, part in enumerate(index) if part is not None]
    if any(read.dtypes[index[i]] in MASKS for i in dims):
        raise Unknown("a mask as an index")
    known = {i: found.long().cpu().numpy() for i in dims if (found := read.known(index[i])) is not None}
    labels = over(read(table), tuple(i for i in dims if i not in known))
    places: list[Any] = [slice(None)] * len(index)
    for i in dims:
        is_moved = i in known and labels.shape[i] > 1
        places[i] = known[i] if is_moved else np.zeros(read(index[i]).shape, int)
    at = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    chosen = combined(*(read(index[i]) for i in dims))
    return combined(labels[tuple(places)], chosen.reshape(*chosen.shape, *(1,) * (labels.ndim - len(dims) - at)))


def _selected(read: Reader, table: Any, index: Any) -> Labels:
    """Rule for ``table[z]`` with numbers ``z``."""

    def first(table: Tensor, index: Any) -> Tensor:
        return table[tuple(0 if isinstance(part, Tensor) and not part.dim() else part for part in index)]

    parts = index if isinstance(index, tuple) else (index,)
    chosen = [part for part in values_in(parts) if read.shape(part) == ()]
    labels = _moved(first, read, table, parts)
    found = over(read(table), None, False) if (read(table) != NONE).any() else labels
    return combined(found, *map(read, chosen))


def _gather(read: Reader, tensor: Any, dim: int, index: Any, *_: Any) -> Labels:
    """An entry reads its index, and all that it may be taken from."""
    source, chosen = over(read(tensor), dim), read(index)
    if not chosen.ndim:
        return combined(chosen, over(source, None, False))
    sizes = zip(source.shape, read.shape(index), strict=True)
    kept = [slice(None) if own == 1 else slice(0, size) for own, size in sizes]
    return combined(chosen, source[tuple(kept)])


def _scatter(read: Reader, tensor: Any, dim: int, index: Any, source: Any = None, *_: Any) -> Labels:
    """Rule for ``scatter`` and ``index_add``: an entry keeps its own, and may get any one along the dimension."""
    target, chosen = read(tensor), read(index)
    chosen = over(chosen, None, False) if chosen.ndim < target.ndim else over(chosen, dim)
    put = over(read(source), dim) if source.__class__ is Value else _no_labels()
    return combined(target, put, chosen)


def _put(read: Reader, tensor: Any, index: Sequence[Any], values: Any, *_: Any) -> Labels:
    """Rule for ``tensor[index] = values``: an entry keeps its own, and may get any value."""
    places = [part for part in index if part is not None]
    is_mask = len(places) == 1 and read.dtypes[places[0]] in MASKS and read.shape(places[0]) == read.shape(tensor)
    put = [read(part) for part in (*places, values)]
    if not (is_mask and read.shape(values) == ()):
        put = [over(part, None, False) for part in put]
    return combined(read(tensor), *put)


def _copied(read: Reader, target: Any, source: Any, *_: Any) -> Labels:
    return np.broadcast_to(read(source), np.broadcast_shapes(read(source).shape, (1,) * len(read.shape(target))))


# Elementwise operators that torch does not mark as such.
_ELEMENTWISE = frozenset(
    "_to_copy where fill tril triu native_dropout detach alias lift _conj lift_fresh same binary_cross_entropy "
    "binary_cross_entropy_with_logits mse_loss smooth_l1_loss huber_loss log_sigmoid_forward _prelu_kernel hardswish "
    "rrelu_with_noise rrelu_with_noise_functional polar bernoulli normal poisson binomial _standard_gamma".split()
)
_ALONG = frozenset(
    "sum mean logsumexp amax amin prod var std any all argmax argmin nansum var_mean std_mean median nanmedian "
    "aminmax max min linalg_vector_norm norm mode kthvalue topk cumsum cumprod logcumsumexp cummax cummin sort "
    "_softmax _log_softmax _safe_softmax _fft_r2c _fft_c2r _fft_c2c linalg_cross".split()
)
_MOVING = frozenset(
    "cat stack flip repeat roll rot90 diag_embed constant_pad_nd pixel_shuffle pixel_unshuffle channel_shuffle "
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d "
    "native_channel_shuffle select_scatter slice_scatter diagonal_scatter unsafe_split unsafe_split_with_sizes "
    "unsafe_chunk _unsafe_view _reshape_copy view_copy".split()
)
# Other operators that share a rule.
_SHARED: Mapping[str, Rule] = MappingProxyType(
    {
        "_sample_dirichlet _dirichlet_grad multinomial": _spread((-1,)),
        "dist as_strided as_strided_scatter": _spread(None),
        "view_as_real": lambda read, tensor: read(tensor)[..., None],
        "view_as_complex mv dot vdot": _spread((-1,), keepdim=False),
        "scatter scatter_add scatter_reduce index_copy index_add index_fill": _scatter,
        "masked_scatter bucketize": _spread((), None),
        "searchsorted take": _spread(None, ()),
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_attention_math": _spread(
            (-1,), (-2, -1), (-2, -1), None
        ),
        "mm bmm": _spread((-1,), (-2,)),
        "addmm baddbmm": _spread((), (-1,), (-2,)),
        "addmv": _spread((), (-1,), keepdim=False),
        "linalg_solve_triangular": _solve,
        "_linalg_solve_ex _linalg_svd _linalg_eigh linalg_eig linalg_cholesky_ex linalg_inv_ex linalg_lu_factor_ex "
        "linalg_qr linalg_pinv linalg_matrix_exp cholesky_inverse _linalg_det _linalg_slogdet": _by_matrix,
        "cholesky_solve triangular_solve": _spread((-2, -1)),
        "count_nonzero": lambda read, tensor, dim=None: over(read(tensor), dim, False),
        "affine_grid_generator": lambda read, theta, *_: over(read(theta), (-2, -1))[..., None],
        "nll_loss_forward nll_loss2d_forward": lambda read, scores, target, weight, *_: combined(
            over(read(scores), 1, False), read(target), over(read(weight), None, False)
        ),
        "_trilinear": lambda read, *args: over(
            combined(*(np.expand_dims(read(args[i]), tuple(args[i + 3])) for i in range(3))), args[6], False
        ),
        "convolution native_group_norm": _spread((1, 2, 3, 4, 5), None),
        "zero": lambda read, *_: _no_labels(),
        "glu": lambda read, tensor, dim=-1: combined(*np.split(read.whole(tensor), 2, dim)),
        "embedding": lambda read, table, index, *_: _index(read, table, [index]),
        "index _unsafe_index": _index,
        "index_select": lambda read, own, dim, at: _index(read, own, [None] * (dim % len(read.shape(own))) + [at]),
        "index_put _unsafe_index_put _index_put_impl": _put,
        "gather": _gather,
        "grid_sampler_2d": lambda read, tensor, grid, *_: combined(
            over(read(tensor), (-2, -1)), over(read(grid), -1, False)[:, None]
        ),
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm": _batch_norm,
        "native_layer_norm": _layer_norm,
        "mkldnn_rnn_layer": _recurrent,
        "_cdist_forward": lambda read, left, right, *_: combined(
            over(read(left), -1), over(read(right), -1).swapaxes(-1, -2)
        ),
    }
)
_RULES = MappingProxyType({name: rule for names, rule in _SHARED.items() for name in names.split()})
_SPATIAL = re.compile(r"(?:pool|upsample\w*)(\d)d")  # they read along their last dimensions, whose number they name


@cache
def rule_of(func: Any) -> Rule:
    """The rule of an operator; raises :class:`Unknown` if it has none."""
    if func in _OF_FUNCTIONS:
        return _OF_FUNCTIONS[func]
    kind = effects_of(func)
    if kind.is_blank:
        return lambda read, *_, **__: _no_labels()
    if kind.name in _RULES:
        return _RULES[kind.name]
    if spatial := _SPATIAL.search(kind.name):
        return _spread(tuple(range(-int(spatial[1]), 0)))
    if kind.name in _ALONG:
        return partial(_along, func)
    if kind.name in _ELEMENTWISE or torch.Tag.pointwise in getattr(func, "tags", ()):
        return _pointwise
    if kind.name in _MOVING or kind.is_view:
        return partial(_moved, func)
    raise Unknown(kind.name)


def _remade(read: Reader, data: Any, *_: Any) -> Labels:
    if data.__class__ in (list, tuple):
        parts = [_remade(read, part) for part in data]
        rank = max(part.ndim for part in parts)
        return np.stack(np.broadcast_arrays(*(part.reshape((1,) * (rank - part.ndim) + part.shape) for part in parts)))
    return read(data)


_OF_FUNCTIONS: Mapping[Any, Rule] = MappingProxyType(
    {
        remade: _remade,
        one_hot: lambda read, tensor, number: read(tensor)[..., None],
        selected: _selected,
        written: _put,
        copied: _copied,
        filled: _copied,
    }
)
