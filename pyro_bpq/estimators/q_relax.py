r"""RELAX with the learned Q as the cost and as the control variate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from pyro_bpq.estimators.base import SiteContext, SiteTerm
from pyro_bpq.estimators.q_estimators import local_cost
from pyro_bpq.estimators.relax import RELAXQ


@dataclass(frozen=True)
class QRELAX(RELAXQ):
    r"""The learned Q as local cost, by RELAX with the same Q as control variate. Biased by the errors of the critic.

        g = (Q(b) - a c(z̃) - b₀) ∇log q(b) + a ∇c(z) - a ∇c(z̃),   c(z) = V + Σ_d Σ_k softmax(z/τ)[d,k] Q[d,k]

    :class:`RELAXQ` with the critic's value in place of the cost-to-go. In expectation it is the gradient of
    ``E_q[Q(b)]``, whatever the temperature: with an exact critic there is no bias, where the plain relaxation
    :class:`QRelaxation` has one. The sum over all values, :class:`QAllAction`, has the same expectation and no noise
    of its own.

    Args:
        temperature: A number or :class:`Annealed`.
        scale: The scale ``a``: a number or :class:`OptimalScale`.
        decay: Weight of the past in the running means.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Backprop-Q (Xu et al., 2018), Appendix, Gradient Estimators with Q-functions
        | Backpropagation through the void (Grathwohl et al., 2018), Eq. 8
    """

    is_unbiased: ClassVar[bool] = False
    replaces_costs: ClassVar[bool] = True

    def __call__(self, context: SiteContext) -> SiteTerm:
        """RELAX of the critic's value."""
        with torch.no_grad():
            cost = local_cost(context)
        return super().__call__(replace(context, cost=cost))
