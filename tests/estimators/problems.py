"""What tests of estimators share: statistics of independent gradients, the estimators by name, a planted fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from enumerable import enumerable_noise
from models import Case, real
from steps import bias, scramble, settled
from torch import Tensor

import pyro_bpq.estimators as package
from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import Estimator
from pyro_bpq.estimators.base import SiteContext, SiteTerm
from pyro_bpq.testing import ChoiceNoise, expected_moments

WEIGHT = real(0.7, -0.4, 1.1, 0.3, -0.9, 0.5).reshape(2, 3)


def table(name: str, *shape: int, scale: float = 1.1) -> Tensor:
    """A parameter of irregular numbers."""
    numbers = torch.sin(1.3 * torch.arange(math.prod(shape)) + 2.3 * len(name)).double()
    return pyro.param(name, scale * numbers.reshape(shape))


def two_rows(law: Callable[[Tensor], Any], mean: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    """Model and guide: three values in each of two rows, of a law given numbers; data see what is made of them."""

    def run(is_model: bool) -> None:
        with pyro.plate("rows", 2):
            numbers = real(0.6) if is_model else pyro.param("q", real(0.3, 0.5, 0.8))
            z = pyro.sample("z", law(numbers.expand(2, 3)).to_event(1))
            if is_model:
                pyro.sample("x", dist.Normal(mean(z), 0.6).to_event(1), obs=real(0.4, -0.3).expand(2, 2))

    return (lambda: run(True)), (lambda: run(False))


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
