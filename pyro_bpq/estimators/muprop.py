r"""MuProp: a first-order expansion of the cost at the mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm, Statistics
from pyro_bpq.estimators.baselines import Baseline, check_baseline
from pyro_bpq.estimators.requirements import needs_float_value
from pyro_bpq.estimators.substitution import event_sum, mean_value


@dataclass(frozen=True)
class MuProp(Estimator):
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

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})

    def __post_init__(self) -> None:
        check_baseline(self)

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs values that can be set to their mean, and the requirements of the baseline."""
        return needs_float_value(self, site) or (None if self.baseline is None else self.baseline.unsupported(site))

    def statistics(self) -> Statistics:
        """Running statistics of the baseline."""
        return {} if self.baseline is None else self.baseline.statistics()

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The residual times ``log q``, and the slope times the mean."""
        mean, ndim = mean_value(context), context.cost.dim()
        statistics: Mapping[str, Tensor] = {}
        with torch.no_grad():
            program = context.program.mean_field() if self.mean_field else context.program
            level, slope = program.gradient(mean.detach())
            level, slope = (torch.where(t.isfinite(), t, torch.zeros_like(t)) for t in (level, slope))
            residual = context.cost - level - event_sum(slope * (context.program.value - mean), ndim)
            if self.baseline is not None:
                residual, statistics = self.baseline(residual, context.statistics, context.count)
        return SiteTerm(residual * context.score + event_sum(slope * mean, ndim), statistics)
