"""Generalised reparameterisation (G-REP): standardises the value, corrects for the noise's dependence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributions as td

from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.estimators.requirements import needs_continuous
from pyro_bpq.estimators.substitution import event_sum
from pyro_bpq.rollout.features import base_distribution


@dataclass(frozen=True)
class GeneralisedReparameterisation(Estimator):
    r"""Reparameterisation by a transform whose noise is only weakly dependent on the parameters. Unbiased.

        z = T(ε; θ),   g = ∂C/∂z ∂T(ε; θ)/∂θ + (C - b) ∇_θ log q_ε(ε; θ)
        log q_ε(ε; θ) = log q(T(ε; θ); θ) + log |∂T/∂ε|

    ``T`` standardises ``log z`` of a Gamma and ``logit z`` of a Beta by mean and standard deviation. For a LogNormal
    the correction vanishes. ``b`` is the mean over the other particles or a running mean. The costs must be
    differentiable in the value. If the distribution has ``rsample``, :class:`Pathwise` is better. Register
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
    raise UnsupportedSiteError(
        f"GeneralisedReparameterisation() knows no transform of a {type(fn).__name__}; use Pathwise() or "
        "ScoreFunction(), or register one with pyro_bpq.estimators.generalised.standardised."
    )


@standardised.register(td.Gamma)
def _gamma(fn: td.Gamma, value: Tensor) -> tuple[Tensor, Tensor]:
    mean = fn.concentration.digamma() - fn.rate.log()
    scale = torch.polygamma(1, fn.concentration).sqrt()
    noise = ((value.log() - mean) / scale).detach()
    moved = mean + scale * noise
    return moved.exp(), moved + scale.log()


@standardised.register(td.Beta)
def _beta(fn: td.Beta, value: Tensor) -> tuple[Tensor, Tensor]:
    a, b = fn.concentration1, fn.concentration0
    mean = a.digamma() - b.digamma()
    scale = (torch.polygamma(1, a) + torch.polygamma(1, b)).sqrt()
    noise = ((torch.logit(value) - mean) / scale).detach()
    moved = mean + scale * noise
    log_slope = torch.nn.functional.logsigmoid(moved) + torch.nn.functional.logsigmoid(-moved) + scale.log()
    return moved.sigmoid(), log_slope


@standardised.register(td.LogNormal)
def _log_normal(fn: td.LogNormal, value: Tensor) -> tuple[Tensor, Tensor]:
    noise = ((value.log() - fn.loc) / fn.scale).detach()
    moved = fn.loc + fn.scale * noise
    return moved.exp(), moved + fn.scale.log()
