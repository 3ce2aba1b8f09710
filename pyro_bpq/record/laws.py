"""Draws as operators: distributions with other tensors in place of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from pyro.distributions import Delta, MaskedDistribution, OneHotCategorical
from pyro.distributions.rejector import Rejector
from pyro.distributions.util import sum_rightmost
from pyro.poutine.runtime import effectful
from torch import Tensor
from torch.distributions import Distribution, Independent, Transform, TransformedDistribution
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pyro_bpq.record.tape import Tape
from pyro_bpq.record.values import unwrapped
from pyro_bpq.rollout.features import finite_components

# What transforms and conditional distributions remember of their last call, and how they forget it.
_CACHES = MappingProxyType({"_inv": None, "_cached_x_y": (None, None)})


@effectful(type="bpq_draw")
def draw(name: str, fn: Any) -> Any:
    """Draws from a distribution; a message, for handlers that draw in place of the generator."""
    return fn()


class Draw:
    """The draw of a site as a function of the tensors of its distribution.

    Args:
        name: The site.
        fn: Its distribution. Its tensors are not kept.
        is_mean: Whether the mean takes the place of a draw, with its gradient.
    """

    def __init__(self, name: str, fn: Any, is_mean: bool = False) -> None:
        self.name, self.is_mean, empty = name, is_mean, torch.empty(0)
        self._form = mapped(fn, lambda _: empty)
        # Whether the value is the first tensor of the distribution.
        self.is_copy = isinstance(fn.base_dist if isinstance(fn, Independent) else fn, Delta)

    def __repr__(self) -> str:
        return f"Draw({self.name!r})"

    def __call__(self, *tensors: Tensor) -> Any:
        """A value of the site."""
        # A flat function has no torch.no_grad(), under which torch draws.
        own = iter(tensors if self._form.has_rsample or self.is_mean else [tensor.detach() for tensor in tensors])
        fn = mapped(self._form, lambda _: next(own))
        return fn.mean if self.is_mean else draw(self.name, fn)

    def noted(self, *tensors: Tensor) -> Any:
        """The same; a tape writes it down as a draw."""
        return _noted(self, [tensor.clone() for tensor in tensors])

    def rows(self, index: Tensor, *tensors: Tensor) -> Any:
        """A value for each number in ``index``, which has a dimension that the caller does not see."""
        return _Rows.apply(self, index, *tensors)  # type: ignore[no-untyped-call]

    def in_rows(self, number: int, has_rows: Sequence[bool], *tensors: Tensor) -> Tensor:
        """So many values ``(rows, batch, event)``, each from its row of the tensors that have rows."""
        return torch.stack([self(*row) for row in rows_of(number, tensors, has_rows)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Draw) and (self.name, self.is_mean) == (other.name, other.is_mean)

    def __hash__(self) -> int:
        return hash((self.name, self.is_mean))

    @property
    def mean(self) -> Draw:
        """The same with the mean, where values may move continuously and have one."""
        found, split = copy.copy(self), finite_components(self._form)
        found.is_mean = self._form.has_rsample or (split is not None and split.kind in ("bernoulli", "one_hot"))
        return found


def rows_of(number: int, tensors: Sequence[Tensor], has_rows: Sequence[bool]) -> list[tuple[Tensor, ...]]:
    """The tensors of each of so many rows; some of them have rows, others are the same for all."""
    columns = [t.unbind(0) if own else (t,) * number for t, own in zip(tensors, has_rows, strict=True)]
    return [tuple(column[i] for column in columns) for i in range(number)]


class _Rows(torch.autograd.Function):
    """Draws in the dimension of :func:`torch.func.vmap`, row by row."""

    @staticmethod
    def forward(*_: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def setup_context(*_: Any) -> None:
        raise NotImplementedError

    @staticmethod
    def vmap(info: Any, dims: Any, draw: Draw, _: Tensor, *tensors: Tensor) -> Any:
        own = [t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, dims[2:], strict=True)]
        return _noted(partial(draw.in_rows, info.batch_size, [dim is not None for dim in dims[2:]]), own), 0


def _noted(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Calls a function; a tape that is active writes it down in place of the operators that it runs."""
    tape = next((mode for mode in reversed(_get_current_dispatch_mode_stack()) if isinstance(mode, Tape)), None)
    if tape is None:
        return function(*tensors)
    with tape.paused:
        result = unwrapped(function(*tensors))
    tape.made(function, tuple(tensors), result)
    return result


def tensors_of(fn: Any) -> list[Tensor]:
    """The tensors of a distribution, in a fixed order."""
    found: list[Tensor] = []
    mapped(fn, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def mapped(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with other tensors; a part without tensors, or whose tensors stay, is the same object."""
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, dict):
        return _changed(item, change) or item
    if isinstance(item, (list, tuple)):
        parts = _changed(dict(enumerate(item)), change)
        if parts is None:
            return item
        return type(item)(*parts.values()) if hasattr(item, "_fields") else type(item)(parts.values())
    if isinstance(item, (Distribution, Transform)):
        found = _changed({name: value for name, value in vars(item).items() if name not in _CACHES}, change)
        if found is None:
            return item
        twin = copy.copy(item)
        vars(twin).update(found)
        vars(twin).update({name: _CACHES[name] for name in _CACHES.keys() & vars(twin).keys()})
        return twin
    return item


def _changed(parts: Mapping[Any, Any], change: Callable[[Tensor], Tensor]) -> dict[Any, Any] | None:
    found = {key: mapped(value, change) for key, value in parts.items()}
    return found if any(found[key] is not value for key, value in parts.items()) else None


def relaxed_log_prob(fn: Any, value: Tensor) -> Tensor:
    """Log-probability of a one-hot site at a value that may lie between support values, and linear in it."""
    linear = rebased(fn, lambda own: _LinearOneHot(logits=own.logits, validate_args=False), _validate_args=False)
    return linear.log_prob(value)


def as_drawn(fn: Any) -> Any:
    """The law that values follow: without masks, and of a Delta without its density; itself if there are neither."""
    if isinstance(fn, MaskedDistribution):
        return as_drawn(fn.base_dist)
    if isinstance(fn, Delta):
        return Delta(fn.v, event_dim=fn.event_dim)
    if not isinstance(fn, Independent) or (base := as_drawn(fn.base_dist)) is fn.base_dist:
        return fn
    fn = copy.copy(fn)
    fn.base_dist = base
    return fn


def is_scored_by_pyro(fn: Any) -> bool:
    """Whether Pyro's score is that of all that is drawn: masks hide some of it, events and transforms rejections."""
    base = fn
    while hasattr(base, "base_dist"):
        base = base.base_dist
    return isinstance(base, Delta) or (as_drawn(fn) is fn and not isinstance(base, Rejector))


def score_of(fn: Any, value: Tensor) -> Any:
    """The score of what is drawn, masked or not; what is not reparameterised has all of its log-probability."""
    fn = as_drawn(fn)
    if isinstance(fn, Independent) or (fn.has_rsample and isinstance(fn, TransformedDistribution)):
        for transform in reversed(getattr(fn, "transforms", ())):
            value = transform.inv(value)
        score = score_of(fn.base_dist, value)
        added = len(fn.base_dist.batch_shape) - len(fn.batch_shape)
        return sum_rightmost(score, added) if isinstance(score, Tensor) else score
    return fn.score_parts(value).score_function if fn.has_rsample else fn.log_prob(value)


def unchecked(fn: Any) -> Any:
    """A copy of the distribution that does not check values."""
    return rebased(fn, lambda base: base, _validate_args=False)


def rebased(fn: Any, change: Callable[[Any], Any], **own: Any) -> Any:
    """A copy of a distribution with another base, and with some attributes at each level."""
    fn = copy.copy(fn)
    vars(fn).update(own)
    if not hasattr(fn, "base_dist"):
        return change(fn)
    fn.base_dist = rebased(fn.base_dist, change, **own)
    return fn


class _LinearOneHot(OneHotCategorical):
    def log_prob(self, value: Tensor) -> Tensor:
        # A value of probability zero has a logit of -inf; the clamp keeps 0 * -inf from becoming NaN.
        return (value * self.logits.clamp(min=max(-1e6, torch.finfo(self.logits.dtype).min))).sum(-1)
