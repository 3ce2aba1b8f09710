"""What estimators require of a site. Each requirement is used as the method ``unsupported`` of estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyro_bpq.estimators.base import SiteInfo

# Distributions of values without a largest one, and continuous ones whose drawn values can be reparameterised.
_INFINITE = ("Poisson", "Geometric", "NegativeBinomial", "ZeroInflated", "Binomial", "BetaBinomial")
_MOVABLE = ("Normal", "LogNormal", "Laplace", "Gumbel", "Gamma", "Beta")
# Largest number of values of a component for which a message recommends AllAction.
_MAX_SUPPORT = 64


def alternative(site: SiteInfo) -> str:
    """An estimator that serves the site, as Python source text."""
    if site.has_rsample:
        return "Pathwise()"
    is_small = site.components is not None and site.components.cardinality <= _MAX_SUPPORT
    return "AllAction()" if is_small else "ScoreFunction()"


def is_continuous(site: SiteInfo) -> bool:
    """Whether the values are neither finite nor counts."""
    # has_rsample cannot be read: it may be hidden when the site is planned, because the value is detached.
    return site.components is None and not site.distribution.startswith(_INFINITE)


def _without_values(site: SiteInfo) -> str:
    """Estimators that serve a site without finite components, or one of several."""
    if not is_continuous(site):
        return alternative(site)
    names = "LAXQ() or ScoreFunction()" if site.distribution in _MOVABLE else "ScoreFunction()"
    return f"{names}, which take costs without a gradient" + (", or Pathwise()" if site.has_rsample else "")


def requirement(needed: str, other: Callable[[SiteInfo], str] = alternative) -> Callable[[Any], Any]:
    """Makes of a condition on a site a method ``unsupported`` that refuses the sites for which it does not hold.

    Args:
        needed: What the site has to have, in words; ``{}`` stands for the name of its distribution, a second one for
            its number of components.
        other: Gives the estimators that serve where the condition does not hold.
    """

    def decorate(holds: Callable[[SiteInfo], bool]) -> Any:
        def unsupported(owner: object, site: SiteInfo) -> str | None:
            """Used as the method ``unsupported`` of estimators.

            Args:
                owner: The estimator.
                site: The facts about the site.

            Returns:
                Why the estimator cannot serve the site, and what to use; ``None`` if it can.
            """
            number = site.components.size if site.components else "none"
            lacks = f"{type(owner).__name__}() needs {needed.format(site.distribution, number)}"
            return None if holds(site) else f"{lacks}; use {other(site)}"

        unsupported.__name__, unsupported.__doc__ = holds.__name__, f"{holds.__doc__} {unsupported.__doc__}"
        return unsupported

    return decorate


@requirement("components of finite support, which {} lacks", _without_values)
def needs_finite(site: SiteInfo) -> bool:
    """Refuses sites without finite components."""
    return site.components is not None


@requirement("a continuous distribution, not a {}")
def needs_continuous(site: SiteInfo) -> bool:
    """Refuses sites without a continuous distribution."""
    return is_continuous(site)


@requirement("binary components, which {} lacks")
def needs_binary(site: SiteInfo) -> bool:
    """Refuses sites without binary components."""
    return site.components is not None and site.components.cardinality == 2


@requirement("a Bernoulli or OneHotCategorical, not a {}")
def needs_float_value(site: SiteInfo) -> bool:
    """Refuses sites whose value cannot move continuously."""
    return site.components is not None and site.components.kind in ("bernoulli", "one_hot")


@requirement("a Poisson, Binomial, NegativeBinomial or Geometric, not a {}")
def needs_counts(site: SiteInfo) -> bool:
    """Refuses sites without counts."""
    return site.counts is not None


@requirement("a single finite component, and this {} has {}", _without_values)
def needs_single(site: SiteInfo) -> bool:
    """Refuses sites without a single finite component."""
    return site.components is not None and site.components.size == 1


def needs_particles(owner: object, site: SiteInfo) -> str | None:
    """Asks for two particles.

    Args:
        owner: The estimator.
        site: The facts about the site.

    Returns:
        Why the estimator cannot serve the site, and what to use; ``None`` if it can.
    """
    if site.num_particles > 1:
        return None
    return f"{type(owner).__name__}() needs at least two particles: write TraceBackpropQ_ELBO(num_particles=2, ...)"
