r"""Relaxed draws ``z`` of finite components given the sample ``b``, for REBAR and RELAX, and temperatures.

``b`` is the index of the largest ``z_k = log π_k - log E_k``, with exponential ``E``. For a binary component it is the
sign of ``z = α + logit(u)``. The pair ``(z, b)`` has the same law as when ``z`` is drawn first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from pyro_bpq.errors import OptionError, check_option, is_real
from pyro_bpq.estimators.base import Estimator, SiteProgram
from pyro_bpq.estimators.noise import uniform
from pyro_bpq.rollout.schedule import at

# A positive number, or a function from the number of steps taken to a positive number; a tensor in recorded steps.
Temperature = float | Tensor | Callable[[int], float]


def temperature_at(temperature: Temperature, step: int) -> float | Tensor:
    """The temperature at a step; a tensor while a step is recorded, if it is a function."""
    return at(functools.partial(_checked, temperature) if callable(temperature) else temperature, step)


def _checked(temperature: Callable[[int], float], step: int) -> float:
    value = float(temperature(step))
    if not value > 0.0:
        raise OptionError(f"The temperature at step {step} is {value!r}: it must be positive. Change the function.")
    return value


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

    def __call__(self, step: int) -> float:
        """The temperature after ``step`` steps."""
        return max(self.end, self.start * self.decay**step)


class Tempered(Estimator):
    """Base of the estimators with a field ``temperature``."""

    temperature: Temperature

    def __post_init__(self) -> None:
        given = self.temperature
        is_valid = isinstance(given, Tensor) or callable(given) or (is_real(given) and given > 0.0)
        check_option(self, "temperature", is_valid, "a positive number or a function of the step")
        super().__post_init__()

    def at(self, step: int) -> Any:
        """The estimator with the temperature of a step."""
        return replace(self, temperature=temperature_at(self.temperature, step))  # type: ignore[type-var]

    @property
    def tau(self) -> float | Tensor:
        """The temperature, a number once a step is chosen."""
        return temperature_at(self.temperature, 0)


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


def relax(z: Tensor, temperature: float | Tensor, index: Tensor) -> Tensor:
    """Weights ``(..., D, K)`` of the values from relaxed draws; they are positive and sum to one."""
    if z.dim() == index.dim():
        weight = (z / temperature).sigmoid()
        return torch.stack((1.0 - weight, weight), -1)
    return (z / temperature).softmax(-1)


def to_value(weights: Tensor, program: SiteProgram) -> Tensor:
    """Relaxed value of the site: the mean of its values under weights ``(..., D, K)``."""
    lead, terms = weights.shape[:-1], []
    for k in range(weights.shape[-1]):
        index = torch.full(lead, k, dtype=torch.long, device=weights.device)
        value = program.from_index(index).to(weights.dtype)
        terms.append(weights[..., k].unsqueeze(-1) * value.reshape(*lead, -1))
    return sum(terms[1:], terms[0]).reshape(value.shape)


def draw(params: Tensor, index: Tensor, generator: torch.Generator) -> Tensor:
    """Draws ``z`` anew, independent of the sample, with its derivative to the parameters."""
    noise = _noise(params, index, generator)
    return params + noise if params.dim() == index.dim() else params - noise


def independent_value(params: Tensor, index: Tensor, program: SiteProgram) -> Tensor:
    """A value drawn anew, independent of the sample."""
    z = draw(params.detach(), index, program.generator)
    return program.from_index((z > 0).long() if z.dim() == index.dim() else z.argmax(-1))


def draw_pair(params: Tensor, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws ``z`` and ``z̃`` independently given the sample, with their derivatives to the parameters.

    ``z`` has the derivative of the unconditional draw, with fixed noise and free sample; ``z̃`` has that of the
    conditional draw, with fixed noise and fixed sample.
    """
    z = _given(params.detach(), index, _noise(params, index, generator))
    # Both families are location families: with the noise fixed, z shifts by the change of the parameters.
    return z + (params - params.detach()), _given(params, index, _noise(params, index, generator))


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
