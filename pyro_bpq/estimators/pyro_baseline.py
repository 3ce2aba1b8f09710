r"""The score function with a baseline that the user supplies: Pyro's ``infer={"baseline": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pyro_bpq.estimators.base import Estimator, SiteContext, SiteTerm, Statistics
from pyro_bpq.estimators.baselines import RunningBaseline


@dataclass(frozen=True)
class PyroBaseline(Estimator):
    r"""Score function with a baseline ``b`` from a network or a tensor of the user.

        g_X = (C_X - b - r) ∇ log q(x),    loss of the baseline: (C_X - b - r)²

    The user's optimiser trains the baseline, as in ``TraceGraph_ELBO``: the baseline's loss is part of the surrogate.
    The running mean ``r`` is subtracted only if ``decay`` is given.

    Args:
        decay: Weight of the past in the running mean, or ``None`` for no running mean.
    """

    decay: float | None = None

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"baseline", "table"})

    def __post_init__(self) -> None:
        if self.decay is not None:
            RunningBaseline(self.decay)

    def statistics(self, num_particles: int) -> Statistics:
        """The running mean, if any."""
        return {} if self.decay is None else RunningBaseline(self.decay).statistics()

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The centred cost-to-go times ``log q``, and the loss of the baseline."""
        cost = context.cost
        statistics: Mapping[str, Tensor] = {}
        if self.decay is not None:
            cost, statistics = RunningBaseline(self.decay)(cost, context.statistics, context.count)
        residual = cost - context.baseline
        return SiteTerm(residual.detach() * context.score + residual.square(), statistics)
