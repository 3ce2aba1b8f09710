r"""Comparison of estimators on a program: variance, bias and time side by side."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from torch import Tensor
from tqdm import tqdm

from pyro_bpq.diagnostics.comparison import DEFAULT, LIMIT, Comparison, Row, recommend
from pyro_bpq.errors import BPQError, OptionError, UnsupportedSiteError
from pyro_bpq.estimators import AllAction, Estimator, LeaveOneOut, ScoreFunction
from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO
from pyro_bpq.record.program_errors import own_text
from pyro_bpq.rollout.runs import Program
from pyro_bpq.short import short
from pyro_bpq.testing import exact_gradient
from pyro_bpq.testing.moments import GradientMoments, GradientReader, gradient_moments, take_own_step, untouched

# Largest number of steps in which an ELBO settles a number of particles that is left open.
_SETTLING = 20
# What this package, torch and Pyro raise where an estimator does not serve a program.
_DOES_NOT_RUN = (BPQError, ValueError, RuntimeError, LookupError, TypeError, AssertionError)


def compare_estimators(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    estimators: Mapping[str, Any] | None = None,
    num_particles: int = 4,
    num_samples: int = 200,
    num_warmup: int = 200,
    num_rounds: int = 20,
    num_outcomes: int = 2000,
    seed: int = 0,
    progress: bool = True,
    **kwargs: Any,
) -> Comparison:
    r"""Measures gradient estimators on a program at its present parameters.

        variance = Σ_i Var g_i,   bias = |E g - ∇J|,   cost = variance × milliseconds per step

    Every estimator works on a copy. First, critics and running statistics learn for ``num_warmup`` steps with fixed
    parameters. Then moments are taken while nothing learns. Then whole steps, learning included, are timed, one of each
    estimator in turn. Moments are exact if a step has few joint outcomes, else sampled. The bias is measured against
    the exact gradient if one particle has few states, else against a long run of
    ``TraceBackpropQ_ELBO`` with two particles or more. A bias counts if it
    is beyond four standard errors (or beyond rounding, if both sides are exact).

    Args:
        model: Model.
        guide: Guide.
        *args: Arguments of both.
        estimators: ELBOs (of this package or of Pyro) or estimators, by name. An estimator becomes
            ``TraceBackpropQ_ELBO(num_particles, estimator=...)``. Default: this package's default, the same with one
            particle and without critics, leave-one-out, sums over the values of each site, and Pyro's ``Trace_ELBO``,
            also with ``num_particles``, and ``TraceGraph_ELBO``, with and without decaying averages as baselines.
        num_particles: Number of particles of estimators that are not ELBOs, and of those of the default
            ``estimators`` that have several. The others have the number that they choose themselves.
        num_samples: Number of steps if outcomes are not enumerated.
        num_warmup: Number of steps that critics learn before; the result reports it. ELBOs with ``learner=None``
            are not warmed up, because the user's optimiser trains their critics.
        num_rounds: Number of timed steps of each estimator.
        num_outcomes: Largest number of outcomes that are enumerated.
        seed: Seed of the samples; global generators and ``.grad`` are restored.
        progress: Whether to show a bar.
        **kwargs: Keyword arguments of both; the names of the options above are taken.

    Returns:
        The comparison, its rows by variance times time; ``print`` shows it as a table.

    Raises:
        OptionError: If ``estimators`` is empty or holds another kind of object, or an option is out of range.

    Example:
        >>> print(compare_estimators(model, guide, x, num_samples=50))  # doctest: +SKIP
    """
    if num_rounds < 1:
        raise OptionError(f"num_rounds={num_rounds!r}: write a positive number.")
    makers = None if estimators is None else _given(estimators, num_particles)
    program = Program(model, guide, args, kwargs)
    limits: dict[str, Any] = {"num_samples": num_samples, "num_outcomes": num_outcomes, "seed": seed}
    rows, ready = dict[str, Row](), dict[str, Any]()
    store = pyro.get_param_store()
    with untouched(None, seed):
        has_plate, escapes = _probe(program)
    # What Pyro's ELBOs put into the param store is not to stay there.
    with untouched(None, seed), store.scope(store.get_state()):
        truth = _truth(program, num_particles, num_warmup, limits)
        every = (makers or candidates(num_particles, has_plate)).items()
        for name, make in tqdm(every, "compare_estimators", leave=False, disable=not progress):
            if name.endswith("no critic") and makers is None and DEFAULT in ready and not ready[DEFAULT].critics.blocks:
                continue  # it is the default
            pyro.set_rng_seed(seed + 1)
            try:
                elbo = make()
                num_steps = _warm_up(elbo, program, num_warmup)
                moments = gradient_moments(elbo, model, guide, *args, **limits, **kwargs)
            except _DOES_NOT_RUN as error:
                if makers is not None and not isinstance(error, UnsupportedSiteError):
                    raise
                rows[name] = Row(name, note=own_text(error).strip())
                continue
            ready[name], write = elbo, written(make) if makers is None else ""
            rows[name] = replace(_row(name, elbo, moments, truth), num_warmup=num_steps, write=write)
        escapes = escapes or any(map(_escapes, ready.values()))
        for name, (ms, spread) in _times(ready, program, num_rounds, seed).items():
            is_blind = escapes and isinstance(ready[name], TraceGraph_ELBO)
            rows[name] = replace(rows[name], ms=ms, ms_spread=spread, is_blind=is_blind)
    done = tuple(sorted(rows.values(), key=lambda row: row.variance_time if row.ran else math.inf))
    return Comparison(done, *recommend(done), truth.text)


# What is measured.


def candidates(num_particles: int, has_plate: bool) -> dict[str, partial[Any]]:
    """What makes the ELBOs that are measured unless others are named; several particles run in a plate, or in turn."""
    several: dict[str, Any] = {"num_particles": max(2, num_particles), "vectorize_particles": has_plate}
    number = f"{several['num_particles']} particles"
    return {
        DEFAULT: partial(TraceBackpropQ_ELBO),
        f"{DEFAULT}, one particle": partial(TraceBackpropQ_ELBO, num_particles=1),
        f"{DEFAULT}, no critic": partial(TraceBackpropQ_ELBO, critic=None),
        "leave-one-out": partial(TraceBackpropQ_ELBO, **several, estimator=ScoreFunction(LeaveOneOut())),
        "sums over values": partial(TraceBackpropQ_ELBO, **several, estimator=AllAction()),
        "Trace_ELBO": partial(Trace_ELBO),
        f"Trace_ELBO, {number}": partial(Trace_ELBO, **several),
        "TraceGraph_ELBO": partial(TraceGraph_ELBO),
        "TraceGraph_ELBO, baselines": partial(AveragedGraphELBO),
    }


def written(maker: partial[Any]) -> str:
    """What to write for an ELBO; empty for a class of this module, which is not to be imported."""
    if maker.func is AveragedGraphELBO:
        return ""
    return f"{maker.func.__name__}({', '.join(f'{name}={short(value)}' for name, value in maker.keywords.items())})"


def _given(estimators: Mapping[str, Any], num_particles: int) -> dict[str, partial[Any]]:
    """What makes copies of the given ELBOs, and ELBOs for given estimators."""
    if not (estimators and isinstance(estimators, Mapping)):
        raise OptionError(f'estimators={estimators!r}: write {{"name": AllAction()}}, or leave it out.')
    found = dict[str, partial[Any]]()
    for name, given in estimators.items():
        if not isinstance(given, type) and callable(getattr(given, "loss_and_grads", None)):
            found[name] = partial(copy.deepcopy, given)
        elif isinstance(given, Estimator):
            found[name] = partial(TraceBackpropQ_ELBO, num_particles, estimator=given)
        else:
            raise OptionError(f"estimators[{name!r}]={given!r}: write an ELBO or an estimator such as AllAction().")
    return found


def took(elbo: Any) -> dict[str, str]:
    """The estimator of each site, and its critic; empty for ELBOs of other libraries, and before the first step."""
    found = {name: short(spec.estimator) for name, spec in (_specs(elbo) or {}).items()}
    for name in found:
        critic = elbo.plan.critic(name)
        found[name] += "" if critic.startswith("none") else f" with {critic}"
    return found


def _specs(elbo: Any) -> Mapping[str, Any] | None:
    """What the plan says of each site; ``None`` for ELBOs of other libraries, and before the first step."""
    return elbo.plan.layout.specs if isinstance(elbo, TraceBackpropQ_ELBO) and elbo.plan else None


class AveragedGraphELBO(TraceGraph_ELBO):
    """Pyro's ``TraceGraph_ELBO`` with its decaying averages as baselines; they move in ``train`` mode only."""

    training = True

    def train(self, mode: bool = True) -> None:
        """Lets averages move, or keeps them."""
        self.training = mode

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """A step of Pyro's."""
        before = pyro.get_param_store().get_state()
        guide = poutine.infer_config(guide, _with_average)  # type: ignore[arg-type]
        loss = super().loss_and_grads(model, guide, *args, **kwargs)  # type: ignore[no-untyped-call]
        if not self.training:
            pyro.get_param_store().set_state(before)
        return float(loss)


def _with_average(site: Any) -> dict[str, Any]:
    return {"baseline": site["infer"].get("baseline") or {"use_decaying_avg_baseline": True}}


# How it is measured.


class Truth(NamedTuple):
    """What mean gradients are compared with, the variance of that itself, and what it is."""

    gradient: Mapping[str, Tensor]
    square_error: float
    text: str


def _probe(program: Program) -> tuple[bool, bool]:
    """Makes the parameters. Whether particles run in one plate, and whether sampled values leave torch."""
    elbo, has_plate = TraceBackpropQ_ELBO(2, vectorize_particles=True), False
    with warnings.catch_warnings(), contextlib.suppress(*_DOES_NOT_RUN):
        warnings.simplefilter("ignore")
        _warm_up(elbo, program, 1)
        has_plate = elbo.particles.now.has_plate
    return has_plate, _escapes(elbo)


def _escapes(elbo: Any) -> bool:
    """Whether an ELBO saw values leave torch; ELBOs of other libraries do not look."""
    return isinstance(elbo, TraceBackpropQ_ELBO) and bool(elbo.runner.recordings.escapes)


def _truth(program: Program, num_particles: int, num_warmup: int, limits: dict[str, Any]) -> Truth:
    """The exact gradient, or the mean of a long run."""
    model, guide, args, kwargs = program
    try:
        gradient = exact_gradient(model, guide, *args, num_outcomes=limits["num_outcomes"], **kwargs)
        return Truth(gradient, 0.0, "the exact gradient")
    except BPQError:
        elbo = TraceBackpropQ_ELBO(max(2, num_particles))
    _warm_up(elbo, program, num_warmup)
    number = 4 * limits["num_samples"]
    longer = {"num_samples": number, "num_outcomes": 0, "seed": limits["seed"] + 2}
    found = gradient_moments(elbo, model, guide, *args, **longer, **kwargs)
    return Truth(found.mean, found.total_variance / number, f"a run of {number} steps of {type(elbo).__name__}")


def _warm_up(elbo: Any, program: Program, steps: int) -> int:
    """Lets an ELBO's critics learn with fixed parameters; returns the number of steps."""
    is_own = isinstance(elbo, TraceBackpropQ_ELBO)
    if not (elbo.learner is not None if is_own else isinstance(elbo, AveragedGraphELBO)):
        return 0
    elbo.train()
    taken, is_open = 0, is_own and elbo.particles.is_open
    with torch.enable_grad(), GradientReader(*program[:2], None) as reader:
        # The number of particles has to stay: moments and times would be those of different numbers.
        while taken < steps or (taken < _SETTLING and is_open and not elbo.particles.is_settled(elbo.runner)):
            take_own_step(elbo, program, reader)
            taken += 1
    return taken


def _row(name: str, elbo: Any, moments: GradientMoments, truth: Truth) -> Row:
    """The figures of an ELBO but for its times."""
    square = sum(float((moments.mean.get(n, 0.0) - g).square().sum()) for n, g in truth.gradient.items())
    size = math.sqrt(sum(float(g.square().sum()) for g in truth.gradient.values()))
    own = 0.0 if moments.is_exact else moments.total_variance / moments.num_samples
    bias, error = math.sqrt(square), math.sqrt(own + truth.square_error)
    rounding = max((1e4 * torch.finfo(g.dtype).eps for g in truth.gradient.values()), default=0.0)
    specs = _specs(elbo)
    return Row(
        name,
        num_particles=elbo.num_particles,
        took=took(elbo),
        claims_unbiased=None if specs is None else all(spec.estimator.is_unbiased for spec in specs.values()),
        variance=moments.total_variance,
        variance_error=moments.total_variance_error,
        bias=bias,
        bias_error=error,
        relative_bias=bias / size if size else math.inf if bias else 0.0,
        is_biased=bias > LIMIT * error + rounding * size,
    )


def _times(elbos: Mapping[str, Any], program: Program, rounds: int, seed: int) -> dict[str, tuple[float, float]]:
    """Median time of a step and its median absolute deviation, in milliseconds; ELBOs take turns."""
    found: dict[str, list[float]] = {name: [] for name in elbos}
    with torch.enable_grad(), GradientReader(*program[:2], None) as reader:
        # The first turn is not counted: it may build objects that later turns use.
        for turn, (name, elbo) in itertools.product(range(rounds + 1), elbos.items()):
            if isinstance(elbo, (torch.nn.Module, AveragedGraphELBO)):
                elbo.train()
            pyro.set_rng_seed(seed + turn)
            start = time.perf_counter()
            take_own_step(elbo, program, reader)
            found[name] += [1e3 * (time.perf_counter() - start)] if turn else []
    medians = {name: statistics.median(times) for name, times in found.items()}
    return {name: (at, statistics.median(abs(each - at) for each in found[name])) for name, at in medians.items()}
