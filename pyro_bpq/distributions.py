r"""Subsets and orders of items, as distributions and as chains of categorical choices.

As one site, a subset or an order has too many values to be summed over, and its cost says nothing about single items.
:func:`sample_chain` draws the same law choice by choice. Each choice is a site of few values, so that sums over all
values, critics and hindsight serve it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro.distributions import Categorical, TorchDistribution
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import pad

from pyro_bpq.errors import OptionError, UnsupportedSiteError, is_whole


class _Choices(TorchDistribution):
    """A law of ``k`` items among ``n``, given a logit for each."""

    arg_constraints = {"logits": constraints.real_vector}  # noqa: RUF012 - torch's name
    has_enumerate_support = True
    has_all = True  # whether a value has an entry for each item; else for each that is chosen

    def __init__(self, logits: Tensor, k: int | None = None, validate_args: bool | None = None) -> None:
        self.logits, self.n = logits, logits.shape[-1] if logits.dim() else 0
        self.k = self.n if k is None else k
        if not (is_whole(self.k) and 1 <= self.k <= self.n):
            raise OptionError(
                f"{type(self).__name__} chooses k={k} of {self.n} items: k is whole, 1 <= k <= n, logits (batch, n)."
            )
        event = self.n if self.has_all else self.k
        super().__init__(logits.shape[:-1], torch.Size((event,)), validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """The law in a larger batch shape."""
        new: Any = self._get_checked_instance(type(self), _instance)  # type: ignore[no-untyped-call]
        logits = self.logits.expand((*batch_shape, self.n))
        _Choices.__init__(new, logits, self.k, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def _finite(self) -> Tensor:
        """The logits; products and differences with -inf are no numbers."""
        return self.logits.clamp(min=torch.finfo(self.logits.dtype).min / (2 * self.n))

    def _spread(self, values: Tensor, expand: bool) -> Tensor:
        """Values ``(number, event)``, beside all batch dimensions."""
        values = values.reshape(-1, *(1,) * len(self.batch_shape), *self.event_shape)
        return values.expand(-1, *self.batch_shape, *self.event_shape) if expand else values


class _Values(constraints.Constraint):
    """Vectors of whole numbers that pass a test."""

    is_discrete, event_dim = True, 1

    def __init__(self, check: Callable[[Tensor], Tensor]) -> None:
        self.check = check  # type: ignore[method-assign]


def _log_sums(logits: Tensor, k: int) -> Tensor:
    """``log e_j`` of the items from the ``t``-th on, ``(batch, j = 0..k, t = 0..n)``; ``e_j`` sums over j-subsets."""
    levels = [torch.zeros_like(pad(logits, (0, 1)))]
    for _ in range(k):
        # The first item of the subset is any that leaves enough behind it.
        first = logits[..., : levels[-1].shape[-1] - 1] + levels[-1][..., 1:]
        levels.append(first.flip(-1).logcumsumexp(-1).flip(-1))
    return torch.stack([pad(level, (0, j), value=-torch.inf) for j, level in enumerate(levels)], -2)


class KSubset(_Choices):
    r"""Exactly ``k`` of ``n`` items, with weights ``exp(logits)``.

    .. math::

        p(S) = \frac{\exp \sum_{i \in S} \text{logits}_i}{e_k(\exp \text{logits})}

    A value is a vector ``(n,)`` of zeros and ones. The elementary symmetric polynomial ``e_k`` is computed in ``k``
    calls, in logarithms.

    Args:
        logits: Log-weights of the items, ``(batch, n)``.
        k: Size of the subset.
        validate_args: Whether values are checked.

    Raises:
        OptionError: Unless ``1 <= k <= n``.

    Example:
        >>> import torch
        >>> KSubset(torch.zeros(4), 2).mean
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    def __init__(self, logits: Tensor, k: int, validate_args: bool | None = None) -> None:
        super().__init__(logits, k, validate_args)

    @property
    def support(self) -> constraints.Constraint:
        """Vectors of zeros and ``k`` ones."""
        return _Values(lambda value: ((value == 0) | (value == 1)).all(-1) & (value.sum(-1) == self.k))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of subsets, ``(batch,)``, in nats."""
        if self._validate_args:
            self._validate_sample(value)
        logits = self._finite
        return (value * logits).sum(-1) - _log_sums(logits, self.k)[..., -1, 0]

    @property
    def mean(self) -> Tensor:
        """Probability that an item is chosen, ``(batch, n)``."""
        logits = self._finite
        after, before = _log_sums(logits, self.k), _log_sums(logits.flip(-1), self.k).flip(-1)
        others = (before[..., :-1, :-1] + after[..., :-1, 1:].flip(-2)).logsumexp(-2)
        return (logits + others - after[..., -1, :1]).exp()

    @property
    def variance(self) -> Tensor:
        """Variance of each item, ``(batch, n)``."""
        return self.mean * (1.0 - self.mean)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws subsets, exactly: the first item, then the next one, until there are ``k``."""
        own, value = self._finite, self.logits.new_zeros(self._extended_shape(sample_shape))
        after = _log_sums(own, self.k)
        last = torch.full_like(value[..., :1], -1, dtype=torch.long)
        items = torch.arange(self.n, device=value.device)
        for left in range(self.k - 1, -1, -1):
            logits = (own + after[..., left, 1:]).masked_fill(items <= last, -torch.inf)
            last = Categorical(logits=logits, validate_args=False).sample().unsqueeze(-1)
            value = value.scatter(-1, last, 1.0)
        return value

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All subsets, in lexicographic order: ``(number, batch, n)``."""
        chosen = torch.combinations(torch.arange(self.n, device=self.logits.device), self.k)
        return self._spread(self.logits.new_zeros(len(chosen), self.n).scatter(-1, chosen, 1.0), expand)

    def chain(self, draw: Callable[[int, Any], Tensor]) -> Tensor:
        """Draws a state for each item: ``2 c - x`` if it is chosen (``x = 1``) or not, and ``c`` are chosen so far.

        Args:
            draw: Gives a value of the law of the ``t``-th state, called with ``t`` and the law.

        Returns:
            The subset, ``(batch, n)``.
        """
        states = torch.arange(2 * self.k + 1, device=self.logits.device)
        count, chosen = states + 1 >> 1, states & 1
        own, before, found = self._finite, torch.zeros_like(count[0]), list[Tensor]()
        after = _log_sums(own, self.k)
        for t in range(self.n):
            logits = chosen * own[..., t, None] + after[..., self.k - count, t + 1]
            may = (count - chosen == before.unsqueeze(-1)) & (self.k - count < self.n - t)
            # Nothing follows a state that is never drawn; its law must be one all the same.
            may = may | ~may.any(-1, keepdim=True)
            state = draw(t, Categorical(logits=logits.masked_fill(~may, -torch.inf)))
            before = state + 1 >> 1
            found.append((state & 1).to(self.logits.dtype))
        return torch.stack(torch.broadcast_tensors(*found), -1)


class PlackettLuce(_Choices):
    r"""Orders of ``n`` items, or their first ``k`` places: each place goes to one of the items that are left.

    .. math::

        p(o) = \prod_{t < k} \frac{\exp \text{logits}_{o_t}}{\sum_{i \notin o_{<t}} \exp \text{logits}_i}

    A value is a vector ``(k,)`` of different whole numbers below ``n``: the first item, the second, and so on.

    Args:
        logits: Log-weights of the items, ``(batch, n)``.
        k: Number of places; all ``n`` by default.
        validate_args: Whether values are checked.

    Raises:
        OptionError: Unless ``1 <= k <= n``.

    References:
        Plackett (1975), The analysis of permutations.

    Example:
        >>> import torch
        >>> PlackettLuce(torch.zeros(3)).log_prob(torch.tensor([2, 0, 1])).exp()
        tensor(0.1667)
    """

    has_all = False

    @property
    def support(self) -> constraints.Constraint:
        """Vectors of different whole numbers below ``n``."""
        return _Values(self._are_distinct)

    def _are_distinct(self, value: Tensor) -> Tensor:
        is_inside, ordered = ((value >= 0) & (value < self.n)).all(-1), value.sort(-1).values
        return is_inside & (ordered[..., 1:] != ordered[..., :-1]).all(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of orders, ``(batch,)``, in nats."""
        if self._validate_args:
            self._validate_sample(value)
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        logits, value = self._finite.expand(*shape, self.n), value.expand(*shape, self.k)
        left = placed = logits.gather(-1, value)
        if self.k < self.n:
            rest = logits.scatter(-1, value, -torch.inf).logsumexp(-1, keepdim=True)
            left = torch.cat([placed, rest], -1)
        left = left.flip(-1).logcumsumexp(-1).flip(-1)
        return (placed - left[..., : self.k]).sum(-1)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws orders: items sorted by their logits with Gumbel noise."""
        logits = self._finite.expand(*sample_shape, *self.batch_shape, self.n)
        return (logits - torch.empty_like(logits).exponential_().log()).topk(self.k).indices

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All orders, in lexicographic order: ``(number, batch, k)``."""
        found = [*itertools.permutations(range(self.n), self.k)]
        return self._spread(torch.tensor(found, device=self.logits.device), expand)

    def chain(self, draw: Callable[[int, Any], Tensor]) -> Tensor:
        """Draws the item of each place among those that are left.

        Args:
            draw: Gives a value of the law of the ``t``-th place, called with ``t`` and the law.

        Returns:
            The order, ``(batch, k)``.
        """
        own, items, found = self._finite, torch.arange(self.n, device=self.logits.device), list[Tensor]()
        gone = torch.zeros_like(items, dtype=torch.bool)
        for t in range(self.k):
            found.append(draw(t, Categorical(logits=own.masked_fill(gone, -torch.inf))))
            gone = gone | (found[-1].unsqueeze(-1) == items)
        return torch.stack(torch.broadcast_tensors(*found), -1)


def sample_chain(name: str, fn: Any, infer: Any = None) -> Tensor:
    """Draws a subset or an order as a chain of categorical sites ``name_0``, ``name_1``, ..., of the same joint law.

    Write it in model and guide in place of ``pyro.sample(name, fn)``. Costs of single items, or of single places, are
    best stated one by one: then each is charged to few sites. The states of a :class:`KSubset` form a Markov chain, in
    which such costs are summed over all values.

    Args:
        name: Name of the sites, before the number.
        fn: A :class:`KSubset`, a :class:`PlackettLuce`, or another distribution with a method ``chain(draw)``.
        infer: Options of each site.

    Returns:
        The whole value, of the shape that ``pyro.sample`` gives.

    Raises:
        UnsupportedSiteError: If the distribution is no chain.
    """
    if not hasattr(fn, "chain"):
        advice = "Pass KSubset or PlackettLuce, without to_event or mask; or write pyro.sample."
        raise UnsupportedSiteError(f"Site {name!r} ({type(fn).__name__}) is no chain of choices. {advice}")
    return fn.chain(lambda t, law: pyro.sample(f"{name}_{t}", law, infer=dict(infer or {})))  # type: ignore[arg-type]
