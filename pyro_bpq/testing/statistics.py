"""Statistical tests of unbiasedness, for programs too large to enumerate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.testing.expected import backward
from pyro_bpq.testing.parameters import GradientReader


def sample_gradients(
    elbo: Any,
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int,
    parameters: Mapping[str, Tensor] | None = None,
    use_differentiable_loss: bool = False,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """Runs a step many times without updating anything and stacks its gradients.

    Args:
        elbo: An ELBO with ``loss_and_grads``, in the mode that the caller has set.
        model: Model.
        guide: Guide.
        *args: Arguments of both.
        num_samples: Number of steps.
        parameters: Leaves to read, by name. Default: as in :func:`exact_gradient`.
        use_differentiable_loss: Whether to call ``differentiable_loss(...).backward()`` instead.
        **kwargs: Keyword arguments of both.

    Returns:
        Gradients of the loss, shape ``(num_samples, *parameter.shape)``; zero if a step did not
        reach a parameter. The ``.grad`` fields are restored.
    """
    gradients: list[dict[int, Tensor]] = []
    with torch.enable_grad(), GradientReader(model, guide, parameters) as reader:
        for _ in range(num_samples):
            reader.clear()
            backward(elbo, model, guide, args, kwargs, use_differentiable_loss)
            gradients.append(reader.read())
    zeros = {key: torch.zeros_like(g) for gradient in gradients for key, g in gradient.items()}
    stacked = {key: torch.stack([g.get(key, zero) for g in gradients]) for key, zero in zeros.items()}
    return reader.named(stacked, lead=(num_samples,))


def z_scores(
    samples: Mapping[str, Tensor], exact: Mapping[str, Tensor], *, max_relative_error: float = 0.05
) -> dict[str, Tensor]:
    r"""Measures the error of a mean gradient in standard errors.

        z = (mean - exact) / SE,   SE = standard deviation / √N.

    An unbiased estimator has ``|z| < 5`` almost surely. A power gate rejects a test that could not
    fail: ``SE`` of every component must be below ``max_relative_error`` times the gradient's scale. The scale is the
    largest component of the exact gradient over all parameters.

    Args:
        samples: Gradients by parameter, shape ``(N, *shape)``, independent along the first dimension.
        exact: Exact gradients of the tested parameters, shape ``shape``.
        max_relative_error: Limit of the power gate.

    Returns:
        z-score of each component, shape ``shape``; zero, or infinite, where all samples are equal.

    Raises:
        AssertionError: If the power gate is not passed, or a sample is not finite.
    """
    scale = max((float(g.abs().max()) for g in exact.values() if g.numel()), default=0.0)
    if scale == 0.0:
        raise AssertionError(f"The exact gradient is zero for all of {sorted(exact)}: nothing is tested.")
    return {name: _z_score(name, samples[name], exact[name], scale, max_relative_error) for name in exact}


def _z_score(name: str, samples: Tensor, exact: Tensor, scale: float, max_relative_error: float) -> Tensor:
    num_samples = samples.shape[0]
    if num_samples < 2 or not bool(samples.isfinite().all()):
        raise AssertionError(f"Parameter {name!r}: needs two or more samples, all finite.")
    error = samples.mean(0) - exact
    standard_error = samples.std(0) / math.sqrt(num_samples)
    relative = float(standard_error.max()) / scale if standard_error.numel() else 0.0
    if relative > max_relative_error:
        needed = math.ceil(num_samples * (relative / max_relative_error) ** 2)
        raise AssertionError(
            f"Parameter {name!r}: the standard error is {relative:.1%} of the gradient's scale, above "
            f"{max_relative_error:.1%}: too weak a test. Use about {needed} samples instead of {num_samples}."
        )
    rounding = 1e3 * torch.finfo(exact.dtype).eps * scale
    is_constant = standard_error <= rounding
    fixed = torch.where(error.abs() <= rounding, 0.0, error.sign() * math.inf).to(error.dtype)
    return torch.where(is_constant, fixed, error / standard_error.where(~is_constant, torch.ones_like(error)))
