r"""Noise that estimators draw themselves, the relaxed draws that are made of it, and temperatures.

A relaxed draw ``z`` of a finite component is drawn given the sample ``b``, the index of the largest
``z_k = log π_k - log E_k``, with exponential ``E``. For a binary component ``b`` is the sign of ``z = α + logit(u)``.
The pair ``(z, b)`` has the same law as when ``z`` is drawn first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from pyro_bpq.errors import OptionError, is_real, option
from pyro_bpq.estimators.base import Estimator, SiteProgram
from pyro_bpq.rollout.runs import at

# A positive number, or a function from the number of steps taken to a positive number; a tensor in recorded steps.
Temperature = float | Tensor | Callable[[int], float]


def _even(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers in ``[0, 1)`` of the shape of ``like``, on the CPU; recorded steps know how to draw no other noise."""
    return torch.rand(like.shape, generator=generator, dtype=torch.float64, device="cpu")


def uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform noise in the open interval (0, 1).

    Args:
        like: A tensor of the shape, dtype and device of the noise.
        generator: Where it is drawn from.

    Returns:
        Noise like ``like``, detached.
    """
    tiny = torch.finfo(like.dtype).eps
    return _even(like, generator).clamp(tiny, 1.0 - tiny).to(like.device, like.dtype)


def signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random signs, 1 or -1 with equal chances, of the shape, dtype and device of ``like``."""
    return (2.0 * (_even(like, generator) < 0.5) - 1.0).to(like.device, like.dtype)


def exponential(like: Tensor, generator: torch.Generator) -> Tensor:
    """Exponential noise of rate one.

    Args:
        like: A tensor of the shape, dtype and device of the noise.
        generator: Where it is drawn from.

    Returns:
        Noise like ``like``, detached.
    """
    return -uniform(like, generator).log()


def gumbel(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard Gumbel noise.

    Args:
        like: A tensor of the shape, dtype and device of the noise.
        generator: Where it is drawn from.

    Returns:
        Noise like ``like``, detached.
    """
    return -exponential(like, generator).log()


def uniform_given(p: Tensor, value: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform noise ``u``, given that ``1[u < p]`` is a value.

    Args:
        p: Probabilities of ones.
        value: Zeros and ones, of the shape of ``p``.
        generator: Where the noise is drawn from.

    Returns:
        Noise of the shape of ``p``, with gradients through ``p``.
    """
    noise = uniform(p, generator)
    return torch.where(value == 1, p * noise, p + (1.0 - p) * noise)


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


def temperature_option(default: float) -> Any:
    """An option: a temperature."""
    advice = "a positive number or a function of the step"
    return option(default, lambda t: isinstance(t, Tensor) or callable(t) or (is_real(t) and t > 0.0), advice)


@dataclass(frozen=True)
class Tempered(Estimator):
    """Base of the estimators with a field ``temperature``."""

    temperature: Temperature = temperature_option(0.5)

    def at(self, step: int) -> Any:
        """The estimator with the temperature of a step."""
        return replace(self, temperature=temperature_at(self.temperature, step))

    @property
    def tau(self) -> float | Tensor:
        """The temperature, a number once a step is chosen."""
        return temperature_at(self.temperature, 0)


def parameters(log_probs: Tensor) -> Tensor:
    """Parameters of the relaxed draws: logits ``(..., D)`` of binary components, else log-probabilities."""
    return log_probs[..., 1] - log_probs[..., 0] if log_probs.shape[-1] == 2 else log_probs


def of_logits(slope: Tensor, params: Tensor, index: Tensor) -> Tensor:
    """The derivative to free logits ``(..., D, K)``, from the one to the parameters."""
    if params.dim() == index.dim():
        return torch.stack((-slope, slope), -1)
    return slope - params.exp() * slope.sum(-1, keepdim=True)


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


def draw_given(params: Tensor, index: Tensor, generator: torch.Generator) -> Tensor:
    """Draws ``z`` given the sample, with the derivative of the unconditional draw: fixed noise and free sample."""
    z = _given(params.detach(), index, _noise(params, index, generator))
    # Both families are location families: with the noise fixed, z shifts by the change of the parameters.
    return z + (params - params.detach())


def draw_pair(params: Tensor, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws ``z`` as :func:`draw_given`, and independently ``z̃``, with the derivative for fixed noise and sample."""
    z = draw_given(params, index, generator)
    return z, _given(params, index, _noise(params, index, generator))


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
