"""Returns bootstrapped from critics: biased, for comparison and for graphs too long for unbiased estimators."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators.all_action import AllAction
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteTerm, Statistics, share
from pyro_bpq.estimators.score_function import LeaveOneOut, ScoreFunction


@dataclass(frozen=True)
class LambdaReturn(Estimator):
    r"""**Biased**: the lambda-return of the critics in place of the cost-to-go.

        g_X = (γ I_X(x) + G_X - b - Q-terms of AllAction) ∇ log q(x) + all-action term
        G_X = γ (roots + avg_Y [ E_Y[Q_Y] + λ (G_Y - q_Y(y)) ])

    ``I_X`` are the immediate costs that are known, ``b`` is a baseline, and ``λ`` is ``lam``. ``roots`` are the costs
    that ``Q_X`` predicts directly. ``Y`` runs over the sites whose critics it backs up from, and ``avg`` averages over
    those that predict the same costs.

    Critics replace the costs that lie far ahead, so their errors bias the gradient. With ``lam=1`` there is no bias:
    ``G_X`` is then the cost-to-go minus the graph-wise control variates. ``γ`` is the ELBO's ``gamma``, with which the
    critics learn; below 1 it is a bias of its own. Finite sites apply :class:`AllAction` to ``G_X``. Other sites apply
    the score function with leave-one-out or a running baseline.

    Args:
        lam: Weight of the return against the critics, in ``[0, 1]``. The critics learn with a lambda of their own.

    References:
        | Backprop-Q (Xu et al., 2018), Sec. 4.1 and Appendix, Cases for λ-return Updates
        | High-dimensional continuous control using generalized advantage estimation (Schulman et al., 2016)
    """

    lam: float = share(0.9)

    uses_critic: ClassVar[bool] = True
    replaces_costs: ClassVar[bool] = True
    return_weight = property(attrgetter("lam"))

    def statistics(self) -> Statistics:
        """Running statistics of :class:`AllAction` and of a running baseline."""
        return {**AllAction().statistics(), **LeaveOneOut().statistics()}

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Applies :class:`AllAction` or the score function to the lambda-return in ``context.cost``."""
        if context.log_probs is not None:
            return AllAction()(context)
        return ScoreFunction(LeaveOneOut())(context)


@dataclass(frozen=True)
class ParentAdvantage(Estimator):
    r"""**Biased**: the advantage over what the parents' critics predicted, in place of the cost-to-go.

        g_Y = A_Y ∇ log q(y)
        A_Y = Q_Y(y) + λ (G_Y - Q_Y(y)) - avg_X [ Q_X(x) - Σ_S E[Q_S] ]

    ``X`` runs over the sites whose critics predict ``Q_Y`` next, and ``S`` over the siblings of ``Y``: the other costs
    and sites that ``Q_X`` predicts. ``G_Y`` is the lambda-return. With ``lam=0`` the critic of ``Y`` replaces its
    costs. The errors of the critics of ``Y`` and of later sites bias the gradient; those of the parents' critics do
    not. With ``lam=1`` there is no bias. A site without parents that have critics has no baseline.
    :class:`LambdaReturn` takes its baseline from the site's own critic, other particles or earlier steps.

    Args:
        lam: Weight of the return against the site's critic, in ``[0, 1]``. Critics learn with a lambda of their own.

    Raises:
        OptionError: If ``lam`` is out of range.

    References:
        | Backprop-Q (Xu et al., 2018), Appendix, Cases for Advantage Functions
        | High-dimensional continuous control using generalized advantage estimation (Schulman et al., 2016)
    """

    lam: float = share(0.9)

    uses_critic: ClassVar[bool] = True
    takes_discount: ClassVar[bool] = False
    needs = frozenset({"advantage"})

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The advantage times ``log q``."""
        advantage = context.signals.get("advantage")
        if advantage is None:
            sites = ", ".join(map(repr, context.names))
            raise UnsupportedSiteError(
                f"Sites {sites}: no site has a critic, so there are no advantages. Write critic=MLPCritic(), or use "
                "ScoreFunction()."
            )
        return SiteTerm(advantage * context.score)
