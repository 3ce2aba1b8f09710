"""What tests of estimators share: statistics of independent gradients, the estimators by name, a planted fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from enumerable import enumerable_noise
from models import Case
from steps import bias, scramble, settled
from torch import Tensor

import pyro_bpq.estimators as package
from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import Estimator
from pyro_bpq.estimators.base import SiteContext, SiteTerm
from pyro_bpq.testing import ChoiceNoise, expected_moments


def worst_z(exact: Tensor, samples: Tensor) -> float:
    """Largest error in standard errors; refuses a test in which 2 % of the gradient would not be seen."""
    error = samples.std(0) / math.sqrt(len(samples))
    assert float(error.max()) < 0.02 / 5 * float(exact.abs().max()), "too weak a test"
    return float(((samples.mean(0) - exact).abs() / error).max())


def total_variance(samples: Tensor) -> tuple[float, float]:
    """Total variance of independent gradients ``(samples, ...)``, and its standard error."""
    square = (samples - samples.mean(0)).square().flatten(1).sum(1)
    return float(square.mean()), float(square.std() / math.sqrt(len(square)))


def error_of_draws(elbo: Any, *programs: Any, **options: Any) -> float:
    """The largest error of the expected gradient over all values of sites and all that estimators draw."""
    noise = ChoiceNoise()
    with enumerable_noise(noise):
        return bias(elbo, *programs, noise=noise, **options)


def moments_of_draws(elbo: Any, *programs: Any) -> Any:
    """Mean and variance of the gradient over all of these."""
    noise = ChoiceNoise()
    with enumerable_noise(noise):
        return expected_moments(elbo, *programs, noise=noise)


def public() -> dict[str, type[Estimator]]:
    """The estimators that the package exports, by name."""
    found = {name: getattr(package, name) for name in package.__all__}
    return {n: kind for n, kind in found.items() if hasattr(kind, "is_unbiased") and kind is not Estimator}


def faulty(estimator: Any, call: Callable[[Callable[[SiteContext], SiteTerm], SiteContext], SiteTerm]) -> Any:
    """An estimator with a planted fault: what ``call`` makes of its own call and of the context."""

    def __call__(self: Any, context: SiteContext) -> SiteTerm:
        return call(lambda given: type(estimator).__call__(self, given), context)

    return dataclass(frozen=True)(type("Faulty", (type(estimator),), {"__call__": __call__}))()


def wrong_sign(estimator: Any) -> Any:
    """An estimator whose gradient has the wrong sign."""
    return faulty(estimator, lambda own, context: SiteTerm(-own(context).surrogate))


def scrambled(case: Case, steps: int = 5, **options: Any) -> TraceBackpropQ_ELBO:
    """A frozen ELBO whose critics are far from right; the parameters are in the store."""
    elbo = settled(case, steps, **options)
    scramble(elbo.critics.weights().values())
    return elbo.eval()


def with_change(own: Callable[..., Any], at: int, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function with a planted fault: one of its arguments is changed."""
    return lambda *given: own(*given[:at], change(given[at]), *given[at:][1:])
