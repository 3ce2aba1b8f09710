"""The gradient of a training step: its mean and variance over all of its draws, or over samples."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import torch
from pyro.poutine.messenger import Messenger
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor

from pyro_bpq.errors import BPQError, OptionError, StructureChangedError
from pyro_bpq.record.watch import gradients_of, leaf_of
from pyro_bpq.rollout.runs import Program
from pyro_bpq.short import number, table
from pyro_bpq.testing.choices import ChoiceNoise, iter_outcomes

Gradient = dict[int, Tensor]
# Number of outcomes that are run twice, to detect noise that is not enumerated.
_NUM_REPEATED = 8


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
    def how(self) -> str:
        """What they come from, in words."""
        return f"all {self.num_samples} outcomes" if self.is_exact else f"{self.num_samples} sampled steps"

    @property
    def total_variance(self) -> float:
        """Sum of the variances of all components."""
        return sum(float(variance.sum()) for variance in self.variance.values())

    @property
    def signal_to_noise(self) -> float:
        r"""Squared norm of the mean, less its sampling noise, over the total variance; NaN if both are zero."""
        noise, signal = self.total_variance, sum(float(part.square().sum()) for part in self.mean.values())
        if not self.is_exact:
            signal = max(0.0, signal - noise / self.num_samples)
        return signal / noise if noise > 0 else math.inf if signal > 0 else math.nan

    def __str__(self) -> str:
        error = "" if self.is_exact else f" ± {number(self.total_variance_error)}"
        total = f"total variance {number(self.total_variance)}{error}, signal to noise {number(self.signal_to_noise)}"
        rows = [[n, number(float(self.mean[n].norm())), number(float(v.sum()))] for n, v in self.variance.items()]
        head = f"Gradient of one step, from {self.how}: {total}"
        return "\n".join([head, "", *table(["parameter", "|mean|", "variance"], rows)])


class GradientReader(Messenger):
    """Collects the leaves behind every ``pyro.param`` statement that runs under it, and reads their gradients.

    Names are those of the param store; parameters of an ``nn.Module`` model or guide that no statement
    reaches are called ``model.<name>`` and ``guide.<name>``. ``.grad`` of every parameter is cleared for use, and the
    old one is restored on exit. Gradients are stored by the identity of their leaf, because its name is certain only
    after the last run.
    """

    def __init__(
        self, model: Callable[..., Any] | None, guide: Callable[..., Any], parameters: Mapping[str, Tensor] | None
    ) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self._lent: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._is_fixed = parameters is not None
        self._programs = {"model": model, "guide": guide}
        for _, leaf in self._module_leaves():
            self._lend(leaf)
        for name, leaf in (parameters or {}).items():
            self._add(name, leaf)

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters known so far."""
        return [leaf for leaf, _ in self._lent.values()]

    def clear(self) -> None:
        """Clears the gradients of all parameters known so far."""
        for leaf in self.tensors:
            leaf.grad = None

    def read(self) -> dict[int, Tensor]:
        """Returns a copy of the existing gradients, by ``id`` of the leaf."""
        return {id(leaf): leaf.grad.detach().clone() for leaf in self.tensors if leaf.grad is not None}

    def gradient(self, value: Tensor) -> dict[str, Tensor]:
        """Returns the gradient of a scalar by name."""
        return self.named({id(leaf): gradient for leaf, gradient in gradients_of(value, self.tensors).items()})

    def named(self, values: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Returns ``values`` by name; zeros for a parameter without a value."""
        # When all runs are over, statements have reached what they reach.
        for name, leaf in self._module_leaves():
            self._add(name, leaf)
        own = {id(leaf): torch.zeros_like(leaf) for leaf in self.tensors} | dict(values)
        return {name: own[key] for key, name in self.names.items()}

    def _module_leaves(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, program in self._programs.items():
            if not self._is_fixed and isinstance(program, torch.nn.Module):
                yield from ((f"{prefix}.{name}", leaf) for name, leaf in program.named_parameters())

    def _lend(self, leaf: Tensor) -> None:
        # A parameter that is first met in the middle of a step must not contribute an older gradient.
        if leaf.requires_grad and id(leaf) not in self._lent:
            self._lent[id(leaf)] = leaf, leaf.grad
            leaf.grad = None

    def _add(self, name: str, leaf: Tensor) -> None:
        self._lend(leaf)
        if leaf.requires_grad:
            self.names.setdefault(id(leaf), name)

    def _pyro_post_param(self, msg: Any) -> None:
        if not self._is_fixed and msg["value"] is not None:
            self._add(msg["name"], leaf_of(msg["value"]))

    def __exit__(self, *args: Any) -> Any:
        for leaf, grad in self._lent.values():
            leaf.grad = grad
        return super().__exit__(*args)


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

    def named(self, reader: GradientReader) -> GradientMoments:
        """The moments by name of the parameter."""
        mean, variance = reader.named(self.mean), reader.named(self.variance)
        reached = frozenset(name for key, name in reader.names.items() if key in self.mean)
        return GradientMoments(mean, variance, self.count, self.is_exact, self.error, reached)


def take_step(elbo: Any, program: Program, reader: GradientReader, use_differentiable_loss: bool) -> Gradient:
    """Leaves the gradient of a step in ``.grad``, and returns a copy."""
    model, guide, args, kwargs = program
    reader.clear()
    if not use_differentiable_loss:
        elbo.loss_and_grads(model, guide, *args, **kwargs)
    elif getattr(loss := elbo.differentiable_loss(model, guide, *args, **kwargs), "requires_grad", False):
        loss.backward()
    return reader.read()


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


def _state(elbo: Any) -> dict[str, Tensor]:
    """Copies the tensors of the ELBO's state; empty for an object that is not a module."""
    entries = elbo.state_dict() if isinstance(elbo, torch.nn.Module) else {}
    return {name: entry.clone() for name, entry in entries.items() if isinstance(entry, Tensor)}


def _changed(old: Mapping[Any, Tensor], new: Mapping[Any, Tensor], rounding: float = 0.0) -> list[Any]:
    """Names of the tensors that are others than before, beyond rounding."""
    limits: Any = {"rtol": rounding, "atol": 1e-6 * rounding, "equal_nan": True}
    both = old.keys() & new.keys()
    return [key for key in {**old, **new} if not (key in both and torch.allclose(old[key], new[key], **limits))]


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
) -> GradientMoments:
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
    program = Program(model, guide, args, kwargs)
    with torch.enable_grad(), GradientReader(model, guide, parameters) as reader:
        step = partial(take_step, elbo, program, reader, use_differentiable_loss)
        return _over_outcomes(elbo, step, num_outcomes, noise).named(reader)


OWN_NOISE = (
    "The step draws noise of its own: with the same values its gradient differs from one call to the next. "
    "Hand over the noise as noise=ChoiceNoise(...), or compare sample_gradients(...) with z_scores(...)."
)


def _over_outcomes(
    elbo: Any, step: Callable[[], Gradient], num_outcomes: int, noise: ChoiceNoise | None = None
) -> RunningMoments:
    """Moments over all outcomes of a step; raises a BPQError if they cannot be listed."""
    outcomes = partial(iter_outcomes, step, num_outcomes=num_outcomes, noise=noise)
    # The first step of an object may do more than later steps, e.g. trace the program's structure.
    next(outcomes())
    found, before = RunningMoments(is_exact=True), _state(elbo)
    first = [gradient for _, gradient in itertools.islice(outcomes(), _NUM_REPEATED)]
    for probability, gradient in outcomes():
        if found.count < len(first) and _changed(first[found.count], gradient, 1e-6):
            raise StructureChangedError(OWN_NOISE)
        found.add(probability, gradient)
    if changed := _changed(before, _state(elbo)):
        raise StructureChangedError(
            f"The step changed {changed[0]!r} in the state of the ELBO, so its outcomes are not comparable. "
            "Call elbo.eval() first."
        )
    return found


def expected_gradient(
    elbo: Any, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any
) -> dict[str, Tensor]:
    r"""Computes the expectation of the gradient of one step, without sampling.

        Σ_outcome P(outcome) · g(outcome);   see :func:`expected_moments` for the arguments.

    Returns:
        Expected gradient of the loss (negative ELBO) for each parameter, detached, in its shape.
    """
    return expected_moments(elbo, model, guide, *args, **kwargs).mean


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
        with contextlib.suppress(BPQError):
            # A guide is quick, and leaves the ELBO alone if there are too many outcomes.
            own = int(num_outcomes ** (1.0 / getattr(elbo, "num_particles", 1)) + 1e-9)
            for _ in iter_outcomes(torch.no_grad()(partial(guide, *args, **kwargs)), num_outcomes=own):
                pass
            noises, found = getattr(elbo, "num_noises", 0), _over_outcomes(elbo, step, num_outcomes)
            if getattr(elbo, "num_noises", 0) == noises:  # else an estimator draws noise of its own
                return found.named(reader)
        found = RunningMoments(is_exact=False)
        for _ in range(num_samples):
            found.add(1.0, step())
        return found.named(reader)
