r"""Comparison of estimators on a program: variance, bias and time side by side."""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from pyro.infer import TraceGraph_ELBO
from torch import Tensor
from tqdm import tqdm

from pyro_bpq.diagnostics.comparison import LIMIT, Comparison, Row, recommend
from pyro_bpq.diagnostics.figures import GradientMoments
from pyro_bpq.diagnostics.moments import gradient_moments
from pyro_bpq.diagnostics.rivals import GraphELBO, Rival, default_rivals, signature, took
from pyro_bpq.diagnostics.sampling import num_outcomes_of, seeded
from pyro_bpq.errors import BPQError, BPQWarning, OptionError, UnsupportedSiteError
from pyro_bpq.estimators import Estimator
from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO
from pyro_bpq.rollout.runs import Program
from pyro_bpq.testing import exact_gradient
from pyro_bpq.testing.expected import backward
from pyro_bpq.testing.parameters import GradientReader
from pyro_bpq.tracing.plate_errors import own_text

# Largest number of steps in which an ELBO settles a number of particles that is left open.
_SETTLING = 20
# What this package, torch and Pyro raise where an estimator does not serve a program.
_DOES_NOT_RUN = (BPQError, ValueError, RuntimeError, LookupError, TypeError, AssertionError)


@dataclass(frozen=True)
class _Reference:
    """Reference for the mean gradient, and the variance of the reference itself."""

    gradient: dict[str, Tensor]
    square_error: float
    text: str


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
    exact: bool | str = "auto",
    reference: Any = None,
    seed: int = 0,
    progress: bool = True,
    verbose: bool = True,
    **kwargs: Any,
) -> Comparison:
    r"""Measures gradient estimators on a program at its present parameters.

        variance = Σ_i Var g_i,   bias = |E g - ∇J|,   cost = variance × milliseconds per step

    Every estimator works on a copy. First, critics and running statistics learn for ``num_warmup`` steps with fixed
    parameters. Then moments are taken while nothing learns. Then whole steps, learning included, are timed, one of each
    estimator in turn. Moments are exact if a step has few joint outcomes, else sampled. The bias is measured against
    the exact gradient if one particle has few states, else against a long run of ``reference``. A bias counts if it
    is beyond four standard errors (or beyond rounding, if both sides are exact).

    Args:
        model: Model.
        guide: Guide.
        *args: Arguments of both.
        estimators: ELBOs (of this package or of Pyro) or estimators, by name. An estimator becomes
            ``TraceBackpropQ_ELBO(num_particles, estimator=...)``. Default: this package's default, the same with
            ``num_particles``, the same without critics, leave-one-out, and Pyro's ``Trace_ELBO``, also with
            ``num_particles``, and ``TraceGraph_ELBO``, with and without baselines. Of those that are the same on this
            program one is left out; the result says so.
        num_particles: Number of particles of estimators that are not ELBOs, and of three of the default
            ``estimators``: leave-one-out, and the second rows of this package's default and of ``Trace_ELBO``. The
            others have the number of particles that they choose themselves.
        num_samples: Number of steps if outcomes are not enumerated.
        num_warmup: Number of steps that critics learn before; the result reports it. ELBOs with ``learner=None``
            are not warmed up, because the user's optimiser trains their critics.
        num_rounds: Number of timed steps of each estimator.
        num_outcomes: Largest number of outcomes that are enumerated.
        exact: As in :func:`gradient_moments`.
        reference: An unbiased ELBO for the long run of ``4 * num_samples`` steps; default
            ``TraceBackpropQ_ELBO`` with two particles or more.
        seed: Seed of the samples; global generators and ``.grad`` are restored.
        progress: Whether to show a bar.
        verbose: Whether to print the table.
        **kwargs: Keyword arguments of both; the names of the options above are taken.

    Returns:
        The comparison, its rows by variance times time.

    Raises:
        OptionError: If ``estimators`` is empty or holds another kind of object.
    """
    rivals = default_rivals(num_particles) if estimators is None else {}
    elbos = {name: rival.build() for name, rival in rivals.items()}
    if estimators is not None:
        elbos = _elbos(estimators, num_particles)
    if num_rounds < 1:
        raise OptionError(f"num_rounds={num_rounds!r}: write a positive number.")
    program = Program(model, guide, args, kwargs)
    options: dict[str, Any] = {"num_outcomes": num_outcomes, "seed": seed, **kwargs}
    rows: dict[str, Row] = {}
    ready: dict[str, Any] = {}
    same: dict[str, str] = {}
    with seeded(seed), _bar(progress, 2 * len(elbos) + 2) as advance:
        escapes = _first_run(program)
        truth = _reference(program, reference, num_particles, num_samples, num_warmup, options)
        advance("reference")
        for name, elbo in elbos.items():
            pyro.set_rng_seed(seed + 1)
            try:
                elbo, write, warm, seconds = _ready(elbo, rivals.get(name), program, num_warmup)
                advance(name)
                twin = _twin(elbo, ready) if estimators is None else None
                if twin is not None:
                    same[name] = twin
                    continue
                moments = gradient_moments(elbo, model, guide, *args, num_samples=num_samples, exact=exact, **options)
                advance(name)
            except _DOES_NOT_RUN as error:
                if estimators is not None and not isinstance(error, UnsupportedSiteError):
                    raise
                rows[name] = Row(name, ran=False, note=own_text(error).strip())
                continue
            figures = _figures(elbo, moments, truth)
            rows[name] = Row(name, num_warmup=warm, warmup_s=seconds, write=write, **figures)
            ready[name] = elbo
        escapes = escapes or any(_escapes(elbo) for elbo in ready.values())
        for name, (ms, spread) in _times(ready, program, num_rounds, seed).items():
            is_blind = escapes and isinstance(ready[name], TraceGraph_ELBO)
            rows[name] = replace(rows[name], ms=ms, ms_spread=spread, is_blind=is_blind)
    done = tuple(sorted(rows.values(), key=lambda row: row.variance_time if row.ran else math.inf))
    comparison = Comparison(done, *recommend(done), truth.text, same)
    if verbose:
        print(comparison)
    return comparison


def _ready(elbo: Any, rival: Rival | None, program: Program, steps: int) -> tuple[Any, str, int, float]:
    """An ELBO that has learned, what to write for it, the number of steps and the seconds that took."""
    text = "" if rival is None else rival.written
    alone = None if rival is None else rival.in_turn
    if alone is None:
        return elbo, text, *_warm_up(elbo, program, steps)
    try:
        with warnings.catch_warnings():
            # Where a plate of particles does not do, they run in another way.
            warnings.simplefilter("ignore", BPQWarning)
            return elbo, text, *_warm_up(elbo, program, steps)
    except _DOES_NOT_RUN:
        elbo = alone.build()
        return elbo, alone.written, *_warm_up(elbo, program, steps)


def _twin(elbo: Any, ready: Mapping[str, Any]) -> str | None:
    """Name of an ELBO that computes the same on this program."""
    own = signature(elbo)
    return None if own is None else next((name for name, other in ready.items() if signature(other) == own), None)


def _elbos(estimators: Mapping[str, Any], num_particles: int) -> dict[str, Any]:
    """Copies of the given ELBOs, and ELBOs for given estimators."""
    found = {}
    for name, given in estimators.items():
        if not isinstance(given, type) and callable(getattr(given, "loss_and_grads", None)):
            found[name] = copy.deepcopy(given)
        elif not isinstance(given, type) and isinstance(given, Estimator):
            found[name] = TraceBackpropQ_ELBO(num_particles, estimator=given)
        else:
            raise OptionError(f"estimators[{name!r}]={given!r}: write an ELBO or an estimator such as AllAction().")
    if not found:
        raise OptionError("estimators={}: name at least one, or leave it out.")
    return found


def _first_run(program: Program) -> bool:
    """Runs once to create the parameters, so that no estimator's first step draws their initial values.

    Returns whether sampled values left torch.
    """
    elbo = TraceBackpropQ_ELBO()
    with torch.no_grad():
        elbo.loss(*program[:2], *program.args, **program.kwargs)
    return _escapes(elbo)


def _escapes(elbo: Any) -> bool:
    """Whether an ELBO saw values leave torch; ELBOs of other libraries do not look."""
    return isinstance(elbo, TraceBackpropQ_ELBO) and bool(elbo.runner.structure.escapes)


def _warm_up(elbo: Any, program: Program, steps: int) -> tuple[int, float]:
    """Lets an ELBO's critics learn with fixed parameters; returns number of steps and seconds."""
    learns = isinstance(elbo, GraphELBO) and elbo.has_baselines
    if isinstance(elbo, TraceBackpropQ_ELBO):
        elbo.train()
        learns = elbo.learner is not None
    if not learns:
        return 0, 0.0
    start = time.perf_counter()
    taken = 0
    with torch.enable_grad(), GradientReader(*program[:2], None) as reader:
        while taken < steps or (taken < _SETTLING and not _is_settled(elbo, program)):
            reader.clear()
            _step(elbo, program)
            taken += 1
    if isinstance(elbo, GraphELBO):
        elbo.train(False)
    return taken, time.perf_counter() - start


def _is_settled(elbo: Any, program: Program) -> bool:
    """Whether the number of particles stays: moments and times would be those of different numbers."""
    return not isinstance(elbo, TraceBackpropQ_ELBO) or not elbo.particles.is_open or elbo.particles.is_settled(program)


def _step(elbo: Any, program: Program) -> None:
    # loss_and_grads would put the copy's critics into Pyro's param store where the user's optimiser trains them.
    backward(elbo, program, isinstance(elbo, TraceBackpropQ_ELBO))


def _reference(
    program: Program, elbo: Any, num_particles: int, num_samples: int, num_warmup: int, options: Mapping[str, Any]
) -> _Reference:
    limit, (model, guide, args, kwargs) = options["num_outcomes"], program
    if num_outcomes_of(guide, args, kwargs, 1) <= limit:
        try:
            gradient = exact_gradient(model, guide, *args, num_outcomes=limit, **kwargs)
            return _Reference(gradient, 0.0, "the exact gradient")
        except BPQError:
            pass  # a program that cannot be enumerated after all
    elbo = copy.deepcopy(elbo) if elbo is not None else TraceBackpropQ_ELBO(max(2, num_particles))
    _warm_up(elbo, program, num_warmup)
    settings = {**options, "seed": options["seed"] + 2}
    found = gradient_moments(
        elbo, model, guide, *args, num_samples=4 * num_samples, exact=False, by_site=False, **settings
    )
    text = f"a run of {4 * num_samples} steps of {type(elbo).__name__}"
    return _Reference(found.mean, found.total_variance / found.num_samples, text)


def _figures(elbo: Any, moments: GradientMoments, truth: _Reference) -> dict[str, Any]:
    square = sum(float((moments.mean.get(n, 0.0) - g).square().sum()) for n, g in truth.gradient.items())
    size = math.sqrt(sum(float(g.square().sum()) for g in truth.gradient.values()))
    own = 0.0 if moments.is_exact else moments.total_variance / moments.num_samples
    bias, error = math.sqrt(square), math.sqrt(own + truth.square_error)
    return {
        "num_particles": elbo.num_particles,
        "took": took(elbo),
        "claims_unbiased": _claims_unbiased(elbo),
        "is_exact": moments.is_exact,
        "num_samples": moments.num_samples,
        "variance": moments.total_variance,
        "variance_error": moments.total_variance_error,
        "bias": bias,
        "bias_error": error,
        "relative_bias": bias / size if size else math.inf if bias else 0.0,
        "is_biased": bias > LIMIT * error + _rounding(truth.gradient) * size,
        "parameters": {name: float(variance.sum()) for name, variance in moments.variance.items()},
        "sites": {site: found.total_variance for site, found in moments.sites.items()},
    }


def _rounding(gradient: Mapping[str, Tensor]) -> float:
    return max((1e4 * torch.finfo(g.dtype).eps for g in gradient.values()), default=0.0)


def _claims_unbiased(elbo: Any) -> bool | None:
    if not isinstance(elbo, TraceBackpropQ_ELBO) or elbo.plan is None:
        return None
    return all(cls.spec.estimator.is_unbiased for cls in elbo.plan.layout.classes)


def _times(elbos: Mapping[str, Any], program: Program, rounds: int, seed: int) -> dict[str, tuple[float, float]]:
    """Median time of a step and half the distance of its quartiles, in milliseconds; ELBOs take turns."""
    found: dict[str, list[float]] = {name: [] for name in elbos}
    with torch.enable_grad(), GradientReader(*program[:2], None) as reader:
        for elbo in elbos.values():
            if isinstance(elbo, (torch.nn.Module, GraphELBO)):
                elbo.train()
        for turn in range(rounds + 1):
            for name, elbo in elbos.items():
                pyro.set_rng_seed(seed + turn)
                reader.clear()
                start = time.perf_counter()
                _step(elbo, program)
                found[name].append(1e3 * (time.perf_counter() - start))
    # The first turn is not counted: it may build objects that later turns use.
    return {name: _middle(values[1:]) for name, values in found.items()}


def _middle(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, (high - low) / 2


@contextlib.contextmanager
def _bar(is_shown: bool, total: int) -> Iterator[Callable[[str], None]]:
    with tqdm(total=total, desc="compare_estimators", leave=False, disable=not is_shown) as bar:

        def advance(text: str) -> None:
            bar.set_postfix_str(text)
            bar.update()

        yield advance
        bar.update(bar.total - bar.n)
