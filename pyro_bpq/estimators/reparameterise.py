"""Pathwise gradients, and the value of a site as a function of the parameters of its distribution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributions as td

from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators.base import Estimator, SiteInfo
from pyro_bpq.estimators.requirements import alternative
from pyro_bpq.rollout.features import base_distribution


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


def parameter_names(fn: Any) -> tuple[str, ...]:
    """Names of the parameters from which a univariate distribution can be rebuilt."""
    base = base_distribution(fn)
    kind = type(base)
    names = tuple(name for name in kind.arg_constraints if name not in ("logits", "probs"))
    if base.event_shape or not names or kind.__name__ == "TransformedDistribution":
        raise UnsupportedSiteError(
            f"LAX() needs a univariate distribution of torch, in a plate or .to_event(), not a {kind.__name__}; "
            "use Pathwise() or ScoreFunction() at this site."
        )
    return names


@singledispatch
def reparameterise(fn: Any, value: Tensor) -> Tensor:
    r"""A drawn value of a univariate distribution, with the gradient of the distribution's parameters.

        dx/dθ = -∂F(x; θ)/∂θ / p(x; θ),   F the distribution function

    Register a function for a distribution of your own with ``reparameterise.register``.

    References:
        | Implicit reparameterization gradients (Figurnov et al., 2018)
    """
    value = value.detach()
    try:
        cumulative = fn.cdf(value)
    except NotImplementedError as error:
        raise UnsupportedSiteError(
            f"{type(fn).__name__} has no cdf to reparameterise by; use Pathwise() or ScoreFunction() at this site, or "
            "register a function with pyro_bpq.estimators.reparameterise.reparameterise."
        ) from error
    density = fn.log_prob(value).exp().detach()
    return value - (cumulative - cumulative.detach()) / density


@reparameterise.register(td.Gamma)
def _gamma(fn: td.Gamma, value: Tensor) -> Tensor:
    standard = (value * fn.rate).detach()
    slope = torch._standard_gamma_grad(fn.concentration.detach(), standard)
    return (standard + slope * (fn.concentration - fn.concentration.detach())) / fn.rate


@reparameterise.register(td.Beta)
def _beta(fn: td.Beta, value: Tensor) -> Tensor:
    value, a, b = value.detach(), fn.concentration1, fn.concentration0
    total = (a + b).detach()
    rise = torch._dirichlet_grad(value, a.detach(), total)
    fall = torch._dirichlet_grad(1.0 - value, b.detach(), total)
    # A Beta is a Dirichlet of two components: raising one concentration moves mass away from the other.
    return value + (1.0 - value) * rise * (a - a.detach()) - value * fall * (b - b.detach())
