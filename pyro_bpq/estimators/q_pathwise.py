r"""The learned Q of a continuous site as its cost, through the sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm
from pyro_bpq.estimators.q_estimators import local_cost
from pyro_bpq.estimators.requirements import needs_reparameterised


@dataclass(frozen=True)
class QPathwise(Estimator):
    r"""The learned Q as local cost, by its slope at the sample. Biased by the errors of the critic's slope.

        g = ∂Q(x)/∂x ∇x(ε; θ)

    For continuous values that can be reparameterised. The costs need no gradient and may be unknown functions: the
    critic is fitted to their values. The value of the site is drawn without a gradient, and ``x(ε; θ)`` is formed
    from the drawn value. So a gradient of the costs is not used; if there is one, :class:`Pathwise` is unbiased.
    The critic is a :class:`ValueCritic` unless another is chosen. :class:`LAXQ` corrects the bias with the costs of the
    run.

    References:
        | Backprop-Q (Xu et al., 2018), Eq. 22 and Appendix, Gradient Estimators with Q-functions
        | Continuous control with deep reinforcement learning (Lillicrap et al., 2016)
    """

    is_unbiased: ClassVar[bool] = False
    uses_critic: ClassVar[bool] = True
    replaces_costs: ClassVar[bool] = True
    needs = frozenset({"moved_value", "q_slope", "q_value"})

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs a continuous distribution that can be reparameterised."""
        return needs_reparameterised("QPathwise", site)

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The slope of the critic times the value as a function of the parameters."""
        local_cost(context)
        return SiteTerm((context.signals["q_slope"] * context.signals["moved_value"]).sum(-1))
