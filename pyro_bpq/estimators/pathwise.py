r"""The pathwise (reparameterisation) estimator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pyro_bpq.estimators.base import Estimator, SiteInfo
from pyro_bpq.estimators.requirements import alternative


@dataclass(frozen=True)
class Pathwise(Estimator):
    r"""Reparameterisation: the gradient flows through the value ``z(ε; θ)`` itself.

        g_X = ∂C/∂z ∂z/∂θ

    It needs no surrogate term: the differentiable costs carry it.

    References:
        | Auto-encoding variational Bayes (Kingma and Welling, 2014)
        | Backprop-Q (Xu et al., 2018), Eq. 22
    """

    is_unbiased: ClassVar[bool] = True
    is_pathwise: ClassVar[bool] = True

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs a reparameterised distribution."""
        if site.has_rsample:
            return None
        return f"Pathwise() needs a distribution with rsample, which {site.distribution} lacks; use {alternative(site)}"
