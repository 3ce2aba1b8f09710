"""Noise that estimators draw themselves."""

from __future__ import annotations

import torch
from torch import Tensor


def uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform noise in the open interval (0, 1).

    Args:
        like: A tensor of the shape, dtype and device of the noise.
        generator: Where it is drawn from.

    Returns:
        Noise like ``like``, detached.
    """
    noise = torch.rand(like.shape, generator=generator, dtype=torch.float64, device="cpu")
    tiny = torch.finfo(like.dtype).eps
    return noise.clamp(tiny, 1.0 - tiny).to(like.device, like.dtype)


def signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random signs, 1 or -1 with equal chances, of the shape, dtype and device of ``like``."""
    # Uniform noise is what recorded steps know how to draw.
    noise = torch.rand(like.shape, generator=generator, dtype=torch.float64, device="cpu")
    return (2.0 * (noise < 0.5) - 1.0).to(like.device, like.dtype)


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


def gumbel_given(log_probs: Tensor, index: Tensor, generator: torch.Generator) -> Tensor:
    r"""Perturbed log-probabilities ``log p_k + G_k`` given that entry ``index`` is the largest.

    The largest entry is a standard Gumbel variable ``T``, independent of its position. The others are Gumbel variables
    at ``log p_k`` truncated at ``T``: ``-log(e^{-T} + E_k / p_k)`` with exponential ``E_k``.

    References:
        A* sampling (Maddison et al., 2014)
    """
    top = exponential(log_probs[..., :1], generator)
    # In logarithms, since p_k may underflow: e^{-T} = top.
    others = -torch.logaddexp(top.log().expand_as(log_probs), exponential(log_probs, generator).log() - log_probs)
    is_top = torch.arange(log_probs.shape[-1], device=index.device) == index.unsqueeze(-1)
    return torch.where(is_top, -top.log(), others)
