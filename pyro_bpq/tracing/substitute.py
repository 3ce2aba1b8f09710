r"""Sets the values of latent sites of a program."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from pyro.distributions import OneHotCategorical
from pyro.distributions.score_parts import ScoreParts
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import effectful
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.rollout.features import Components, finite_components


class Substitute(Messenger):
    """Sets the values of named latent sites; all other sites are drawn as usual.

    Values of ``relaxed`` sites may lie between those of their support: ``log q`` and ``log p`` of a one-hot site are
    then linear in the value, where torch rounds to the nearest vertex. Sites in ``means`` take the mean of their
    distribution in the guide, with its gradient, if they have one (Bernoulli, one-hot, reparameterised).
    """

    def __init__(
        self, values: Mapping[str, Any], relaxed: frozenset[str] = frozenset(), means: frozenset[str] = frozenset()
    ) -> None:
        super().__init__()
        self.values, self.relaxed, self.means = values, relaxed, means
        self._taken: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if msg["is_observed"]:
            return
        if name in self.values:
            msg["value"], msg["done"] = self.values[name], True
            if name in self.relaxed:
                msg["fn"] = _linear(msg["fn"])
        elif name in self.means:
            # The guide comes first. The model's own distribution of the site may have another mean.
            value = self._taken.get(name)
            value = _mean(msg["fn"]) if value is None else value
            if value is not None:
                self._taken[name] = msg["value"] = value
                msg["fn"], msg["done"] = _linear(msg["fn"]), True


def _mean(fn: Any) -> Tensor | None:
    """The mean of a distribution whose value may move continuously; ``None`` if it has none."""
    split = finite_components(fn)
    if not getattr(fn, "has_rsample", False) and (split is None or split.kind not in ("bernoulli", "one_hot")):
        return None
    try:
        mean: Tensor = fn.mean
    except NotImplementedError:
        return None
    return mean if bool(mean.isfinite().all()) else None


def relaxed_log_prob(fn: Any, value: Tensor) -> Tensor:
    """Log-probability at a value that may lie between support values, as in :class:`Substitute`."""
    return unchecked(_linear(fn)).log_prob(value)


def unchecked(fn: Any) -> Any:
    """Returns a copy of the distribution that does not check values."""
    fn = copy.copy(fn)
    fn._validate_args = False
    if hasattr(fn, "base_dist"):
        fn.base_dist = unchecked(fn.base_dist)
    return fn


class _LinearOneHot(OneHotCategorical):
    def log_prob(self, value: Tensor) -> Tensor:
        # A value of probability zero has a logit of -inf; the clamp keeps 0 * -inf from becoming NaN.
        return (value * self.logits.clamp(min=max(-1e6, torch.finfo(self.logits.dtype).min))).sum(-1)


def _linear(fn: Any) -> Any:
    """Returns the distribution, with a one-hot base distribution made linear in the value."""
    if isinstance(fn, torch.distributions.OneHotCategorical):
        return _LinearOneHot(logits=fn.logits, validate_args=False)
    if hasattr(fn, "base_dist"):
        base = _linear(fn.base_dist)
        if base is not fn.base_dist:
            fn = copy.copy(fn)
            fn.base_dist = base
    return fn


@effectful(type="bpq_draw")
def _draw(name: str, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws from a distribution; a message, for handlers that draw in place of the generator."""
    return fn(*args, **kwargs)


class AllValues(Messenger):
    """Sets every latent site of finite support to its value ``k`` in row ``k``; reparameterised sites are drawn once.

    A site of fewer values than rows begins again with its first one. All other sites are drawn as usual. An object
    serves one run of guide and model.

    Args:
        rows: Number of rows.
        nesting: Number of batch dimensions, that of the rows included.
        is_compact: Whether values have size one in plates.
        is_scored: Whether the log-probabilities of these values are computed. Else zeros stand for them: the
            distributions tell them for all values.
    """

    def __init__(self, rows: int, nesting: int, is_compact: bool = False, is_scored: bool = True) -> None:
        super().__init__()
        self.rows, self.nesting, self.is_compact, self.is_scored = rows, nesting, is_compact, is_scored
        self._drawn: dict[str, Tensor] = {}
        self._index: dict[Any, Tensor] = {}

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if msg["is_observed"] or isinstance(fn, _Subsample):
            return
        split = None if fn.has_rsample else finite_components(fn)
        if split is None and not fn.has_rsample:
            return
        if len(fn.batch_shape) != self.nesting:
            raise UnsupportedProgramError(f"Site {msg['name']!r} has no dimension for the rows of its values.")
        msg["value"] = self._drawn_once(msg) if split is None else self._values(fn, split)
        msg["done"] = True
        if split is not None and not self.is_scored:
            # Pyro computes what a site of a trace lacks.
            zero = msg["value"].new_zeros((), dtype=torch.get_default_dtype())
            zeros = zero.expand(fn.batch_shape)
            msg["log_prob"], msg["unscaled_log_prob"], msg["log_prob_sum"] = zeros, zeros, zero
            msg["score_parts"] = ScoreParts(zeros, zeros, 0)  # type: ignore[arg-type]

    def _drawn_once(self, msg: Any) -> Tensor:
        # The guide comes first; the model has its value.
        if msg["name"] not in self._drawn:
            drawn = _draw(msg["name"], msg["fn"], *msg["args"], **msg["kwargs"])
            self._drawn[msg["name"]] = drawn[:1].expand_as(drawn)
        return self._drawn[msg["name"]]

    def _values(self, fn: Any, split: Components) -> Tensor:
        parameters = split.parameters(fn)
        batch = torch.Size([self.rows, *(1,) * (self.nesting - 1)]) if self.is_compact else fn.batch_shape
        key = (split.cardinality, split.size, batch, parameters.device)
        if key not in self._index:
            index = torch.arange(self.rows, device=parameters.device) % split.cardinality
            self._index[key] = index.reshape(-1, *(1,) * self.nesting).expand(*batch, split.size)
        value = split.value(self._index[key], fn)
        return value.to(parameters.dtype) if split.kind in ("bernoulli", "one_hot") else value
