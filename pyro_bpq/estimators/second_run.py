r"""The score function with an independent second run as its baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pyro_bpq.estimators.base import (
    Estimator,
    SiteContext,
    SiteTerm,
    Statistics,
    check_decay,
    site_mean,
    unit_scale,
    update_mean,
)


@dataclass(frozen=True)
class SecondRun(Estimator):
    r"""Score function whose baseline is the cost-to-go of an independent run on the same data.

        g_X = (C_X - b - a (C'_X - b)) ∇ log q(x),    a = Cov(C_X, C'_X) / Var(C_X) in [0, 1]

    ``C'_X`` is the cost-to-go, in nats, of a run that draws every site afresh, without gradients. It estimates the
    mean cost of this data point, which a mean over data points does not show. The mean ``b`` and the scale ``a`` come
    from earlier steps, over plate rows. ``a`` is the share of the cost's variance that is due to the data. Unbiased.
    It serves any site. One more run of guide and model for each particle serves all sites. With several particles,
    leave-one-out gives the same without an extra run.

    Args:
        decay: Weight of the past in the running moments, in ``[0, 1)``.

    Raises:
        OptionError: If an option is out of range.

    References:
        Buy 4 REINFORCE samples, get a baseline for free (Kool et al., 2019)
    """

    decay: float = 0.99

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program"})
    by_component = True

    def __post_init__(self) -> None:
        check_decay("SecondRun", self.decay)

    def statistics(self, num_particles: int) -> Statistics:
        """Running mean, and second moments of a pair of runs."""
        return {"mean": 0.0, "square": 1.0, "product": 1.0}

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The centred cost-to-go times ``log q``."""
        assert context.count is not None
        cost, second = context.cost, context.program.independent()
        shape = (-1, *(1,) * (cost.dim() - 1))
        old, count = context.statistics, context.count
        variance, covariance = (old[name] - old["mean"].square() for name in ("square", "product"))
        # With zero variance, or before any step, the second run is as good as any other baseline: the scale is 1.
        scale = unit_scale(covariance, variance).masked_fill(variance <= 0.0, 1.0)
        first, other = (tensor - old["mean"].reshape(shape) for tensor in (cost, second))
        new = {
            "mean": 0.5 * (cost + second),
            "square": 0.5 * (cost.square() + second.square()),
            "product": cost * second,
        }
        return SiteTerm(
            (first - scale.reshape(shape) * other) * context.score,
            {name: update_mean(old[name], site_mean(tensor), count, self.decay) for name, tensor in new.items()},
        )
