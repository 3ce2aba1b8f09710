r"""The unordered-set estimator: samples without replacement."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm
from pyro_bpq.estimators.noise import gumbel
from pyro_bpq.estimators.requirements import needs_single
from pyro_bpq.estimators.substitution import cost_per_row

_MAX_SAMPLES = 6


@dataclass(frozen=True)
class UnorderedSet(Estimator):
    r"""Averages over the order of draws of a set of distinct values; for a site of one finite component.

        g_X = Σ_{s ∈ S} P(b_1 = s | S) (f(s) - B_s) ∇ log q(s),
        B_s = q(s) f(s) + (1 - q(s)) Σ_{t ≠ s} P(b_2 = t | b_1 = s, S) f(t)

    ``S`` is the set of the first ``k`` values of draws ``b_1, b_2, ...`` without replacement; the sample of this run
    comes first. ``f`` is the cost-to-go in nats. ``B_s`` is a baseline whose mean given ``b_1 = s`` is that of ``f``.
    Unbiased. If there are at most ``k`` values, it sums over all of them. It needs ``k - 1`` more runs of guide and
    model for every site and particle, or as many for every row if a cost reads several plate rows. It also sums over
    ``k!`` orders.

    Args:
        samples: Number of values ``k``, from 2 to 6.

    Raises:
        OptionError: If an option is out of range.

    References:
        Estimating gradients for discrete random variables by sampling without replacement (Kool et al., 2020)
    """

    samples: int = 4

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})

    def __post_init__(self) -> None:
        if not 2 <= self.samples <= _MAX_SAMPLES:
            raise OptionError(f"UnorderedSet(samples={self.samples!r}): write a number from 2 to {_MAX_SAMPLES}.")

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs a single finite component."""
        return needs_single("UnorderedSet", site)

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Weights the log-probabilities of the set."""
        assert context.log_probs is not None and context.index is not None
        program, ndim = context.program, context.cost.dim()
        log_probs = context.log_probs.squeeze(-2)
        with torch.no_grad():
            size = min(self.samples, log_probs.shape[-1])
            rest = log_probs + gumbel(log_probs, program.generator)
            rest = rest.scatter(-1, context.index, float("-inf"))
            chosen = torch.cat((context.index, rest.topk(size - 1, -1).indices), -1)
            costs = [cost_per_row(program, program.from_index(z.unsqueeze(-1)), ndim) for z in chosen.unbind(-1)[1:]]
            f = torch.stack([context.cost, *costs], -1)
            q = log_probs.exp().gather(-1, chosen)
            first, second = _orders(q)
            baseline = q * f + (1.0 - q) * (second * f.unsqueeze(-2)).sum(-1)
            weights = torch.zeros_like(log_probs).scatter_(-1, chosen, first * (f - baseline))
        return SiteTerm(weights * log_probs)


def _orders(q: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities of which value of a set came first, and which came second.

    Args:
        q: Probabilities of the values of the set, ``(..., k)``.

    Returns:
        ``P(b_1 = s | S)``, shape ``(..., k)``, and ``P(b_2 = t | b_1 = s, S)``, shape ``(..., k, k)``.
    """
    # A value of probability zero is drawn only after all other values.
    p = q.double().clamp(min=1e-40)
    size = p.shape[-1]
    if size == 1:
        return torch.ones_like(q), torch.zeros_like(q).unsqueeze(-1)
    pairs = p.new_zeros(*p.shape, size)
    for order in itertools.permutations(range(size)):
        left, total = torch.ones_like(p[..., 0]), torch.ones_like(p[..., 0])
        for s in order:
            total = total * (p[..., s] / torch.maximum(left, p[..., s]))
            left = left - p[..., s]
        pairs[..., order[0], order[1]] += total
    firsts = pairs.sum(-1)
    first = firsts / firsts.sum(-1, keepdim=True)
    return first.to(q.dtype), (pairs / firsts.unsqueeze(-1)).to(q.dtype)
