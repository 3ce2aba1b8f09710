r"""Q-Prop: first- and second-order terms of a critic as control variate, without finite support."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyro_bpq.estimators.base import SiteContext, SiteInfo, SiteTerm
from pyro_bpq.estimators.requirements import alternative
from pyro_bpq.estimators.scales import Adaptive, ScaledTerms


@dataclass(frozen=True)
class QProp(Adaptive):
    r"""Score function with a critic that is quadratic in the value, so that its expectation is known.

        g_X = R_X ∇ log q(x) + a_2 ∇E_q[Q_X]
        R_X = C_X - a_1 V - a_2 (Q_X(x) - V) - a_3 Σ_Y A_Y - b
        Q_X(x) = V + Σ_i g_i e_i + ½ h_i (e_i² - 1),   e_i = (x_i - μ_i) / σ_i

    ``Q_X`` is held fixed as a function of ``x``: ``∇E_q[Q_X] = Σ_i g_i ∇μ_i / σ_i + ½ h_i ∇σ_i² / σ_i²``. This is exact
    for every distribution with finite mean and variance. ``A_Y`` are the graph-wise control variates of later sites.
    ``b`` is the mean of the other terms of ``R_X`` over the other particles or, with one particle, over earlier steps.
    The scales ``a`` minimise the second moment of the gradient with respect to ``μ / σ`` and ``log σ`` of a normal
    distribution. They come from running moments of earlier steps and lie in ``[0, max_scale]``. Without a critic
    (``critic=False``) the baseline and the later sites' corrections remain.

    Args:
        adaptive: Whether the scales adapt; otherwise they are 1.
        decay: Weight of the past in the running moments.
        max_scale: Upper end of the scales.
        trace: ``A_Y`` is weighted by ``trace ** distance``; the distance is the number of steps from X to Y.

    References:
        | Q-Prop: Sample-efficient policy gradient with an off-policy critic (Gu et al., 2017)
        | Backprop-Q (Xu et al., 2018), Eq. 27
    """

    adaptive: bool = True
    decay: float = 0.995
    max_scale: float = 1.2
    trace: float = 1.0

    def unsupported(self, site: SiteInfo) -> str | None:
        """Serves sites without finite components."""
        if site.components is None:
            return None
        other = alternative(site)
        return f"QProp() is for values without finite support, and {site.distribution} has one; use {other}"

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The residual times ``log q``, plus the critic's expectation."""
        with torch.no_grad():
            terms = _terms(context)
            scales = self.scales(context)
            residual = terms.residual(scales)
            statistics = terms.updated(context, scales, self)
        surrogate = residual * context.score
        if context.moments is not None and context.learned is not None:
            expected = (context.learned * context.moments.expected).sum((-1, -2))
            surrogate = surrogate + terms.scale(scales, 2) * expected
        return SiteTerm(surrogate, statistics)


def _terms(context: SiteContext) -> ScaledTerms:
    if context.moments is None or context.learned is None or context.own is None:
        # Without a critic there is no score of the moments: the scales weigh the residual alone.
        return ScaledTerms.of(context, torch.ones_like(context.cost)[..., None, None], context.level, None, None, None)
    # The table's second entry is h/2, and d/dlogσ of ½ h σ² / s² is h.
    critic = context.learned * torch.arange(1, 3, device=context.learned.device)
    return ScaledTerms.of(context, context.moments.powers, context.level, context.own, critic, None)
