r"""Leave-one-out whose other particles are evaluated with this particle's own past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pyro_bpq.estimators.base import (
    Estimator,
    SiteContext,
    SiteInfo,
    SiteTerm,
    Statistics,
    check_decay,
    unit_scale,
    update_mean,
)
from pyro_bpq.estimators.baselines import LeaveOneOut, leave_one_out
from pyro_bpq.estimators.score_function import ScoreFunction


@dataclass(frozen=True)
class CrossedLeaveOneOut(Estimator):
    r"""Score function whose baseline is the cost of other particles' values given this particle's past.

        g_X = (C_i - C̄_i - a (Δ_i - d)) ∇ log q(x_i),    a = Cov(C_i - C̄_i, Δ_i) / Var(Δ_i) in [0, 1],  d = E[Δ_i]

    ``C_i`` is the cost-to-go of particle ``i``, and ``C̄_i`` is the mean cost-to-go of the other particles. ``Δ_i``, in
    nats, is the change of that mean when everything that does not depend on ``X`` is set to its state in particle
    ``i``. ``Δ_i`` needs no further run for log-probabilities at sites of finite support whose law reads only the past,
    such as ``log q(x_j | past_i)``, or whose value lies in the past, such as ``log p(past_i | x_j)``. In a layered
    model it shows how well a layer explains the layer below it in the same particle; plain leave-one-out compares with
    particles that have another layer below. ``a`` and ``d`` come from earlier steps, over plate rows. If nothing is
    sampled before a site, the estimator is plain leave-one-out. Unbiased. All factors but the score are detached.

    Use it for layers of many units. With few units leave-one-out can have less variance, because its terms cancel
    where two particles have the same value.

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
        # Other particles' values do worse on average with this particle's past: that mean change is no information.
        scale = unit_scale(product, square - mean.square())
        shape = (-1, *(1,) * (centred.dim() - 1))
        new = torch.stack((change, centred * change, change.square()), -1).flatten(1, -2).mean(1)
        return SiteTerm(
            (centred - scale.reshape(shape) * (change - mean.reshape(shape))) * context.score,
            {"moments": update_mean(old["moments"], new, context.count, self.decay)},
        )
