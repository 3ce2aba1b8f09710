"""MuProp: a control variate from the slope of the cost at the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_bpq.estimators.base import SiteContext, SiteInfo, SiteTerm, event_sum
from pyro_bpq.estimators.requirements import needs_float_value
from pyro_bpq.estimators.score_function import Baseline, WithBaseline


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

    baseline: Baseline | None = None
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
