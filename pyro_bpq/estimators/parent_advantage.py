r"""The parents' critics as baseline: the paper's advantage functions, at sites of any kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pyro_bpq.errors import OptionError, UnsupportedSiteError
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteTerm


@dataclass(frozen=True)
class ParentAdvantage(Estimator):
    r"""**Biased**: the advantage over what the parents' critics predicted, in place of the cost-to-go.

        g_Y = A_Y ∇ log q(y)
        A_Y = Q_Y(y) + λ (G_Y - Q_Y(y)) - avg_X [ Q_X(x) - Σ_S E[Q_S] ]

    ``X`` runs over the sites whose critics predict ``Q_Y`` next, and ``S`` over the other costs and sites, the siblings
    of ``Y``, that ``Q_X`` predicts besides. ``G_Y`` is the lambda-return. With ``lam=0`` the critic of ``Y`` replaces
    its costs. In a chain with ``lam`` above 0, ``A_Y`` is the lambda-error of the parent. The errors of the critics of
    ``Y`` and of later sites bias the gradient; those of the parents' critics do not. With ``lam=1`` there is no bias:
    the return minus the parents' prediction. A site without parents that have critics has no baseline.

    :class:`LambdaReturn` has the same first term, and takes its baseline from the site's own critic
    (:class:`AllAction`), from the other particles or from earlier steps.

    Args:
        lam: Weight of the return against the site's critic, in ``[0, 1]``. Critics learn with a lambda of their own.

    Raises:
        OptionError: If ``lam`` is out of range.

    References:
        | Backprop-Q (Xu et al., 2018), Appendix, Cases for Advantage Functions
        | High-dimensional continuous control using generalized advantage estimation (Schulman et al., 2016)
    """

    lam: float = 0.9

    is_unbiased: ClassVar[bool] = False
    uses_critic: ClassVar[bool] = True
    takes_discount: ClassVar[bool] = False
    needs = frozenset({"advantage"})

    def __post_init__(self) -> None:
        if not 0.0 <= self.lam <= 1.0:
            raise OptionError(f"ParentAdvantage(lam={self.lam!r}): write a number in [0, 1].")

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
