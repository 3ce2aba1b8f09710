r"""What estimators with one control variate share: its scale, and the running means of its baseline."""

from __future__ import annotations

from torch import Tensor

from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, Statistics, check_decay
from pyro_bpq.estimators.optimal_scale import Scale, check_scale, read_scale, scale_statistics, update_scale
from pyro_bpq.estimators.requirements import needs_finite
from pyro_bpq.estimators.variates import means_statistics, update_means


class Scaled(Estimator):
    """Base of the estimators ``u - a v``, with the fields ``scale``, ``a``, and ``decay`` of the running means."""

    scale: Scale
    decay: float

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_scale(owner, self.scale)
        check_decay(owner, self.decay)

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs finite components."""
        return needs_finite(type(self).__name__, site)

    def statistics(self, num_particles: int) -> Statistics:
        """Running means and products for the scale."""
        return {**means_statistics(), **scale_statistics(self.scale)}

    def updated(self, context: SiteContext, value: Tensor, *parts: Tensor) -> dict[str, Tensor]:
        """New running statistics, from what the critic or program predicts and, where known, from ``u`` and ``v``."""
        means = update_means(context.cost, value, context, self.decay, read_scale(self.scale, context))
        return {**means, **(update_scale(self.scale, context, *parts) if parts else {})}
