r"""Straight-through estimators and other relaxed values. Biased."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_bpq.estimators import relaxation
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteTerm, event_sum
from pyro_bpq.estimators.noise import gumbel_given, uniform_given
from pyro_bpq.estimators.relaxation import Temperature, Tempered
from pyro_bpq.estimators.requirements import needs_float_value
from pyro_bpq.rollout.features import finite_components


class Attached(Estimator):
    """Base of the estimators whose value carries the gradient. Biased."""

    is_pathwise: ClassVar[bool] = True
    attaches: ClassVar[bool] = True

    unsupported = needs_float_value


@dataclass(frozen=True)
class StraightThrough(Attached):
    r"""The sampled value, with the gradient of its mean. Biased; a reference.

        z = b + p - stop(p)

    For Bernoulli and OneHotCategorical, also in ``to_event``, whose costs are differentiable in the value. The gradient
    through ``log q`` of a OneHotCategorical with respect to its value is zero, as torch computes it.

    References:
        | Estimating or propagating gradients through stochastic neurons for conditional computation
          (Bengio et al., 2013)
    """

    def attach(self, fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        """The value, with the gradient of the distribution's mean."""
        return _carrying(value, fn.mean)


@dataclass(frozen=True)
class GumbelStraightThrough(Tempered, Attached):
    r"""The sampled value, with the gradient of the relaxed value that belongs to it. Biased.

        z + s - stop(s),    s = softmax((log p + G) / τ),   G Gumbel noise given argmax(log p + G) = z

    The program sees the discrete value, and the noise is drawn given that value. A Bernoulli has ``s = σ((α + L)/τ)``
    with logistic noise ``L``. It serves the sites that :class:`StraightThrough` serves.

    Args:
        temperature: Temperature ``τ``, or a function of the number of steps taken.

    References:
        | Categorical reparameterization with Gumbel-softmax (Jang et al., 2017)
        | The Concrete distribution (Maddison et al., 2017)
    """

    temperature: Temperature = 1.0

    def attach(self, fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        """The value, with the gradient of the relaxed value."""
        logits, is_binary = _logits(fn, value)
        hard = value.detach()
        with torch.no_grad():
            if is_binary:
                # With u < p where the value is one, α + L = logit(p) + logit(1 - u) has the sign of the value.
                perturbed = logits - torch.logit(uniform_given(logits.sigmoid(), hard, generator))
            else:
                perturbed = gumbel_given(logits.log_softmax(-1), hard.argmax(-1), generator)
        shifted = perturbed + (logits - logits.detach())
        return _carrying(value, _probs(shifted / self.tau, is_binary))


@dataclass(frozen=True)
class ReinMax(Tempered, Attached):
    r"""The sampled value, with a gradient that is exact for quadratic costs of one component. Biased.

        z + s - stop(s),   s = 2 π_1 - ½ π_0,
        π_0 = softmax(θ),   π_1 = softmax(stop(log((z + softmax(θ/τ))/2) - θ) + θ)

    Straight-through of second order: a trapezoidal rule (Heun's) replaces Euler's rule. At ``τ = 1`` there is no bias
    for a single component with costs that are quadratic in its value. It serves the sites that
    :class:`StraightThrough` serves; a Bernoulli counts as a pair of values.

    Args:
        temperature: Temperature ``τ`` of at least one, as the paper advises, or a function of the steps taken.

    References:
        Bridging discrete and backpropagation: straight-through and beyond (Liu et al., 2023)
    """

    temperature: Temperature = 1.0

    def attach(self, fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        """The value, with the gradient of ``s``."""
        logits, is_binary = _logits(fn, value)
        with torch.no_grad():
            half = 0.5 * (value.detach() + _probs(logits / self.tau, is_binary))
        # A tensor whose derivative is that of a softmax where the softmax equals `half`.
        if is_binary:
            first = half * (1.0 - half) * logits
        else:
            first = half * (logits - (half * logits).sum(-1, keepdim=True))
        return _carrying(value, 2.0 * first - 0.5 * _probs(logits, is_binary))


@dataclass(frozen=True)
class Concrete(Tempered):
    r"""The slope of the cost at a relaxed value (Concrete, Gumbel-softmax). Biased.

        g_X = f'(s)·∇s,    s = softmax((log p + G) / τ),   G Gumbel noise

    ``f`` is the cost-to-go in nats. The program itself runs with the discrete value, so the loss and the gradients of
    all other parameters are exact. Only an extra run sees the relaxed value, with ``log q`` and ``-log p`` as torch
    computes them there: for a Bernoulli (``s = σ((α + L)/τ)``) linear in ``s``; for a OneHotCategorical those of the
    largest entry, without slope. It serves the sites that :class:`StraightThrough` serves. A program that turns the
    value into an integer yields no gradient. It needs one more run of guide and model, with a backward pass, for every
    site and particle.

    Args:
        temperature: Temperature ``τ``, or a function of the number of steps taken.

    References:
        | The Concrete distribution (Maddison et al., 2017)
        | Categorical reparameterization with Gumbel-softmax (Jang et al., 2017)
        | Backprop-Q (Xu et al., 2018), Eq. 23
    """

    temperature: Temperature = 0.5

    needs = frozenset({"program", "table"})
    takes_outdated: ClassVar[bool] = True
    unsupported = needs_float_value

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The slope at the relaxed value times that value."""
        program, (log_probs, index) = context.program, context.table
        z = relaxation.draw(relaxation.parameters(log_probs), index, program.generator)
        soft = relaxation.to_value(relaxation.relax(z, self.tau, index), program)
        _, slope = program.gradient(soft.detach())
        return SiteTerm(event_sum(slope * soft, context.cost.dim()))


def _carrying(value: Tensor, soft: Tensor) -> Tensor:
    """The value, with the gradient of ``soft``."""
    return value + (soft - soft.detach())


def _logits(fn: Any, value: Tensor) -> tuple[Tensor, bool]:
    """Logits in the shape of the value, and whether they are those of a Bernoulli."""
    split = finite_components(fn)
    assert split is not None
    return split.parameters(fn).expand(value.shape), split.kind == "bernoulli"


def _probs(logits: Tensor, is_binary: bool) -> Tensor:
    return logits.sigmoid() if is_binary else logits.softmax(-1)
