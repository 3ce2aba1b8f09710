"""The expected gradient of a training step, and its comparison with the exact gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from pyro.infer import RenyiELBO
from torch import Tensor

from pyro_bpq.errors import OptionError, StructureChangedError
from pyro_bpq.objectives.elbo import ExpectedCost
from pyro_bpq.objectives.iwae import TraceBackpropQ_IWAE
from pyro_bpq.rollout.runs import Program
from pyro_bpq.testing.choices import ChoiceNoise, iter_outcomes
from pyro_bpq.testing.exact import exact_gradient
from pyro_bpq.testing.parameters import GradientReader

Gradient = dict[int, Tensor]
# Number of outcomes that are run twice, to detect noise that is not enumerated.
_NUM_REPEATED = 8


class Moments(NamedTuple):
    """Mean and variance of a gradient over all draws of a step, by name of the parameter."""

    mean: dict[str, Tensor]
    variance: dict[str, Tensor]

    @property
    def total_variance(self) -> float:
        """Sum of the variances of all components."""
        return sum(float(variance.sum()) for variance in self.variance.values())


def take_step(elbo: Any, program: Program, reader: GradientReader, use_differentiable_loss: bool) -> Gradient:
    """Leaves the gradient of a step in ``.grad``, and returns a copy."""
    model, guide, args, kwargs = program
    reader.clear()
    if not use_differentiable_loss:
        elbo.loss_and_grads(model, guide, *args, **kwargs)
    elif getattr(loss := elbo.differentiable_loss(model, guide, *args, **kwargs), "requires_grad", False):
        loss.backward()
    return reader.read()


class RunningMoments:
    """Weighted mean and variance of gradients; a parameter without a gradient counts as zero."""

    def __init__(self, is_exact: bool) -> None:
        self.is_exact, self.weight, self.count = is_exact, 0.0, 0
        self.mean: dict[int, Any] = {}
        self._squares: dict[int, Any] = {}
        self._last: Gradient = {}
        self._pairs: list[float] = []

    def add(self, weight: float, gradient: Gradient) -> None:
        """Takes the gradient of one more step, or of an outcome with its probability."""
        before, self.weight, self.count = self.weight, self.weight + weight, self.count + 1
        for key in {**self.mean, **gradient}:
            old = self.mean.get(key, 0.0)
            change = gradient.get(key, 0.0) - old
            self.mean[key] = old + change * (weight / self.weight)
            self._squares[key] = self._squares.get(key, 0.0) + change.square() * (weight * before / self.weight)
        if not self.is_exact and self.count % 2 == 0:
            parts: list[Any] = [gradient.get(k, 0.0) - self._last.get(k, 0.0) for k in {**gradient, **self._last}]
            self._pairs.append(0.5 * sum(float(part.square().sum()) for part in parts))
        self._last = gradient

    @property
    def variance(self) -> Gradient:
        """Of a single step; an unbiased estimate if steps were sampled."""
        return {key: square / (self.weight - (not self.is_exact)) for key, square in self._squares.items()}

    @property
    def error(self) -> float:
        """Standard error of the total variance, from independent pairs of steps."""
        pairs = torch.tensor(self._pairs, dtype=torch.float64)
        if self.is_exact:
            return 0.0
        return float(pairs.std()) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.inf


def _state(elbo: Any) -> dict[str, Tensor]:
    """Copies the tensors of the ELBO's state; empty for an object that is not a module."""
    entries = elbo.state_dict() if isinstance(elbo, torch.nn.Module) else {}
    return {name: entry.clone() for name, entry in entries.items() if isinstance(entry, Tensor)}


def _check_state(elbo: Any, before: Mapping[str, Tensor]) -> None:
    for name, entry in _state(elbo).items():
        if name not in before or not torch.allclose(before[name], entry, rtol=0.0, atol=0.0, equal_nan=True):
            raise StructureChangedError(
                f"The step changed {name!r} in the state of the ELBO, so its outcomes are not comparable. "
                "Call elbo.eval() first."
            )


def expected_moments(
    elbo: Any,
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    parameters: Mapping[str, Tensor] | None = None,
    num_outcomes: int = 200_000,
    use_differentiable_loss: bool = False,
    noise: ChoiceNoise | None = None,
    **kwargs: Any,
) -> Moments:
    r"""Computes mean and variance of the gradient of one step, over all of its draws.

        mean = Σ_outcome P(outcome) · g(outcome),   variance = Σ_outcome P(outcome) · g(outcome)² - mean².

    An outcome is everything that the step draws: all particles jointly, and the subsets of subsampled plates. For each
    outcome the ELBO's own step runs once with its draws replaced; one step runs before, to build what is built lazily.
    Two particles of a program with n states have n² outcomes.

    The ELBO runs in the mode that the caller has set. Use ``elbo.eval()``, so that critics and running statistics are
    the same for every outcome.

    Args:
        elbo: An ELBO with ``loss_and_grads``.
        model: Model.
        guide: Guide whose latent sites have finite support; see :mod:`pyro_bpq.testing`.
        *args: Arguments of both.
        parameters: Leaves to read, by name. Default: as in :func:`exact_gradient`.
        num_outcomes: Limit on the number of outcomes.
        use_differentiable_loss: Whether to call ``differentiable_loss(...).backward()`` instead.
        noise: Source of the noise that an estimator itself draws.
        **kwargs: Keyword arguments of both; the names of the options above are taken.

    Returns:
        Moments of each component of the gradient of the loss (negative ELBO), detached, in the shapes of the
        parameters. The ``.grad`` fields and the global generator are as before.

    Raises:
        TooManyOutcomesError: If there are more than ``num_outcomes`` outcomes.
        UnsupportedSiteError: If a site has no finite support.
        UnsupportedProgramError: If the step draws outside of the sites and of ``noise``.
        StructureChangedError: If the step is not deterministic given its draws, or if it changes the ELBO.
    """
    found, program = RunningMoments(is_exact=True), Program(model, guide, args, kwargs)
    with torch.enable_grad(), GradientReader(model, guide, parameters) as reader:
        step = partial(take_step, elbo, program, reader, use_differentiable_loss)
        # The first step of an object may do more than later steps, e.g. trace the program's structure.
        next(iter_outcomes(step, num_outcomes=num_outcomes, noise=noise))
        before = _state(elbo)
        first: list[Gradient] = []
        for probability, gradient in iter_outcomes(step, num_outcomes=num_outcomes, noise=noise):
            if len(first) < _NUM_REPEATED:
                first.append(gradient)
            found.add(probability, gradient)
        for old, (_, new) in zip(first, iter_outcomes(step, num_outcomes=num_outcomes, noise=noise), strict=False):
            is_same = old.keys() == new.keys() and all(
                torch.allclose(g, new[key], rtol=1e-6, atol=1e-12, equal_nan=True) for key, g in old.items()
            )
            if not is_same:
                raise StructureChangedError(
                    "The step draws noise of its own: with the same values its gradient differs from one call to the "
                    "next. Hand over the noise as noise=ChoiceNoise(...), or compare sample_gradients(...) with "
                    "z_scores(...)."
                )
    _check_state(elbo, before)
    return Moments(reader.named(found.mean), reader.named(found.variance))


def expected_gradient(
    elbo: Any, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any
) -> dict[str, Tensor]:
    r"""Computes the expectation of the gradient of one step, without sampling.

        Σ_outcome P(outcome) · g(outcome);   see :func:`expected_moments` for the arguments.

    Returns:
        Expected gradient of the loss (negative ELBO) for each parameter, detached, in its shape.
    """
    return expected_moments(elbo, model, guide, *args, **kwargs).mean


def assert_unbiased(
    elbo: Any, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, atol: float = 1e-10, **kwargs: Any
) -> None:
    r"""Asserts that the expected gradient of a step equals the exact gradient, for every parameter.

        max |expected - exact| <= atol.

    Args:
        elbo: An ELBO with ``loss_and_grads``, frozen by ``elbo.eval()``; of an ``ExpectedCost`` only cost statements
            count.
        model: Model.
        guide: Guide whose latent sites have finite support; see :mod:`pyro_bpq.testing`.
        *args: Arguments of both.
        atol: Largest error of a component; the default is for float64.
        **kwargs: Keyword arguments of both, and the options of :func:`expected_moments`.

    Raises:
        AssertionError: If the gradients of a parameter differ, or if the exact gradient is zero, so that the
            comparison tests nothing.
        OptionError: If the ELBO is a bound of several samples, whose gradient is another one.
    """
    if isinstance(elbo, TraceBackpropQ_IWAE | RenyiELBO):
        number = elbo.num_inner if isinstance(elbo, TraceBackpropQ_IWAE) else elbo.num_particles
        if number > 1:
            raise OptionError(
                f"assert_unbiased compares with the gradient of the ELBO of one sample, and {type(elbo).__name__} has "
                f"a bound of {number} samples. Compare expected_gradient(...) with the gradient of that bound, or "
                "write num_particles=1."
            )
    of_step = ("use_differentiable_loss", "noise")
    only_costs = isinstance(elbo, ExpectedCost)
    of_both = {k: v for k, v in kwargs.items() if k not in of_step}
    exact = exact_gradient(model, guide, *args, only_costs=only_costs, **of_both)
    _largest(exact, atol)
    expected = expected_gradient(elbo, model, guide, *args, **kwargs)
    if report := _differences(exact, expected, atol):
        raise AssertionError("\n".join([f"{type(elbo).__name__} is biased (atol={atol}):", *report]))


def _largest(exact: Mapping[str, Tensor], zero: float = 0.0) -> float:
    """Largest component of a gradient, which must be above ``zero``."""
    scale = max((float(g.abs().max()) for g in exact.values() if g.numel()), default=0.0)
    if scale <= zero:
        raise AssertionError(
            f"The exact gradient is zero for all of {sorted(exact)}: this program tests nothing. Give its "
            "parameters asymmetric values."
        )
    return scale


def _differences(exact: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> list[str]:
    """Describes every parameter whose gradients differ by more than ``atol`` or are not finite."""
    pairs = {name: (truth, expected.get(name, torch.zeros_like(truth))) for name, truth in exact.items()}
    return [
        f"  parameter {name!r}: largest error {float((found - truth).abs().max()):.3g}\n"
        f"    exact    {truth.tolist()}\n    expected {found.tolist()}"
        for name, (truth, found) in pairs.items()
        if not bool(((found - truth).abs() <= atol).all())
    ]


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
    program = Program(model, guide, args, kwargs)
    with torch.enable_grad(), GradientReader(model, guide, parameters) as reader:
        gradients = [take_step(elbo, program, reader, use_differentiable_loss) for _ in range(num_samples)]
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
    scale = _largest(exact)
    return {name: _z_score(name, samples[name], exact[name], scale, max_relative_error) for name in exact}


def _z_score(name: str, samples: Tensor, exact: Tensor, scale: float, max_relative_error: float) -> Tensor:
    num_samples = len(samples)
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
