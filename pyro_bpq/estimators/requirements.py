"""What estimators require of a site. Each function is used as the method ``unsupported`` of estimators."""

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


def is_continuous(site: SiteInfo) -> bool:
    """Whether the values are neither finite nor counts."""
    # has_rsample cannot be read: it may be hidden when the site is planned, because the value is detached.
    return site.components is None and not site.distribution.startswith(_INFINITE)


def needs_finite(owner: object, site: SiteInfo) -> str | None:
    """Refuses sites without finite components.

    Args:
        owner: The estimator.
        site: The facts about the site.

    Returns:
        Why the estimator cannot serve the site, and what to use; ``None`` if it can.
    """
    if site.components is not None:
        return None
    other = alternative(site)
    if is_continuous(site):
        names = "LAXQ() or ScoreFunction()" if site.distribution in _MOVABLE else "ScoreFunction()"
        other = f"{names}, which take costs without a gradient" + (", or Pathwise()" if site.has_rsample else "")
    return _refusal(owner, f"a finite support, which {site.distribution} lacks", other)


def needs_continuous(owner: object, site: SiteInfo) -> str | None:
    """Refuses sites without a continuous distribution.

    Args:
        owner: The estimator.
        site: The facts about the site.

    Returns:
        Why the estimator cannot serve the site, and what to use; ``None`` if it can.
    """
    if is_continuous(site):
        return None
    return _refusal(owner, f"a continuous distribution, not a {site.distribution}", alternative(site))


def needs_binary(owner: object, site: SiteInfo) -> str | None:
    """Refuses sites without binary components.

    Args:
        owner: The estimator.
        site: The facts about the site.

    Returns:
        Why the estimator cannot serve the site, and what to use; ``None`` if it can.
    """
    if site.components is not None and site.components.cardinality == 2:
        return None
    return _refusal(owner, f"binary components, which {site.distribution} lacks", alternative(site))


def needs_float_value(owner: object, site: SiteInfo, others: str = "") -> str | None:
    """Refuses sites whose value cannot move continuously.

    Args:
        owner: The estimator.
        site: The facts about the site.
        others: Further estimators to recommend, in words.

    Returns:
        Why the estimator cannot serve the site, and what to use; ``None`` if it can.
    """
    if site.components is not None and site.components.kind in ("bernoulli", "one_hot"):
        return None
    other = f"{others if site.components is not None else ''}{alternative(site)}"
    return _refusal(owner, f"a Bernoulli or OneHotCategorical, not a {site.distribution}", other)


def needs_counts(owner: object, site: SiteInfo) -> str | None:
    """Refuses sites without counts.

    Args:
        owner: The estimator.
        site: The facts about the site.

    Returns:
        Why the estimator cannot serve the site, and what to use; ``None`` if it can.
    """
    if site.counts is not None:
        return None
    laws = "a Poisson, Binomial, NegativeBinomial or Geometric"
    return _refusal(owner, f"{laws}, not a {site.distribution}", alternative(site))


def needs_single(owner: object, site: SiteInfo) -> str | None:
    """Refuses sites without a single finite component.

    Args:
        owner: The estimator.
        site: The facts about the site.

    Returns:
        Why the estimator cannot serve the site, and what to use; ``None`` if it can.
    """
    if site.components is None or site.components.size == 1:
        return needs_finite(owner, site)
    return _refusal(owner, f"a single component, but the site has {site.components.size}", alternative(site))


def _refusal(owner: object, needed: str, other: str) -> str:
    return f"{type(owner).__name__}() needs {needed}; use {other}"


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
