"""Generalised reparameterisation: a transform whose noise depends on the parameters a little."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor
from torch import distributions as td

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import Estimator, base_distribution, event_sum, needs_continuous


@dataclass(frozen=True)
class GeneralisedReparameterisation(Estimator):
    r"""Reparameterisation by a transform whose noise is only weakly dependent on the parameters. Unbiased.

        z = T(ε; θ),   g = ∂C/∂z ∂T(ε; θ)/∂θ + (C - b) ∇_θ log q_ε(ε; θ)
        log q_ε(ε; θ) = log q(T(ε; θ); θ) + log |∂T/∂ε|

    ``T`` standardises ``log z`` of a Gamma and ``logit z`` of a Beta by mean and standard deviation. For a LogNormal
    the correction vanishes. ``b`` is the mean over the other particles or a running mean. The costs must be
    differentiable in the value. If the distribution has ``rsample``, ``Pathwise`` is better. Register
    :func:`standardised` for a distribution of your own.

    References:
        | The generalized reparameterization gradient (Ruiz et al., 2016)
    """

    is_unbiased: ClassVar[bool] = True
    is_pathwise: ClassVar[bool] = True
    attaches: ClassVar[bool] = True
    corrects: ClassVar[bool] = True

    # A missing transform raises at the first draw.
    unsupported = needs_continuous

    def attach(self, fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        """The value, with the gradient of the transform."""
        return standardised(base_distribution(fn), value.detach())[0]

    def correction(self, fn: Any, value: Tensor) -> Tensor:
        """``log q_ε`` of the noise, with its gradient, of the batch shape."""
        base = base_distribution(fn)
        moved, log_slope = standardised(base, value.detach())
        return event_sum(base.log_prob(moved) + log_slope, len(fn.batch_shape))


@singledispatch
def standardised(fn: Any, value: Tensor) -> tuple[Tensor, Tensor]:
    r"""The value ``T(ε; θ)`` with its gradient at fixed noise, and ``log |∂T/∂ε|``; of a univariate distribution."""
    raise NotImplementedError(f"There is no transform of a {type(fn).__name__}: register one, or use ScoreFunction().")


@standardised.register(td.Gamma)
def _gamma(fn: td.Gamma, value: Tensor) -> tuple[Tensor, Tensor]:
    mean = fn.concentration.digamma() - fn.rate.log()
    scale = torch.polygamma(1, fn.concentration).sqrt()
    moved = _moved(value.log(), mean, scale)
    return moved.exp(), moved + scale.log()


@standardised.register(td.Beta)
def _beta(fn: td.Beta, value: Tensor) -> tuple[Tensor, Tensor]:
    a, b = fn.concentration1, fn.concentration0
    scale = (torch.polygamma(1, a) + torch.polygamma(1, b)).sqrt()
    moved = _moved(torch.logit(value), a.digamma() - b.digamma(), scale)
    log_slope = torch.nn.functional.logsigmoid(moved) + torch.nn.functional.logsigmoid(-moved) + scale.log()
    return moved.sigmoid(), log_slope


@standardised.register(td.LogNormal)
def _log_normal(fn: td.LogNormal, value: Tensor) -> tuple[Tensor, Tensor]:
    moved = _moved(value.log(), fn.loc, fn.scale)
    return moved.exp(), moved + fn.scale.log()


def _moved(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """A value of a location-scale family with fixed noise."""
    return loc + scale * ((value - loc) / scale).detach()


def model() -> None:
    rate = pyro.sample("rate", dist.Gamma(1.5, 1.0))
    pyro.sample("x", dist.Normal(rate, 0.7), obs=torch.tensor(1.4))


def guide() -> None:
    shape = pyro.param("shape", torch.tensor(0.8), dist.constraints.positive)
    scale = pyro.param("scale", torch.tensor(1.3), dist.constraints.positive)
    pyro.sample("rate", dist.Gamma(shape, scale), infer={"bpq": {"estimator": GeneralisedReparameterisation()}})


if __name__ == "__main__":
    svi = SVI(model, guide, Adam({"lr": 0.05}), TraceBackpropQ_ELBO(1))
    print("mean loss of 200 steps:", sum(svi.step() for _ in range(200)) / 200)
