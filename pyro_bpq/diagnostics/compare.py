r"""Comparison of estimators on a program: variance, bias and time side by side."""

from __future__ import annotations

import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from torch import Tensor
from tqdm import tqdm

from pyro_bpq.diagnostics.comparison import DEFAULT, LIMIT, Comparison, Row, recommend
from pyro_bpq.diagnostics.moments import GradientMoments, gradient_moments
from pyro_bpq.diagnostics.sampling import num_outcomes_of, seeded, times_in_turn
from pyro_bpq.errors import BPQError, BPQWarning, OptionError, UnsupportedSiteError
from pyro_bpq.estimators import Estimator, LeaveOneOut, ScoreFunction
from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO
from pyro_bpq.rollout.runs import Program
from pyro_bpq.short import short
from pyro_bpq.testing import exact_gradient
from pyro_bpq.testing.expected import backward
from pyro_bpq.testing.parameters import GradientReader
from pyro_bpq.tracing.plate_errors import own_text

# Largest number of steps in which an ELBO settles a number of particles that is left open.
_SETTLING = 20
# What this package, torch and Pyro raise where an estimator does not serve a program.
_DOES_NOT_RUN = (BPQError, ValueError, RuntimeError, LookupError, TypeError, AssertionError)
_STORED = "__baseline_avg_downstream_cost_"


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
        **kwargs: Keyword arguments of both; the names of the options above are taken.

    Returns:
        The comparison, its rows by variance times time; ``print`` shows it as a table.

    Raises:
        OptionError: If ``estimators`` is empty or holds another kind of object.
    """
    rivals = default_rivals(num_particles) if estimators is None else {}
    elbos = {name: rival() for name, rival in rivals.items()}
    if estimators is not None:
        elbos = _elbos(estimators, num_particles)
    if num_rounds < 1:
        raise OptionError(f"num_rounds={num_rounds!r}: write a positive number.")
    program = Program(model, guide, args, kwargs)
    options: dict[str, Any] = {"num_outcomes": num_outcomes, "seed": seed, **kwargs}
    rows: dict[str, Row] = {}
    ready: dict[str, Any] = {}
    same: dict[str, str] = {}
    with seeded(seed), tqdm(total=len(elbos) + 1, desc="compare_estimators", leave=False, disable=not progress) as bar:
        escapes = _first_run(program)
        gradient, square_error, text = _reference(
            program, reference, num_particles, num_samples, num_warmup, num_outcomes, seed
        )
        for name, elbo in elbos.items():
            bar.set_postfix_str(name)
            bar.update()
            pyro.set_rng_seed(seed + 1)
            try:
                elbo, write, warm, seconds = _ready(elbo, rivals.get(name), program, num_warmup)
                own = took(elbo) if estimators is None else {}
                twins = [n for n, e in ready.items() if own and (e.num_particles, took(e)) == (elbo.num_particles, own)]
                if twins:
                    same[name] = twins[0]
                    continue
                moments = gradient_moments(elbo, model, guide, *args, num_samples=num_samples, exact=exact, **options)
            except _DOES_NOT_RUN as error:
                if estimators is not None and not isinstance(error, UnsupportedSiteError):
                    raise
                rows[name] = Row(name, ran=False, note=own_text(error).strip())
                continue
            row = _measured(name, elbo, moments, gradient, square_error)
            rows[name] = replace(row, num_warmup=warm, warmup_s=seconds, write=write)
            ready[name] = elbo
        escapes = escapes or any(_escapes(elbo) for elbo in ready.values())
        for (name, elbo), (ms, spread) in zip(ready.items(), _times(ready, program, num_rounds, seed), strict=True):
            is_blind = escapes and isinstance(elbo, TraceGraph_ELBO)
            rows[name] = replace(rows[name], ms=ms, ms_spread=spread, is_blind=is_blind)
    done = tuple(sorted(rows.values(), key=lambda row: row.variance_time if row.ran else math.inf))
    return Comparison(done, *recommend(done), text, same)


def _elbos(estimators: Mapping[str, Any], num_particles: int) -> dict[str, Any]:
    """Copies of the given ELBOs, and ELBOs for given estimators."""
    found = {}
    for name, given in estimators.items():
        if not isinstance(given, type) and callable(getattr(given, "loss_and_grads", None)):
            found[name] = copy.deepcopy(given)
        elif isinstance(given, Estimator):
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
    return isinstance(elbo, TraceBackpropQ_ELBO) and bool(elbo.runner.recordings.escapes)


def _reference(
    program: Program, elbo: Any, num_particles: int, num_samples: int, num_warmup: int, num_outcomes: int, seed: int
) -> tuple[dict[str, Tensor], float, str]:
    """Reference for the mean gradient, the variance of the reference itself, and what it is."""
    model, guide, args, kwargs = program
    if num_outcomes_of(program, 1) <= num_outcomes:
        try:
            gradient = exact_gradient(model, guide, *args, num_outcomes=num_outcomes, **kwargs)
            return gradient, 0.0, "the exact gradient"
        except BPQError:
            pass  # a program that cannot be enumerated after all
    elbo = copy.deepcopy(elbo) if elbo is not None else TraceBackpropQ_ELBO(max(2, num_particles))
    _warm_up(elbo, program, num_warmup)
    options: dict[str, Any] = {"num_samples": 4 * num_samples, "exact": False, "by_site": False, "seed": seed + 2}
    found = gradient_moments(elbo, model, guide, *args, **options, **kwargs)
    text = f"a run of {4 * num_samples} steps of {type(elbo).__name__}"
    return found.mean, found.total_variance / found.num_samples, text


def _ready(elbo: Any, rival: partial[Any] | None, program: Program, steps: int) -> tuple[Any, str, int, float]:
    """An ELBO that has learned, what to write for it, the number of steps and the seconds that took."""
    text = "" if rival is None else written(rival)
    alone = None if rival is None else in_turn(rival)
    if alone is None:
        return elbo, text, *_warm_up(elbo, program, steps)
    try:
        with warnings.catch_warnings():
            # Where a plate of particles does not do, they run in another way.
            warnings.simplefilter("ignore", BPQWarning)
            return elbo, text, *_warm_up(elbo, program, steps)
    except _DOES_NOT_RUN:
        elbo = alone()
        return elbo, written(alone), *_warm_up(elbo, program, steps)


def _warm_up(elbo: Any, program: Program, steps: int) -> tuple[int, float]:
    """Lets an ELBO's critics learn with fixed parameters; returns number of steps and seconds."""
    is_own = isinstance(elbo, TraceBackpropQ_ELBO)
    if is_own:
        elbo.train()
    if not (elbo.learner is not None if is_own else isinstance(elbo, GraphELBO) and elbo.has_baselines):
        return 0, 0.0
    start = time.perf_counter()
    taken, is_open = 0, is_own and elbo.particles.is_open
    with torch.enable_grad(), GradientReader(*program[:2], None) as reader:
        # The number of particles has to stay: moments and times would be those of different numbers.
        while taken < steps or (taken < _SETTLING and is_open and not elbo.particles.is_settled(elbo.runner)):
            _step(elbo, program, reader)
            taken += 1
    if isinstance(elbo, GraphELBO):
        elbo.train(False)
    return taken, time.perf_counter() - start


def _step(elbo: Any, program: Program, reader: GradientReader) -> None:
    reader.clear()
    # loss_and_grads would put the copy's critics into Pyro's param store where the user's optimiser trains them.
    backward(elbo, program, isinstance(elbo, TraceBackpropQ_ELBO))


def _measured(
    name: str, elbo: Any, moments: GradientMoments, gradient: Mapping[str, Tensor], square_error: float
) -> Row:
    """The figures of an ELBO but for its times, against a reference and the variance of that."""
    square = sum(float((moments.mean.get(n, 0.0) - g).square().sum()) for n, g in gradient.items())
    size = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
    own = 0.0 if moments.is_exact else moments.total_variance / moments.num_samples
    bias, error = math.sqrt(square), math.sqrt(own + square_error)
    rounding = max((1e4 * torch.finfo(g.dtype).eps for g in gradient.values()), default=0.0)
    plan = elbo.plan if isinstance(elbo, TraceBackpropQ_ELBO) else None
    return Row(
        name,
        num_particles=elbo.num_particles,
        took=took(elbo),
        claims_unbiased=None if not plan else all(cls.spec.estimator.is_unbiased for cls in plan.layout.classes),
        is_exact=moments.is_exact,
        num_samples=moments.num_samples,
        variance=moments.total_variance,
        variance_error=moments.total_variance_error,
        bias=bias,
        bias_error=error,
        relative_bias=bias / size if size else math.inf if bias else 0.0,
        is_biased=bias > LIMIT * error + rounding * size,
        parameters={name: float(variance.sum()) for name, variance in moments.variance.items()},
        sites={site: found.total_variance for site, found in moments.sites.items()},
    )


def _times(elbos: Mapping[str, Any], program: Program, rounds: int, seed: int) -> list[tuple[float, float]]:
    """Median time of a step and half the distance of its quartiles, in milliseconds; ELBOs take turns."""
    for elbo in elbos.values():
        if isinstance(elbo, (torch.nn.Module, GraphELBO)):
            elbo.train()
    with torch.enable_grad(), GradientReader(*program[:2], None) as reader:
        steps = [partial(_step, elbo, program, reader) for elbo in elbos.values()]
        found = times_in_turn(steps, rounds, time.perf_counter, seed)
    return [_middle([1e3 * seconds for seconds in times]) for times in found]


def _middle(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, (high - low) / 2


# The estimators that are measured unless others are named.


def took(elbo: Any) -> dict[str, str]:
    """The estimator of each site, and its critic; empty for ELBOs of other libraries, and before the first step."""
    plan = elbo.plan if isinstance(elbo, TraceBackpropQ_ELBO) else None
    if not plan:
        return {}
    found = {}
    for name, spec in plan.layout.specs.items():
        nodes = () if plan.layout.network is None else plan.layout.network.q_nodes(name)
        has_critic = spec.critic is not None and any(node.is_learned for node in nodes)
        found[name] = short(spec.estimator) + (f" with {short(spec.critic)}" if has_critic else "")
    return found


class GraphELBO(TraceGraph_ELBO):
    """Pyro's ``TraceGraph_ELBO`` with its baselines switched on or off, whatever the guide says.

    Attributes:
        is_learning: Whether averages move.
    """

    def __init__(self, has_baselines: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_baselines, self.is_learning = has_baselines, True
        self._averages: dict[str, Any] = {}

    def train(self, mode: bool = True) -> None:
        """Lets averages move, or keeps them."""
        self.is_learning = mode

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """A step of Pyro's."""
        store = pyro.get_param_store()
        before = {name: store[name] for name in store.keys() if name.startswith(_STORED)}
        _put(before, self._averages)
        try:
            with poutine.block(hide_fn=lambda site: site["type"] == "param" and str(site["name"]).startswith(_STORED)):
                wrapped = poutine.infer_config(guide, self._options)  # type: ignore[arg-type]
                return float(super().loss_and_grads(model, wrapped, *args, **kwargs))  # type: ignore[no-untyped-call]
        finally:
            after = {name: store[name].detach() for name in store.keys() if name.startswith(_STORED)}
            _put(after, before)
            if self.is_learning:
                self._averages = after

    def _options(self, site: Any) -> dict[str, Any]:
        """What ``infer`` of a site is to be."""
        if not self.has_baselines or site["is_observed"] or getattr(site["fn"], "has_rsample", False):
            return {"baseline": {}}
        return {"baseline": site["infer"].get("baseline") or {"use_decaying_avg_baseline": True}}


def _put(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Puts some entries into the param store in place of others."""
    store = pyro.get_param_store()
    for name in old:
        del store[name]
    for name, value in new.items():
        store[name] = value


def default_rivals(num_particles: int) -> dict[str, partial[Any]]:
    """The ELBOs, by name; a call makes one."""
    several: dict[str, Any] = {"num_particles": max(2, num_particles), "vectorize_particles": True}
    return {
        DEFAULT: partial(TraceBackpropQ_ELBO),
        f"{DEFAULT}, {several['num_particles']} particles": partial(TraceBackpropQ_ELBO, **several),
        f"{DEFAULT}, no critic": partial(TraceBackpropQ_ELBO, critic=None),
        "leave-one-out": partial(TraceBackpropQ_ELBO, **several, estimator=ScoreFunction(LeaveOneOut())),
        "Trace_ELBO": partial(Trace_ELBO),
        f"Trace_ELBO, {several['num_particles']} particles": partial(Trace_ELBO, **several),
        "TraceGraph_ELBO": partial(GraphELBO, has_baselines=False),
        "TraceGraph_ELBO, baselines": partial(GraphELBO, has_baselines=True),
    }


def in_turn(rival: partial[Any]) -> partial[Any] | None:
    """The same with its particles one after the other; ``None`` if it does not ask for a plate of particles."""
    options = {name: value for name, value in rival.keywords.items() if name != "vectorize_particles"}
    return partial(rival.func, **options) if options != rival.keywords else None


def written(rival: partial[Any]) -> str:
    """What to write for it; empty for a class of this module, which is not to be imported."""
    if rival.func is GraphELBO:
        return ""
    return f"{rival.func.__name__}({', '.join(f'{name}={value!r}' for name, value in rival.keywords.items())})"
