r"""LAX with the learned Q of a continuous site as the control variate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_bpq.estimators.base import SiteContext, SiteInfo, SiteTerm
from pyro_bpq.estimators.optimal_scale import OptimalScale, Scale, read_scale
from pyro_bpq.estimators.q_estimators import local_cost
from pyro_bpq.estimators.requirements import needs_reparameterised
from pyro_bpq.estimators.scaled import Scaled
from pyro_bpq.estimators.variates import centre


@dataclass(frozen=True)
class LAXQ(Scaled):
    r"""Score function with the critic as control variate, whose own gradient is pathwise. Unbiased.

        g = (C - a Q(x) - b) ∇log q(x) + a ∂Q(x)/∂x ∇x(ε; θ)

    For continuous values that can be reparameterised; the costs need no gradient. The critic is fitted to the costs of
    all runs, where the network of :class:`LAX` is trained to lower the variance. It is a :class:`ValueCritic` unless
    another is chosen. ``b`` is the mean of ``C - a Q(x)`` over the other particles or, with one particle, over earlier
    steps. An :class:`OptimalScale` is that of the gradient with respect to ``μ / σ`` and ``log σ`` of a normal
    distribution.

    Args:
        scale: The scale ``a``: a number or :class:`OptimalScale`.
        decay: Weight of the past in the running means.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Backprop-Q (Xu et al., 2018), Eq. 27
        | Backpropagation through the void (Grathwohl et al., 2018), Eq. 5
    """

    scale: Scale = OptimalScale()
    decay: float = 0.98

    is_unbiased: ClassVar[bool] = True
    uses_critic: ClassVar[bool] = True
    needs = frozenset({"moved_value", "q_slope", "q_value"})

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs a continuous distribution that can be reparameterised."""
        return needs_reparameterised("LAXQ", site)

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The corrected cost-to-go times ``log q``, and the slope of the critic through the value."""
        with torch.no_grad():
            value, slope, a = local_cost(context), context.signals["q_slope"], read_scale(self.scale, context)
            centred, control = centre(context.cost, value, context)
            parts: tuple[Tensor, ...] = ()
            if isinstance(self.scale, OptimalScale) and context.moments is not None:
                powers, spread = context.moments.powers, context.moments.spread
                path = (slope * spread).unsqueeze(-1)
                path = torch.cat((path, path * powers[..., :1]), -1)
                plain, variate = (part[..., None, None] * powers for part in (centred, control))
                parts = plain, variate - path
            statistics = self.updated(context, value, *parts)
        path = (slope * context.signals["moved_value"]).sum(-1)
        return SiteTerm((centred - a * control) * context.score + a * path, statistics)
