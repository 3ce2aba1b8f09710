r"""Costs at another value and their slopes: expansions at the mean and at the drawn value, and an antithetic sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_bpq.errors import option
from pyro_bpq.estimators.base import (
    Estimator,
    SiteContext,
    SiteInfo,
    SiteTerm,
    Statistics,
    cost_per_row,
    event_sum,
    past,
)
from pyro_bpq.estimators.relaxation import parameters, uniform, uniform_given
from pyro_bpq.estimators.requirements import needs_binary, needs_float_value
from pyro_bpq.estimators.score_function import Baseline, WithBaseline, baseline_option


@dataclass(frozen=True)
class MuProp(WithBaseline):
    r"""Score function of the residual of a first-order expansion at the mean, plus its gradient.

        g_X = (f(x) - f(μ) - f'(μ)·(x - μ) - b) ∇ log q(x) + f'(μ)·∇μ

    ``f`` is the cost-to-go in nats and ``μ`` is the mean of the site. Unbiased, even if costs are not differentiable in
    the value (``f' = 0``) or not finite at the mean (then ``f(μ) = 0``). It needs one more run of guide and model, with
    a backward pass, for every site and particle. For Bernoulli and OneHotCategorical, also in ``to_event``. Programs
    that turn the value into an integer see the mean rounded down.

    Args:
        baseline: Baseline ``b`` of the residual: ``None``, :class:`LeaveOneOut` or :class:`RunningBaseline`.
        mean_field: Whether Bernoulli, one-hot and reparameterised sites downstream take their means in the extra run,
            as in the papers, instead of being drawn afresh. The expansion then has no noise, but it is that of another
            program.

    References:
        | MuProp: Unbiased backpropagation for stochastic neural networks (Gu et al., 2016)
        | Backprop-Q (Xu et al., 2018), Eq. 19 to 21
    """

    baseline: Baseline | None = baseline_option()
    mean_field: bool = False

    needs = frozenset({"program", "table"})
    takes_outdated: ClassVar[bool] = True

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs values that can be set to their mean, and the requirements of the baseline."""
        return needs_float_value(self, site) or super().unsupported(site)

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The residual times ``log q``, and the slope times the mean."""
        mean, ndim = mean_value(context), context.cost.dim()
        with torch.no_grad():
            program = context.program.mean_field() if self.mean_field else context.program
            level, slope = program.gradient(mean.detach())
            level, slope = (torch.where(t.isfinite(), t, torch.zeros_like(t)) for t in (level, slope))
            residual = context.cost - level - event_sum(slope * (context.program.value - mean), ndim)
            residual, statistics = self.centred(residual, context)
        return SiteTerm(residual * context.score + event_sum(slope * mean, ndim), statistics)


def mean_value(context: SiteContext) -> Tensor:
    """Mean of a Bernoulli or OneHotCategorical site, with gradient, in the shape of its value."""
    table, like = context.table[0].exp(), context.program.value
    table = table.expand(*like.shape[: table.dim() - 2], *table.shape[-2:])
    # Of a Bernoulli the last column.
    return (table if table.numel() == like.numel() else table[..., 1]).reshape(like.shape)


@dataclass(frozen=True)
class DebiasedStraightThrough(Estimator):
    r"""Predicts the cost of each other value of each component; corrects one prediction by the true cost.

        g = Σ_{d,k} ∇q_d(k) (Δ̂_{dk} + 1[(d,k) = S] (Δ_{dk} - Δ̂_{dk}) / π_{dk}),
        Δ_{dk} = f(x with x_d = k) - f(x),   Δ̂_{dk} = f'(x)·(e_k - x_d) + h_{dk}

    ``f`` is the cost-to-go in nats. With ``Δ`` in place of ``Δ̂`` the sum is the local expectation gradient, which is
    exact given the other components. One entry ``S`` per row, drawn with probability ``π``, corrects the error of
    straight-through's first-order prediction. ``h`` is the running mean of that error. ``π`` is, up to ``mixture``,
    proportional to the error's running size times the size of ``∇q``. Unbiased for any ``f'``, ``h`` and ``π > 0``. It
    works badly if costs have no slope. It needs one more run of guide and model for every site and particle, and a
    backward pass to the value, which takes a second run if sites are sampled downstream. For Bernoulli and
    OneHotCategorical, also in ``to_event``.

    Args:
        decay: Weight of the past in the running moments of the errors, in ``[0, 1)``.
        mixture: Share of ``π`` that does not depend on the errors, in ``(0, 1]``.

    References:
        | Local expectation gradients for black box variational inference (Titsias and Lázaro-Gredilla, 2015)
        | Estimating or propagating gradients through stochastic neurons (Bengio et al., 2013)
    """

    decay: float = past(0.99)
    mixture: float = option(0.2, lambda mixture: 0.0 < mixture <= 1.0, "a number in (0, 1]")

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "slope", "table"})
    unsupported = needs_float_value

    def sized_statistics(self, width: int) -> Statistics:
        """Statistics of each entry: the number of its draws, the sum of its errors, the sum of their squares."""
        return {name: torch.zeros(width) for name in ("drawn", "errors", "squares")}

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Weights every log-probability by its predicted difference, and the drawn entry by its corrected one."""
        program = context.program
        log_q, allowed = _entries(context)
        with torch.no_grad():
            q = log_q.exp()
            mean, size = self._errors(context.statistics, q)
            predicted = _first_order(context) + mean
            chance = self._chances(q, size, allowed)
            chosen = _draw(chance, program.generator)
            cost = cost_per_row(program, _moved(context, chosen), context.cost.dim())
            # The chance of the drawn entry is not zero, so the division below is safe.
            drawn, expected = ((chosen * tensor).sum((-1, -2)) for tensor in (chance, predicted))
            error = cost - context.cost - expected
            table = predicted + chosen * (error / drawn)[..., None, None]
            rest = chosen * error[..., None, None]
            new = {"drawn": chosen, "errors": rest + chosen * mean, "squares": rest.square()}
            sums = {name: tensor.flatten(1, -3).sum(1).flatten(1) for name, tensor in new.items()}
            statistics = {name: self.decay * context.statistics[name] + own for name, own in sums.items()}
        return SiteTerm(q * (table * allowed) * log_q, statistics)

    def _errors(self, statistics: Mapping[str, Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean error of the first-order prediction of each entry, and the typical size of the remaining error."""
        drawn, errors, squares = (statistics[name] for name in ("drawn", "errors", "squares"))
        shape = (len(drawn), *(1,) * (like.dim() - 3), *like.shape[-2:])
        typical = squares.sum(1, keepdim=True) / drawn.sum(1, keepdim=True).clamp(min=1.0)
        # An entry with few draws gets the typical size of all entries and a mean error near zero.
        size = ((squares + typical) / (drawn + 1.0)).sqrt()
        return (errors / (drawn + 1.0)).reshape(shape), size.reshape(shape)

    def _chances(self, q: Tensor, size: Tensor, allowed: Tensor) -> Tensor:
        """Chance of drawing each entry: mixes the size of its gradient with that size times its error."""
        # The constant keeps the chance of every allowed entry above zero if its probability rounds to zero.
        weight = (q * (1.0 - q) + 1e-6) * allowed
        by_error = weight * size
        even, followed = (tensor / tensor.sum((-1, -2), keepdim=True).clamp(min=1e-30) for tensor in (weight, by_error))
        is_known = by_error.sum((-1, -2), keepdim=True) > 0.0
        return torch.where(is_known, followed + self.mixture * (even - followed), even)


# An entry is another value of a component: shape (..., D, K), or (..., D, 1) if a component has two values.


def _entries(context: SiteContext) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the entries, with gradient, and a mask of those that are not sampled."""
    log_probs, index = context.table
    if log_probs.shape[-1] == 2:
        log_q = log_probs.gather(-1, 1 - index.unsqueeze(-1))
        return log_q, torch.ones_like(log_q)
    return log_probs, torch.ones_like(log_probs).scatter_(-1, index.unsqueeze(-1), 0.0)


def _first_order(context: SiteContext) -> Tensor:
    """``f'(x)·(e_k - x_d)`` of each entry; zero where the slope is not finite."""
    log_probs, index = context.table
    index, slope = index.unsqueeze(-1), context.program.slope()
    slope = torch.where(slope.isfinite(), slope, torch.zeros_like(slope))
    if log_probs.shape[-1] > 2 or slope.numel() == log_probs.numel():
        table = slope.reshape(log_probs.shape)
        first = table - table.gather(-1, index)
        return first if log_probs.shape[-1] > 2 else first.gather(-1, 1 - index)
    return slope.reshape(index.shape) * (1 - 2 * index)


def _moved(context: SiteContext, chosen: Tensor) -> Tensor:
    """The value with the drawn entry of each row in place of the sampled one."""
    log_probs, index = context.table
    other = 1 - index if log_probs.shape[-1] == 2 else chosen.argmax(-1)
    moved = torch.where(chosen.sum(-1) > 0, other, index)
    return context.program.from_index(moved).reshape(context.program.value.shape)


def _draw(chance: Tensor, generator: torch.Generator) -> Tensor:
    """Draws one entry of each row; returns its indicator ``(..., D, K)``."""
    bounds = chance.flatten(-2).cumsum(-1)
    u = uniform(bounds[..., :1], generator) * bounds[..., -1:]
    at = torch.searchsorted(bounds, u, right=True).clamp(max=bounds.shape[-1] - 1)
    return torch.zeros_like(bounds).scatter_(-1, at, 1.0).reshape(chance.shape)


@dataclass(frozen=True)
class DisARM(Estimator):
    r"""Compares the sample with an antithetic one; for binary components.

        g_d = ½ (f(b) - f(b̃)) (-1)^{b̃_d} 1[b_d ≠ b̃_d] σ(|α_d|) ∇α_d,
        b_d = 1[u_d < σ(α_d)],  b̃_d = 1[1 - u_d < σ(α_d)]

    ``α`` are the logits and ``f`` is the cost-to-go in nats. Unbiased. It needs one more run of guide and model for
    every site and particle. In that run all components and plate rows of the site take their antithetic values at once,
    and sites downstream are drawn afresh.

    References:
        | DisARM: An antithetic gradient estimator for binary latent variables (Dong et al., 2020)
        | Probabilistic best subset selection via gradient-based optimization, U2G (Yin et al., 2020)
    """

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})
    unsupported = needs_binary

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Half the difference of the costs, signed, where the pair differs."""
        (log_probs, index), program = context.table, context.program
        logits = parameters(log_probs)
        with torch.no_grad():
            p = logits.sigmoid()
            partner = (1.0 - uniform_given(p, index, program.generator) < p).long()
            difference = program.cost(program.from_index(partner)) - context.cost
            sign = (index - partner).to(logits.dtype)
            weight = -0.5 * difference.unsqueeze(-1) * sign * logits.abs().sigmoid()
        return SiteTerm(weight * logits)
