r"""Finite components of a distribution, and the features that a critic sees.

A distribution with finite support is written as ``D`` independent components of ``K`` values each: a Bernoulli has
``D=1, K=2``, ``Bernoulli.to_event(1)`` of 20 ``D=20, K=2``, a Categorical ``D=1``. All code that sums over a support or
flips a component works on ``log_probs[..., d, k]`` and on the index ``[..., d]`` of the value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributions as td
from torch.nn.functional import one_hot, softplus


@dataclass(frozen=True)
class Components:
    """Describes how a distribution with finite support splits into independent components; no tensors.

    Args:
        kind: ``"bernoulli"``, ``"categorical"``, ``"one_hot"`` or ``"support"`` (any other finite support); ``"count"``
            of a count beside the value next to it.
        event_shape: Shape of the components that ``to_event`` made part of the event.
        cardinality: Number of values ``K`` of a component.
    """

    kind: str
    event_shape: tuple[int, ...]
    cardinality: int

    @property
    def size(self) -> int:
        """Number of components ``D``."""
        return math.prod(self.event_shape)

    @property
    def has_slopes(self) -> bool:
        """Whether costs may have slopes in values: in bits, in one-hot values and in counts."""
        return self.kind in ("bernoulli", "one_hot", "count")

    @property
    def has_pairs(self) -> bool:
        """Whether a component has one other value: that of a bit, or the value next to a count."""
        return self.kind in ("bernoulli", "count")

    @property
    def table_shape(self) -> tuple[int, ...]:
        """Shape ``(D, K)`` of what other values change, or ``(D,)`` of bits."""
        return (self.size,) if self.has_pairs else (self.size, self.cardinality)

    @property
    def event_ndim(self) -> int:
        """Number of event dimensions of :meth:`parameters`."""
        return len(self.event_shape) + (not self.has_pairs)

    @property
    def value_ndim(self) -> int:
        """Number of event dimensions of a value."""
        return len(self.event_shape) + (self.kind == "one_hot")

    def parameters(self, fn: Any) -> Tensor:
        """The tensor that :meth:`log_probs` reads, of shape ``batch_shape + event``."""
        base = base_distribution(fn)
        if self.kind != "support":
            return base.logits
        support = base.enumerate_support(expand=False)
        return torch.movedim(base.log_prob(support), 0, -1)

    def of_draws(self, fn: Any) -> Tensor:
        """The same, infinite where ``probs`` has a zero: torch gives some chance to what it never draws."""
        found, base = self.parameters(fn), base_distribution(fn)
        law = vars(getattr(base, "_categorical", base))
        if self.kind == "support" or "probs" not in law or law["probs"] is not law.get("_param"):
            return found
        found = found.masked_fill(law["probs"] == 0, -math.inf)
        return found.masked_fill(law["probs"] == 1, math.inf) if self.kind == "bernoulli" else found

    def log_probs(self, parameters: Tensor) -> Tensor:
        """Log-probabilities of shape ``(..., D, K)`` from stacked :meth:`parameters`."""
        found = _as_event(parameters, self.event_ndim, self.table_shape)
        return -softplus(torch.stack((found, -found), -1)) if self.kind == "bernoulli" else found

    def linear(self, parameters: Tensor, least: float) -> tuple[Tensor, Tensor]:
        """Slopes ``(..., F)`` and base ``(...)`` of the log-probability ``slopes · encoded(value) + base``.

        No log-probability of a component is below about ``least`` nats, a negative number.
        """
        if self.kind == "bernoulli":
            logits = _as_event(parameters, self.event_ndim, self.table_shape).clamp(least, -least)
            return logits, -softplus(logits).sum(-1)
        slopes = self.log_probs(parameters).flatten(-2).clamp(min=least)
        return slopes, slopes.new_zeros(slopes.shape[:-1])

    def encoded(self, value: Tensor, fn: Any = None) -> Tensor:
        """Encodes a value ``(..., event)`` as zeros and ones ``(..., F)``."""
        if self.has_slopes:
            return _as_event(value, self.value_ndim, (-1,))
        values = torch.arange(self.cardinality, device=value.device)
        return (self.index(value, fn).unsqueeze(-1) == values).flatten(-2)

    def index(self, value: Tensor, fn: Any = None) -> Tensor:
        """Index of each component's value: from ``(..., event)`` to a long tensor ``(..., D)``."""
        if self.kind == "support":
            return (value.unsqueeze(-1) == _support(fn)).long().argmax(-1, keepdim=True)
        found = value.argmax(-1) if self.kind == "one_hot" else value
        return _as_event(found, len(self.event_shape), (self.size,)).long()

    def value(self, index: Tensor, fn: Any = None) -> Tensor:
        """Inverse of :meth:`index`; the caller must restore the dtype."""
        shaped = index.reshape((*index.shape[:-1], *self.event_shape))
        if self.kind == "one_hot":
            return one_hot(shaped, self.cardinality)
        return _support(fn)[shaped] if self.kind == "support" else shaped


def _as_event(tensor: Tensor, ndim: int, shape: tuple[int, ...]) -> Tensor:
    """A tensor whose last ``ndim`` dimensions have another shape."""
    return tensor.reshape(*tensor.shape[: tensor.dim() - ndim], *shape)


def _support(fn: Any) -> Tensor:
    """The values of a distribution, in one dimension."""
    return base_distribution(fn).enumerate_support(expand=False).reshape(-1)


@singledispatch
def finite_components(fn: Any) -> Components | None:
    """Splits a distribution into finite components; ``None`` if the support is infinite or not known to factorise.

    Register a function for a distribution of your own with ``finite_components.register``.
    """
    return _by_support(fn)


def _by_support(fn: Any) -> Components | None:
    can_enumerate = getattr(fn, "has_enumerate_support", False)
    if _is_masked(fn) or (can_enumerate and hasattr(fn, "base_dist")):
        return finite_components(fn.base_dist)
    if not can_enumerate or fn.event_shape or _has_own_totals(fn):
        return None
    try:
        support = fn.enumerate_support(expand=False)
        # A support that differs between batch elements has no common index.
        if support.numel() != support.shape[0]:
            return None
        table = fn.log_prob(support)
    except (NotImplementedError, ValueError):
        # Empirical takes one value at a time: its support is treated as infinite.
        return None
    return Components("support", (), len(support)) if table.shape == support.shape[:1] + fn.batch_shape else None


def have_same_values(one: Any, other: Any) -> bool:
    """Whether two distributions split into components of the same values, in the same order; it reads the values."""
    split = finite_components(one)
    if split is None or split != finite_components(other):
        return False
    return split.kind != "support" or bool((_support(one) == _support(other)).all())


def _has_own_log_prob(fn: Any) -> bool:
    """Whether a user's subclass overrides ``log_prob``, so that its parameters do not determine it."""
    return not type(fn).log_prob.__module__.startswith(("torch.", "pyro."))


@finite_components.register(td.Bernoulli)
def _bernoulli(fn: td.Bernoulli) -> Components | None:
    return _by_support(fn) if _has_own_log_prob(fn) else Components("bernoulli", (), 2)


@finite_components.register(td.Categorical)
def _categorical(fn: td.Categorical) -> Components | None:
    return _by_support(fn) if _has_own_log_prob(fn) else Components("categorical", (), fn.param_shape[-1])


@finite_components.register(td.OneHotCategorical)
def _one_hot(fn: td.OneHotCategorical) -> Components | None:
    # Straight-through variants are reparameterised: their value carries a gradient.
    return None if fn.has_rsample or _has_own_log_prob(fn) else Components("one_hot", (), fn.param_shape[-1])


@finite_components.register(td.Binomial)
def _binomial(fn: td.Binomial) -> Components | None:
    # Does not build the support, which may be long.
    return None if _has_own_totals(fn) else Components("support", (), int(fn.total_count.max()) + 1)


def _has_own_totals(fn: Any) -> bool:
    """Whether each row counts up to a total of its own. Rows then have no common support; no number is read."""
    total = getattr(fn, "total_count", None)
    sizes = zip(total.shape, total.stride(), strict=True) if isinstance(total, Tensor) else ()
    return any(step and size > 1 for size, step in sizes)


@finite_components.register(td.Independent)
def _independent(fn: td.Independent[Any]) -> Components | None:
    base = None if _has_own_log_prob(fn) else finite_components(fn.base_dist)
    if base is None or base.kind == "support" or _is_masked(fn.base_dist):
        return None
    batch = fn.base_dist.batch_shape
    taken = tuple(batch[len(batch) - fn.reinterpreted_batch_ndims :])
    return Components(base.kind, taken + base.event_shape, base.cardinality)


def count_components(fn: Any) -> Components | None:
    """The independent components of counts, each beside the value next to it; ``None`` for other laws."""
    base = base_distribution(fn)
    is_count = isinstance(base, td.Poisson | td.Binomial | td.NegativeBinomial | td.Geometric)
    is_known = is_count and not (_has_own_log_prob(fn) or _has_own_log_prob(base))
    return Components("count", tuple(fn.event_shape), 2) if is_known else None


class Neighbours(NamedTuple):
    r"""What weighs the values next to a count ``z`` with mean ``μ``, each ``batch_shape + event_shape``, detached.

        ∇E f(z) = E[s w (f(z + s) - f(z))] ∇μ

    Args:
        step: ``s``, 1 or -1.
        weight: ``w``.
        back: What ``w`` at ``z - s`` becomes where ``z`` stands for it: ``w(z - s) q(z - s) / q(z)``.
    """

    step: Tensor
    weight: Tensor
    back: Tensor


@torch.no_grad()
def neighbours(fn: Any, value: Tensor) -> Neighbours:
    r"""The steps of counts and their weights.

    ``w = (z + 1) q(z + 1) / (μ q(z))`` up, and ``w = z / μ`` down, where ``q`` is Poisson, binomial, negative binomial
    or geometric. The step is up, but for a binomial with a probability above one half: its weight would vary more.
    """
    base, value = base_distribution(fn), value.detach()
    mean = base.mean.expand(value.shape)
    up, down, step = torch.ones_like(value), value / mean, torch.ones_like(value)
    if isinstance(base, td.Binomial):
        up = (base.total_count - value) / (base.total_count * (1.0 - base.probs))
        step = torch.where(base.probs > 0.5, -step, step)
    elif isinstance(base, td.NegativeBinomial):
        up = (value + base.total_count) * torch.sigmoid(-base.logits) / base.total_count
    elif isinstance(base, td.Geometric):
        up = (value + 1.0) * base.probs
    weight, back = torch.where(step > 0, up, down), torch.where(step > 0, down, up)
    weight, back = (torch.where(part.isfinite(), part, torch.zeros_like(part)) for part in (weight, back))
    return Neighbours(step, weight, back)


def count_mean(fn: Any) -> Tensor:
    """The mean of counts, ``batch_shape + event_shape``, with a gradient to their probability or rate alone."""
    base = base_distribution(fn)
    mean = base.total_count.detach() * base.logits.exp() if isinstance(base, td.NegativeBinomial) else base.mean
    return mean.expand(fn.batch_shape + fn.event_shape)


def dispersion_score(fn: Any, value: Tensor) -> Tensor | None:
    """``log q`` as a function of ``total_count`` alone, of the batch shape; ``None`` if that has no gradient."""
    base = base_distribution(fn)
    if not (isinstance(base, td.NegativeBinomial) and base.total_count.requires_grad):
        return None
    own = td.NegativeBinomial(base.total_count, logits=base.logits.detach(), validate_args=False)
    return td.Independent(own, len(fn.event_shape), validate_args=False).log_prob(value.detach())


def _is_masked(fn: Any) -> bool:
    # Pyro's MaskedDistribution, which this layer does not import.
    return type(fn).__name__ == "MaskedDistribution"


def base_distribution(fn: Any) -> Any:
    """The distribution under ``to_event``, ``mask`` and ``expand``.

    Args:
        fn: A distribution of torch or Pyro.

    Returns:
        The distribution without these wrappers.
    """
    while _is_wrapper(fn.__class__):
        fn = fn.base_dist
    return fn


@cache
def _is_wrapper(kind: type) -> bool:
    """Whether it is such a class, or a user's subclass of one."""
    return any(each.__name__ in ("Independent", "MaskedDistribution", "ExpandedDistribution") for each in kind.__mro__)


def family_of(fn: Any) -> tuple[Any, ...]:
    """The kind of a distribution: its type under wrappers, its number of values, whether it has ``rsample``."""
    base = base_distribution(fn)
    return type(base), getattr(base, "_num_events", None), bool(getattr(fn, "has_rsample", False))


def independent_components(fn: Any) -> int | None:
    """Number of components that ``to_event`` joined, finite or not; ``None`` if it cannot be determined."""
    # A mask weights components differently. A nested to_event would have to be split in turn.
    if not isinstance(fn, td.Independent) or isinstance(fn.base_dist, td.Independent):
        return None
    if _is_masked(fn.base_dist) or _has_own_log_prob(fn):
        return None
    return math.prod(fn.base_dist.batch_shape[len(fn.batch_shape) :])


def element_log_prob(fn: Any, value: Tensor) -> tuple[Tensor, int]:
    """Returns the log-probability of each independent component, and its number of event dimensions."""
    if independent_components(fn) is None:
        return fn.log_prob(value), 0
    return fn.base_dist.log_prob(value), fn.reinterpreted_batch_ndims


def batch_of(fn: Any, value: Tensor) -> torch.Size:
    """Batch shape of a value of a distribution."""
    return value.shape[: value.dim() - len(fn.event_shape)]


def encode_real(value: Tensor) -> Tensor:
    """Compresses real-valued critic inputs by ``asinh``: linear near zero, logarithmic far out."""
    return torch.asinh(value)


class Standardised(NamedTuple):
    """Centred powers of a value."""

    powers: Tensor  # `e` and `e² - 1`, `(..., D, 2)`, detached; zero where the variance is zero
    # Expectation of the same functions of `x`, with their centre and scale held fixed. It is zero, and it has a
    # gradient in the distribution's parameters.
    expected: Tensor
    mean: Tensor  # mean `(..., D)`, detached
    spread: Tensor  # standard deviation `(..., D)`, detached; one where the standard deviation is zero


def has_moments(fn: Any) -> bool:
    """Whether a distribution provides a finite mean and variance of its values."""
    try:
        mean, variance = fn.mean, fn.variance
    except (AttributeError, NotImplementedError):
        return False
    is_whole = mean.shape == variance.shape == fn.batch_shape + fn.event_shape
    return is_whole and bool((mean.isfinite() & variance.isfinite()).all())


def standardise(value: Tensor, mean: Tensor, variance: Tensor) -> Standardised:
    r"""Returns centred powers of a value ``(..., D)``, and their expectation with its gradient.

    For the frozen centre ``m`` and scale ``s`` (the current mean and standard deviation)

        E[(x - m) / s] = (μ - m) / s,   E[((x - m) / s)² - 1] = (σ² + (μ - m)²) / s² - 1.

    Both are zero here, for every distribution with finite mean and variance. So they centre critics of values without
    finite support. Their gradients are ``∇μ / s`` and ``∇σ² / s²``.
    """
    centre, square = mean.detach(), variance.detach()
    is_random = square > 0
    spread = torch.where(is_random, square, torch.ones_like(square)).sqrt()
    unit = ((value.detach() - centre) / spread).masked_fill(~is_random, 0.0)
    powers = torch.stack((unit, (unit.square() - 1.0).masked_fill(~is_random, 0.0)), -1)
    first = (mean - centre) / spread
    second = (variance - square) / spread.square()
    expected = torch.stack((first, second), -1).masked_fill(~is_random.unsqueeze(-1), 0.0)
    return Standardised(powers, expected, centre, spread)
