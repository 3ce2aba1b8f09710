"""Sum-and-sample and the unordered-set estimator: costs of several distinct values of one finite component."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_bpq.errors import check_option
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteTerm, cost_per_row
from pyro_bpq.estimators.noise import gumbel
from pyro_bpq.estimators.requirements import needs_single

_MAX_SAMPLES = 6


class _OfDistinctValues(Estimator):
    """Base of the estimators that take the costs of several distinct values of a site of one finite component."""

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})
    unsupported = needs_single


@dataclass(frozen=True)
class SumAndSample(_OfDistinctValues):
    r"""Sums the ``k`` most likely values exactly and samples the rest; for a site of one finite component.

        g_X = Σ_{z ∈ C} ∇q(z) (f(z) - b) + (1 - q(C)) (f(v) - b) ∇ log q(v),    v ~ q(· | not C)

    ``C`` is the set of the ``k`` most likely values, ``f`` is the cost-to-go in nats, ``b`` is the mean of ``f`` over
    ``C``. ``v`` is the sample of this run if it lies outside ``C``, else a fresh sample. Unbiased. If there are at most
    ``k`` values, it sums over all of them. It needs ``k + 1`` more runs of guide and model for every site and
    particle. If a cost reads several plate rows, it needs as many runs for every row.

    Args:
        heaviest: Number ``k`` of values that are summed exactly.

    References:
        Rao-Blackwellized stochastic gradients for discrete distributions (Liu et al., 2019)
    """

    heaviest: int = 4

    def __post_init__(self) -> None:
        check_option(self, "heaviest", self.heaviest >= 1, "a positive number")

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Weights the log-probabilities of the most likely values and of the sample."""
        log_probs, index = context.table[0].squeeze(-2), context.table[1]
        with torch.no_grad():
            heavy = log_probs.topk(min(self.heaviest, log_probs.shape[-1]), -1).indices
            costs = torch.stack([_cost_at(context, z.unsqueeze(-1)) for z in heavy.unbind(-1)], -1)
            probs = log_probs.exp().gather(-1, heavy)
            inside = probs.sum(-1, keepdim=True)
            baseline = (probs * costs).sum(-1, keepdim=True) / inside
            weights = torch.zeros_like(log_probs).scatter_(-1, heavy, probs * (costs - baseline))
            if heavy.shape[-1] < log_probs.shape[-1]:
                is_inside = (index == heavy).any(-1, keepdim=True)
                rest = log_probs.scatter(-1, heavy, float("-inf"))
                fresh = (rest + gumbel(rest, context.program.generator)).argmax(-1, keepdim=True)
                outside = torch.where(is_inside, fresh, index)
                cost = context.cost.unsqueeze(-1)
                if bool(is_inside.any()):
                    cost = torch.where(is_inside, _cost_at(context, outside).unsqueeze(-1), cost)
                # A sum, because 1 - q(C) would lose precision.
                mass = rest.exp().sum(-1, keepdim=True)
                weights = weights.scatter_add(-1, outside, mass * (cost - baseline))
        return SiteTerm(weights * log_probs)


@dataclass(frozen=True)
class UnorderedSet(_OfDistinctValues):
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

    References:
        Estimating gradients for discrete random variables by sampling without replacement (Kool et al., 2020)
    """

    samples: int = 4

    def __post_init__(self) -> None:
        check_option(self, "samples", 2 <= self.samples <= _MAX_SAMPLES, f"a number from 2 to {_MAX_SAMPLES}")

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Weights the log-probabilities of the set."""
        log_probs, index = context.table[0].squeeze(-2), context.table[1]
        with torch.no_grad():
            size = min(self.samples, log_probs.shape[-1])
            rest = log_probs + gumbel(log_probs, context.program.generator)
            rest = rest.scatter(-1, index, float("-inf"))
            chosen = torch.cat((index, rest.topk(size - 1, -1).indices), -1)
            f = torch.stack([context.cost, *(_cost_at(context, z.unsqueeze(-1)) for z in chosen.unbind(-1)[1:])], -1)
            q = log_probs.exp().gather(-1, chosen)
            first, second = _orders(q)
            baseline = q * f + (1.0 - q) * (second * f.unsqueeze(-2)).sum(-1)
            weights = torch.zeros_like(log_probs).scatter_(-1, chosen, first * (f - baseline))
        return SiteTerm(weights * log_probs)


def _cost_at(context: SiteContext, index: Tensor) -> Tensor:
    """Costs-to-go ``(G, M, plates)`` at the values of an index ``(G, M, plates, 1)``."""
    return cost_per_row(context.program, context.program.from_index(index), context.cost.dim())


def _orders(q: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities ``P(b_1 = s | S)``, ``(..., k)``, and ``P(b_2 = t | b_1 = s, S)``, ``(..., k, k)``, from ``q``."""
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
