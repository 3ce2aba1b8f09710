r"""Mean and variance of the gradient of a step, at the present parameters."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import torch
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor

from pyro_bpq.errors import BPQError, OptionError
from pyro_bpq.rollout.runs import Program
from pyro_bpq.short import number, table
from pyro_bpq.testing import Moments, iter_outcomes
from pyro_bpq.testing.expected import Gradient, RunningMoments, take_step
from pyro_bpq.testing.parameters import GradientReader


@dataclass(frozen=True)
class GradientMoments:
    r"""Moments of the gradient of one step.

    Args:
        mean: Mean of the gradient of the loss by parameter, in nats per unit, in the parameter's shape, detached.
        variance: Variance of a single step's gradient, in the same form.
        num_samples: Number of steps that were run.
        is_exact: Whether these steps were all outcomes of a step, weighted by their probability.
        total_variance_error: Standard error of the total variance; 0 if exact.
        reached: Names of the parameters that the gradient of some step depends on; the others have none.
    """

    mean: dict[str, Tensor]
    variance: dict[str, Tensor]
    num_samples: int
    is_exact: bool
    total_variance_error: float = 0.0
    reached: frozenset[str] = frozenset()

    @property
    def total_variance(self) -> float:
        """Sum of the variances of all components."""
        return Moments(self.mean, self.variance).total_variance

    @property
    def signal_to_noise(self) -> float:
        r"""Squared norm of the mean, less its sampling noise, over the total variance; NaN if both are zero."""
        noise, signal = self.total_variance, sum(float(part.square().sum()) for part in self.mean.values())
        if not self.is_exact:
            signal = max(0.0, signal - noise / self.num_samples)
        return signal / noise if noise > 0 else math.inf if signal > 0 else math.nan

    def __str__(self) -> str:
        how = f"all {self.num_samples} outcomes" if self.is_exact else f"{self.num_samples} sampled steps"
        error = "" if self.is_exact else f" ± {number(self.total_variance_error)}"
        total = f"total variance {number(self.total_variance)}{error}, signal to noise {number(self.signal_to_noise)}"
        rows = [[n, number(float(self.mean[n].norm())), number(float(v.sum()))] for n, v in self.variance.items()]
        head = f"Gradient of one step, from {how}: {total}"
        return "\n".join([head, "", *table(["parameter", "|mean|", "variance"], rows)])


def gradient_moments(
    elbo: Any,
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 200,
    num_outcomes: int = 2000,
    seed: int = 0,
    **kwargs: Any,
) -> GradientMoments:
    r"""Mean and variance of the gradient of one step at the present parameters; nothing learns or moves.

        mean = E g,   variance = E g² - (E g)²

    The expectation is over everything that the step draws. If the step has few joint outcomes, it runs once for each
    of them, and the moments are exact. Otherwise it runs ``num_samples`` times.

    Args:
        elbo: An ELBO, of this package or of Pyro. If it leaves the number of particles open, one particle runs until
            its first training step has chosen the number.
        model: Model.
        guide: Guide.
        *args: Arguments of both.
        num_samples: Number of steps if outcomes are not enumerated.
        num_outcomes: Largest number of outcomes that are enumerated.
        seed: Seed of the samples; the global generators are restored.
        **kwargs: Keyword arguments of both; the names of the options above are taken.

    Returns:
        The moments, detached; ``print`` shows a table.

    Raises:
        OptionError: If there are fewer than two samples, or ``elbo`` is no ELBO.
    """
    if isinstance(elbo, type) or not callable(getattr(elbo, "loss_and_grads", None)):
        raise OptionError(
            f"gradient_moments({elbo!r}): write an ELBO such as TraceBackpropQ_ELBO(); an estimator is an option of it."
        )
    if num_samples < 2:
        raise OptionError(f"num_samples={num_samples!r}: a variance needs at least 2.")
    program = Program(model, guide, args, kwargs)
    with untouched(elbo, seed), torch.enable_grad(), GradientReader(model, guide, None) as reader:
        step = partial(take_own_step, elbo, program, reader)
        if (found := _enumerated(elbo, program, step, num_outcomes)) is None:
            found = RunningMoments(is_exact=False)
            for _ in range(num_samples):
                found.add(1.0, step())
    mean, variance = reader.named(found.mean), reader.named(found.variance)
    reached = frozenset(name for name, leaf in reader.leaves.items() if id(leaf) in found.mean)
    return GradientMoments(mean, variance, found.count, found.is_exact, found.error, reached)


@contextlib.contextmanager
def untouched(elbo: Any, seed: int) -> Iterator[None]:
    """Seeds the global generators and keeps an ELBO from learning; restores both on exit."""
    train, training = getattr(elbo, "train", lambda mode: None), getattr(elbo, "training", False)
    noises, state = getattr(elbo, "num_noises", None), get_rng_state()
    train(False)
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            pyro.set_rng_seed(seed)
            yield
    finally:
        set_rng_state(state)
        train(training)
        if noises is not None:
            elbo.num_noises = noises


def take_own_step(elbo: Any, program: Program, reader: GradientReader) -> Gradient:
    """Takes a step of any ELBO."""
    # ``loss_and_grads`` would put critics that the user's optimiser trains into Pyro's param store.
    return take_step(elbo, program, reader, isinstance(elbo, torch.nn.Module))


def _enumerated(elbo: Any, program: Program, step: Callable[[], Gradient], num_outcomes: int) -> RunningMoments | None:
    """Moments over all outcomes of a step; ``None`` if there are too many, or if they cannot be listed."""
    found, noises = RunningMoments(is_exact=True), getattr(elbo, "num_noises", 0)
    guide = torch.no_grad()(partial(program.guide, *program.args, **program.kwargs))
    try:
        # A guide is quick, and leaves the ELBO alone if there are too many.
        own = int(num_outcomes ** (1.0 / getattr(elbo, "num_particles", 1)) + 1e-9)
        for _ in iter_outcomes(guide, num_outcomes=own):
            pass
        for probability, gradient in iter_outcomes(step, num_outcomes=num_outcomes):
            if getattr(elbo, "num_noises", 0) != noises:
                return None  # an estimator draws noise of its own
            found.add(probability, gradient)
    except BPQError:
        return None
    return found
