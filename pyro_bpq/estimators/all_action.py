r"""Score functions with learned and exact control variates and adaptive scales, for finite sites and for others."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from pyro_bpq.errors import option, positive
from pyro_bpq.estimators.base import SiteContext, SiteInfo, SiteTerm, past
from pyro_bpq.estimators.requirements import alternative, needs_finite
from pyro_bpq.estimators.scales import CRITIC, EXACT, Adaptive, ScaledTerms


@dataclass(frozen=True)
class AllAction(Adaptive):
    r"""Sums over all values of a finite site; a correction keeps it unbiased for any critic.

        g_X = Σ_d Σ_k ∇q_d(k) (a_0 I_X[d,k] + a_2 A_X[d,k]) + R_X ∇ log q(x)
        R_X = C_X - a_0 I_X(x) - a_1 E[Q_X] - a_2 (Q_X(x) - E[Q_X]) - a_3 Σ_Y A_Y - b

    ``I_X`` are the immediate costs that are known exactly at every value of every component. ``Q_X`` is the critic of
    the remaining costs, with table ``A_X`` and residual ``Q_X(x) - E[Q_X]`` (see also :mod:`pyro_bpq.critics.nets`).
    ``A_Y`` are the graph-wise control variates of later sites. ``b`` is the mean of the other terms of ``R_X`` over the
    other particles; with one particle, over the other rows, if there are ten or more and they stay apart, else over
    earlier steps. The scales ``a`` minimise the second moment of the gradient with respect to the logits. They come
    from running moments of earlier steps and lie in ``[0, max_scale]``.
    With a useless critic the estimator becomes leave-one-out, or the score function with a running baseline. Exact
    costs have a scale too, because the remaining costs alone may vary more than all costs together. As long as the
    critics of later sites do worse there than exact costs alone, ``A_Y`` is that of the exact costs, with a scale
    ``a_4`` in place of ``a_3``.

    Args:
        exact: Whether one extra run of the model evaluates its immediate costs at every value: ``"auto"`` if
            that pays, ``True`` always, ``False`` never.
        adaptive: Whether the scales adapt; otherwise they are 1.
        decay: Weight of the past in running moments; it is raised if a step has few samples.
        max_scale: Upper end of the scales.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Backprop-Q (Xu et al., 2018), Eq. 27
        | Local expectation gradients for black box variational inference (Titsias and Lázaro-Gredilla, 2015)
    """

    exact: bool | str = option("auto", lambda exact: exact in (True, False, "auto"), 'True, False or "auto"')
    adaptive: bool = True
    decay: float = past(0.98)
    max_scale: float = positive(1.2)

    needs = frozenset({"table"})
    by_component = True
    exact_costs = property(attrgetter("exact"))
    unsupported = needs_finite

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Weights every log-probability by its coefficient in the gradient."""
        log_probs, _ = context.table
        with torch.no_grad():
            probs, score = context.score_table
            terms = _terms(context, probs, score)
            scales = self.scales(context)
            weights = terms.residual(scales)[..., None, None] * (score + probs)
            for i, table in ((EXACT, context.exact), (CRITIC, context.learned)):
                if table is not None:
                    weights = weights + terms.scale(scales, i)[..., None, None] * probs * table
            statistics = terms.updated(context, scales, self)
        return SiteTerm(weights * log_probs, statistics)


def _terms(context: SiteContext, probs: Tensor, score: Tensor) -> ScaledTerms:
    """Gradient and control variates in logit space."""
    level, own, critic, exact = context.level, None, None, context.exact
    if context.learned is not None:
        mean = (probs * context.learned).sum(-1, keepdim=True)
        critic = probs * (context.learned - mean)
        level = mean.sum((-1, -2)) if level is None else level + mean.sum((-1, -2))
        own = (score * context.learned).sum((-1, -2))
    if exact is not None:
        exact = probs * (exact - (probs * exact).sum(-1, keepdim=True))
    return ScaledTerms.of(context, score, level, own, critic, exact)


@dataclass(frozen=True)
class QProp(Adaptive):
    r"""Score function with a critic that is quadratic in the value, so that its expectation is known.

        g_X = R_X ∇ log q(x) + a_2 ∇E_q[Q_X]
        R_X = C_X - a_1 V - a_2 (Q_X(x) - V) - a_3 Σ_Y A_Y - b
        Q_X(x) = V + Σ_i g_i e_i + ½ h_i (e_i² - 1),   e_i = (x_i - μ_i) / σ_i

    ``Q_X`` is held fixed as a function of ``x``: ``∇E_q[Q_X] = Σ_i g_i ∇μ_i / σ_i + ½ h_i ∇σ_i² / σ_i²``. This is exact
    for every distribution with finite mean and variance. ``A_Y`` are the graph-wise control variates of later sites.
    ``b`` is the mean of the other terms of ``R_X`` over the other particles; with one particle, over the other rows, if
    there are ten or more and they stay apart, else over earlier steps.
    The scales ``a`` minimise the second moment of the gradient with respect to ``μ / σ`` and ``log σ`` of a normal
    distribution. They come from running moments of earlier steps and lie in ``[0, max_scale]``. Without a critic
    (``critic=False``) the baseline and the later sites' corrections remain.

    Args:
        adaptive: Whether the scales adapt; otherwise they are 1.
        decay: Weight of the past in the running moments.
        max_scale: Upper end of the scales.

    References:
        | Q-Prop: Sample-efficient policy gradient with an off-policy critic (Gu et al., 2017)
        | Backprop-Q (Xu et al., 2018), Eq. 27
    """

    adaptive: bool = True
    decay: float = past(0.995)
    max_scale: float = positive(1.2)

    def unsupported(self, site: SiteInfo) -> str | None:
        """Serves sites without finite components."""
        if site.components is None:
            return None
        other = alternative(site)
        return f"QProp() is for values without finite support, and {site.distribution} has one; use {other}"

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The residual times ``log q``, plus the critic's expectation."""
        with torch.no_grad():
            terms = _moment_terms(context)
            scales = self.scales(context)
            residual = terms.residual(scales)
            statistics = terms.updated(context, scales, self)
        surrogate = residual * context.score
        if context.moments is not None and context.learned is not None:
            expected = (context.learned * context.moments.expected).sum((-1, -2))
            surrogate = surrogate + terms.scale(scales, CRITIC) * expected
        return SiteTerm(surrogate, statistics)


def _moment_terms(context: SiteContext) -> ScaledTerms:
    if context.moments is None or context.learned is None or context.own is None:
        # Without a critic there is no score of the moments: the scales weigh the residual alone.
        return ScaledTerms.of(context, torch.ones_like(context.cost)[..., None, None], context.level, None, None, None)
    # The table's second entry is h/2, and d/dlogσ of ½ h σ² / s² is h.
    critic = context.learned * torch.arange(1, 3, device=context.learned.device)
    return ScaledTerms.of(context, context.moments.powers, context.level, context.own, critic, None)
