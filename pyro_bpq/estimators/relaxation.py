r"""Relaxed draws ``z`` of finite components given the sample ``b``, for REBAR and RELAX.

``b`` is the index of the largest ``z_k = log π_k - log E_k``, with exponential ``E``. For a binary component it is the
sign of ``z = α + logit(u)``. The pair ``(z, b)`` has the same law as when ``z`` is drawn first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from pyro_bpq.errors import OptionError, check_option
from pyro_bpq.estimators.base import SiteContext, SiteProgram, site_mean
from pyro_bpq.estimators.noise import uniform


@dataclass(frozen=True)
class Annealed:
    """A temperature that falls with the number of steps: ``max(end, start · decay^n)``.

    Args:
        start: Temperature of the first step.
        end: Lowest temperature.
        decay: Factor per step, in ``(0, 1)``.

    Raises:
        OptionError: If an option is out of range.
    """

    start: float = 1.0
    end: float = 0.1
    decay: float = 0.999

    def __post_init__(self) -> None:
        if not (0.0 < self.end <= self.start and 0.0 < self.decay < 1.0):
            raise OptionError(f"{self!r}: write 0 < end <= start and a decay in (0, 1).")


@dataclass(frozen=True)
class LearnedTemperature:
    r"""A temperature that follows the slope of the gradient's second moment.

        log τ ← log τ - lr (m(τ') - m(τ)) / (m(τ') + m(τ)) / δ,   m = running E|g|²,  τ' = (1 + δ) τ

    The noise is the same at both temperatures. It takes two more runs of guide and model.

    Args:
        start: Temperature of the first step.
        lr: Step size.
        delta: Relative difference ``δ`` of the two temperatures.
        decay: Weight of the past in the running moments.

    Raises:
        OptionError: If an option is out of range.

    References:
        | REBAR (Tucker et al., 2017); with a difference quotient in place of the derivative
    """

    start: float = 0.5
    lr: float = 0.02
    delta: float = 0.1
    decay: float = 0.9

    def __post_init__(self) -> None:
        if not (self.start > 0.0 and self.lr >= 0.0 and self.delta > 0.0 and 0.0 <= self.decay < 1.0):
            raise OptionError(f"{self!r}: write start > 0, lr >= 0, delta > 0 and a decay in [0, 1).")

    def updated(self, context: SiteContext, gradient: Tensor, moved: Tensor) -> dict[str, Tensor]:
        """New running statistics, from the gradients at both temperatures."""
        new = torch.stack([site_mean(part.square()) for part in (gradient, moved)], 1)
        moments = context.running_mean("moments", new, self.decay)
        tiny = torch.finfo(new.dtype).tiny
        slope = (moments[:, 1] - moments[:, 0]) / moments.sum(1).clamp(min=tiny) / self.delta
        log = context.statistics["log_temperature"] - self.lr * slope.clamp(-1.0, 1.0)
        return {"moments": moments, "log_temperature": log.clamp(-3.0, 3.0)}


def check_temperature(owner: Any) -> None:
    """Raises an OptionError if the field ``temperature`` is neither a positive number nor :class:`Annealed`."""
    given = owner.temperature
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    is_valid = isinstance(given, Annealed) or (is_number and given > 0.0)
    check_option(owner, "temperature", is_valid, "a positive number or Annealed()")


def temperature_of(temperature: float | Annealed | LearnedTemperature, context: SiteContext) -> Tensor:
    """The temperature of each site, ``(G, 1, ...)`` with one dimension more than the cost."""
    if isinstance(temperature, LearnedTemperature):
        each = temperature.start * context.statistics["log_temperature"].exp()
    elif isinstance(temperature, Annealed):
        assert context.count is not None
        each = (temperature.start * temperature.decay**context.count).clamp(min=temperature.end)
    else:
        each = context.cost.new_full((len(context.names),), float(temperature))
    return context.per_site(each).unsqueeze(-1)


def parameters(log_probs: Tensor) -> Tensor:
    """Parameters of the relaxed draws: logits ``(..., D)`` of binary components, else log-probabilities."""
    return log_probs[..., 1] - log_probs[..., 0] if log_probs.shape[-1] == 2 else log_probs


def score(params: Tensor, index: Tensor) -> Tensor:
    """Derivative of ``log q`` of the sample with respect to the parameters."""
    if params.dim() == index.dim():
        return index.to(params.dtype) - params.sigmoid()
    return one_hot(index, params.shape[-1]).to(params.dtype)


def natural(gradient: Tensor, params: Tensor, index: Tensor) -> Tensor:
    """Converts a gradient with respect to the parameters to one with respect to free logits."""
    if params.dim() == index.dim():
        return gradient
    return gradient - params.detach().exp() * gradient.sum(-1, keepdim=True)


def relax(z: Tensor, temperature: Tensor, index: Tensor) -> Tensor:
    """Weights ``(..., D, K)`` of the values from relaxed draws; they are positive and sum to one."""
    if z.dim() == index.dim():
        weight = (z / temperature).sigmoid()
        return torch.stack((1.0 - weight, weight), -1)
    return (z / temperature.unsqueeze(-1)).softmax(-1)


def to_value(weights: Tensor, program: SiteProgram) -> Tensor:
    """Relaxed value of the site: the mean of its values under weights ``(..., D, K)``."""
    lead, terms = weights.shape[:-1], []
    for k in range(weights.shape[-1]):
        index = torch.full(lead, k, dtype=torch.long, device=weights.device)
        value = program.from_index(index).to(weights.dtype)
        terms.append(weights[..., k].unsqueeze(-1) * value.reshape(*lead, -1))
    return sum(terms[1:], terms[0]).reshape(value.shape)


def independent_value(params: Tensor, index: Tensor, program: SiteProgram) -> Tensor:
    """A value drawn anew, independent of the sample."""
    noise = _noise(params, index, program.generator)
    if params.dim() == index.dim():
        return program.from_index((params.detach() + noise > 0).long())
    return program.from_index((params.detach() - noise).argmax(-1))


def draw_pair(params: Tensor, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws ``z`` and ``z̃`` independently given the sample, with their derivatives to the parameters.

    ``z`` has the derivative of the unconditional draw, with fixed noise and free sample; ``z̃`` has that of the
    conditional draw, with fixed noise and fixed sample.
    """
    z = _given(params.detach(), index, _noise(params, index, generator))
    # Both families are location families: with the noise fixed, z shifts by the change of the parameters.
    return z + (params - params.detach()), _given(params, index, _noise(params, index, generator))


def fill(tensor: Tensor, like: Tensor) -> Tensor:
    """Adds trailing dimensions, up to those of ``like``."""
    return tensor.reshape(*tensor.shape, *(1,) * (like.dim() - tensor.dim()))


def _noise(params: Tensor, index: Tensor, generator: torch.Generator) -> Tensor:
    """Logistic noise of binary components, else logarithms of exponential noise."""
    u = uniform(params.detach(), generator)
    return u.log() - (-u).log1p() if params.dim() == index.dim() else u.log().neg().log()


def _given(params: Tensor, index: Tensor, noise: Tensor) -> Tensor:
    """The relaxed draw given the sample, from noise that does not depend on it."""
    if params.dim() == index.dim():
        above = softplus(noise + softplus(params))
        return torch.where(index == 1, above, -softplus(noise + softplus(-params)))
    top = noise.gather(-1, index.unsqueeze(-1))
    below = -torch.logaddexp(noise - params, top.expand_as(noise))
    return torch.where(one_hot(index, params.shape[-1]).bool(), -top.expand_as(noise), below)
