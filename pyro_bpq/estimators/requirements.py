"""Requirements that estimators place on a site, and the messages that state them."""

from __future__ import annotations

from pyro_bpq.estimators.base import SiteInfo

_INFINITE = ("Poisson", "Geometric", "NegativeBinomial", "ZeroInflated", "Binomial", "BetaBinomial")
# Continuous distributions whose drawn values can be reparameterised.
_MOVABLE = ("Normal", "LogNormal", "Laplace", "Gumbel", "Gamma", "Beta")
# Largest number of values of a component for which a message recommends AllAction.
_MAX_SUPPORT = 64


def alternative(site: SiteInfo) -> str:
    """An estimator that serves the site, as Python source text."""
    if site.has_rsample:
        return "Pathwise()"
    is_small = site.components is not None and site.components.cardinality <= _MAX_SUPPORT
    return "AllAction()" if is_small else "ScoreFunction()"


def is_infinite(site: SiteInfo) -> bool:
    """Whether the values are counts, without finite components."""
    return site.components is None and site.distribution.startswith(_INFINITE)


def needs_finite(name: str, site: SiteInfo) -> str | None:
    """Reason why a site without finite components cannot be served, or ``None`` if it has them."""
    if site.components is not None:
        return None
    return f"{name}() needs a finite support, which {site.distribution} lacks; use {_without_support(site)}"


def needs_reparameterised(name: str, site: SiteInfo) -> str | None:
    """Reason why a site without a continuous distribution cannot be served, or ``None`` if it has one."""
    # has_rsample cannot be read: it may be hidden when the site is planned, because the value is detached.
    if site.components is None and not is_infinite(site):
        return None
    return f"{name}() needs a continuous distribution, not a {site.distribution}; use {alternative(site)}"


def _without_support(site: SiteInfo) -> str:
    """What serves a site without finite components, as Python source text."""
    if is_infinite(site):
        return alternative(site)
    names = "LAXQ() or ScoreFunction()" if site.distribution in _MOVABLE else "ScoreFunction()"
    return f"{names}, which take costs without a gradient" + (", or Pathwise()" if site.has_rsample else "")


def needs_binary(name: str, site: SiteInfo) -> str | None:
    """Reason why a site without binary components cannot be served, or ``None`` if it has them."""
    if site.components is not None and site.components.cardinality == 2:
        return None
    return f"{name}() needs binary components, which {site.distribution} lacks; use {alternative(site)}"


def needs_float_value(name: str, site: SiteInfo) -> str | None:
    """Reason why a site whose value cannot move continuously is not served, or ``None`` if it can move."""
    if site.components is not None and site.components.kind in ("bernoulli", "one_hot"):
        return None
    return f"{name}() needs a Bernoulli or OneHotCategorical, not a {site.distribution}; use {alternative(site)}"


def needs_single(name: str, site: SiteInfo) -> str | None:
    """Reason why a site without a single finite component cannot be served, or ``None`` if it has one."""
    if site.components is None or site.components.size == 1:
        return needs_finite(name, site)
    return f"{name}() needs a single component, but the site has {site.components.size}; use {alternative(site)}"


def needs_particles(name: str, site: SiteInfo) -> str | None:
    """Message that two particles are needed, or ``None`` if there are two or more."""
    if site.num_particles > 1:
        return None
    return f"{name}() needs at least two particles: write TraceBackpropQ_ELBO(num_particles=2, ...)"
