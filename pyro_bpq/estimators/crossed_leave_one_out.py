r"""Leave-one-out across particles, beside the particle's own past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm, Statistics, check_decay, update_mean
from pyro_bpq.estimators.baselines import LeaveOneOut, leave_one_out
from pyro_bpq.estimators.score_function import ScoreFunction

__all__ = ["CrossedLeaveOneOut"]


@dataclass(frozen=True)
class CrossedLeaveOneOut(Estimator):
    r"""Score function whose baseline is what the other particles' values cost beside this particle's own past.

        g_X = (C_i - C̄_i - a (Δ_i - d)) ∇ log q(x_i),    a = Cov(C_i - C̄_i, Δ_i) / Var(Δ_i) in [0, 1],  d = E[Δ_i]

    ``C_i`` is the cost-to-go of particle ``i``, ``C̄_i`` the mean of the others', and ``Δ_i``, in nats, what that mean
    changes by if everything that does not depend on ``X`` is as in particle ``i``. It is known without another run for
    log-probabilities whose law reads the past alone, such as ``log q(x_j | past_i)``, or whose value lies in the past,
    such as ``log p(past_i | x_j)``, at sites of finite support. In layers it tells how well a layer explains the one
    below it, where leave-one-out compares with another layer below. ``a`` and ``d`` are those of earlier steps, over
    plate rows; where nothing is sampled before a site it is plain leave-one-out. Unbiased, detached but for the score.

    For layers of many units. With a few, leave-one-out can have less variance: where two particles agree in a value
    their terms cancel.

    Args:
        decay: Weight of the past in the running moments, in ``[0, 1)``.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Buy 4 REINFORCE samples, get a baseline for free (Kool et al., 2019), for leave-one-out
        | Neural variational inference and learning in belief networks (Mnih and Gregor, 2014), for signals by layer
    """

    decay: float = 0.99

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"crossed"})

    def __post_init__(self) -> None:
        check_decay("CrossedLeaveOneOut", self.decay)

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs two particles."""
        if site.num_particles < 2:
            return (
                "CrossedLeaveOneOut() needs at least two particles: write TraceBackpropQ_ELBO(num_particles=2, ...) "
                "or ScoreFunction(baseline=RunningBaseline())"
            )
        return None

    def statistics(self, num_particles: int) -> Statistics:
        """Moments of the change, and those of leave-one-out."""
        return {**LeaveOneOut().statistics(), "moments": (0.0, 0.0, 0.0)}

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The centred cost-to-go times ``log q``."""
        change = context.crossed
        if change is None or context.cost.shape[1] == 1:
            return ScoreFunction(LeaveOneOut())(context)
        assert context.count is not None
        old, centred = context.statistics, leave_one_out(context.cost)
        mean, product, square = old["moments"].unbind(1)
        # On average another's values do badly beside one's own past, which tells nothing of them.
        scale = (product / (square - mean.square()).clamp(min=1e-12)).clamp(0.0, 1.0)
        shape = (-1, *(1,) * (centred.dim() - 1))
        new = torch.stack((change, centred * change, change.square()), -1).flatten(1, -2).mean(1)
        return SiteTerm(
            (centred - scale.reshape(shape) * (change - mean.reshape(shape))) * context.score,
            {"moments": update_mean(old["moments"], new, context.count, self.decay)},
        )
