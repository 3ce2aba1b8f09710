r"""Runs a step many times, or once per outcome, without learning, and keeps the moments of its results."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.poutine.subsample_messenger import _Subsample
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor

from pyro_bpq.errors import BPQError, OptionError
from pyro_bpq.rollout.features import finite_components
from pyro_bpq.rollout.runs import Program
from pyro_bpq.testing import TwoPoint, iter_outcomes

_NUM_BATCHES = 10
Step = Callable[[], Mapping[Any, Tensor]]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the global generators, including those of CUDA if in use, and restores them on exit."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    state = get_rng_state()
    with torch.random.fork_rng(devices=devices):
        pyro.set_rng_seed(seed)
        try:
            yield
        finally:
            set_rng_state(state)


@contextlib.contextmanager
def untouched(elbo: Any, seed: int) -> Iterator[None]:
    """Seeds the global generators and keeps an ELBO from learning; restores both on exit."""
    is_module = isinstance(elbo, torch.nn.Module)
    training, noises = getattr(elbo, "training", False), getattr(elbo, "num_noises", None)
    if is_module:
        elbo.eval()
    try:
        with seeded(seed):
            yield
    finally:
        if is_module:
            elbo.train(training)
        if noises is not None:
            elbo.num_noises = noises


def num_outcomes_of(program: Program, num_particles: int) -> float:
    """Estimates the number of joint outcomes of a step from one run of the guide; infinite if very large."""
    with torch.no_grad(), poutine.block():
        trace = poutine.trace(program.guide).get_trace(*program.args, **program.kwargs)
    sites = [site["fn"] for site in trace.nodes.values() if site["type"] == "sample" and not site["is_observed"]]
    log_count = num_particles * sum(map(_log_count, sites))
    return float(round(math.exp(log_count))) if log_count < 40.0 else math.inf


def _log_count(fn: Any) -> float:
    if isinstance(fn, _Subsample):
        size = fn.size if fn.subsample_size is None else fn.subsample_size
        return math.log(math.comb(fn.size, size))
    base = fn
    while not isinstance(base, (Delta, TwoPoint)) and hasattr(base, "base_dist"):
        base = base.base_dist
    if isinstance(base, Delta):
        return 0.0
    if isinstance(base, TwoPoint):
        return math.log(2) * (fn.batch_shape + fn.event_shape).numel()
    components = finite_components(fn)
    if components is None:
        return math.inf
    return math.log(components.cardinality) * components.size * fn.batch_shape.numel()


class Accumulated(NamedTuple):
    """Moments of named tensors over the runs of a step."""

    mean: dict[Any, Tensor]  # mean by key
    variance: dict[Any, Tensor]  # variance of a single run by key; an unbiased estimate if runs were sampled
    num_runs: int  # number of runs
    is_exact: bool  # whether the runs were all outcomes, weighted by their probability
    error: float  # standard error of the sum of the variances of all keys `(None, ...)`


class _Running:
    """Weighted first and second central moments; a missing key of a run counts as zero."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.mean: dict[Any, Tensor] = {}
        self.square: dict[Any, Tensor] = {}

    def add(
        self, weight: float, mean: Mapping[Any, Tensor], square: Mapping[Any, Tensor] = MappingProxyType({})
    ) -> None:
        """Adds runs of a total weight: a single run, or those of which the moments are given."""
        before, self.weight = self.weight, self.weight + weight
        if not self.weight:
            return
        for key in {**self.mean, **mean}:
            zero = torch.zeros_like(self.mean[key] if key in self.mean else mean[key])
            old = self.mean.get(key, zero)
            step = mean.get(key, zero) - old
            spread = step.square() * (weight * before / self.weight)
            self.mean[key] = old + step * (weight / self.weight)
            self.square[key] = self.square.get(key, zero) + square.get(key, zero) + spread


def accumulate(
    step: Step, elbo: Any, program: Program, *, num_samples: int, num_outcomes: int, exact: bool | str
) -> Accumulated:
    """Moments of a step's results: over all outcomes if at most ``num_outcomes``, else over samples."""
    if not isinstance(exact, bool) and exact != "auto":
        raise OptionError(f'exact={exact!r}: write True, False or "auto".')
    if num_samples < 2:
        raise OptionError(f"num_samples={num_samples!r}: a variance needs at least 2.")
    particles = getattr(elbo, "num_particles", 1)
    if exact is True or (exact == "auto" and num_outcomes_of(program, particles) <= num_outcomes):
        try:
            return _enumerate(step, num_outcomes, elbo)
        except BPQError:
            if exact is True:
                raise
    return _sample(step, num_samples)


def _enumerate(step: Step, num_outcomes: int, elbo: Any) -> Accumulated:
    noises = getattr(elbo, "num_noises", 0)
    next(iter_outcomes(step, num_outcomes=num_outcomes))  # builds lazily built objects
    if getattr(elbo, "num_noises", 0) != noises:
        raise OptionError("An estimator draws noise of its own, so that outcomes cannot be listed; write exact=False.")
    running, count = _Running(), 0
    for probability, values in iter_outcomes(step, num_outcomes=num_outcomes):
        running.add(probability, values)
        count += 1
    return Accumulated(running.mean, running.square, count, True, 0.0)


def _sample(step: Step, num_samples: int) -> Accumulated:
    batches = [_Running() for _ in range(min(_NUM_BATCHES, num_samples // 2))]
    for i in range(num_samples):
        batches[i % len(batches)].add(1.0, step())
    whole = _Running()
    for batch in batches:
        whole.add(batch.weight, batch.mean, batch.square)
    variance = {key: square / (num_samples - 1.0) for key, square in whole.square.items()}
    # The error is that of a mean over batches.
    totals = [
        sum(float((square / (batch.weight - 1.0)).sum()) for key, square in batch.square.items() if key[0] is None)
        for batch in batches
    ]
    error = (
        float(torch.tensor(totals, dtype=torch.float64).std()) / math.sqrt(len(totals)) if len(totals) > 1 else math.inf
    )
    return Accumulated(whole.mean, variance, num_samples, False, error)


def times_in_turn(
    parts: Sequence[Callable[[], None]], num_rounds: int, clock: Callable[[], float], seed: int
) -> list[list[float]]:
    """Times of some calls that take turns, in seconds of a clock; all calls of a round have the same seed."""
    found: list[list[float]] = [[] for _ in parts]
    for turn in range(num_rounds + 1):
        for part, times in zip(parts, found, strict=True):
            pyro.set_rng_seed(seed + turn)
            start = clock()
            part()
            times.append(clock() - start)
    # The first turn is not counted: it may build objects that later turns use.
    return [times[1:] for times in found]
