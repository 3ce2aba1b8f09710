"""Whether the expected gradient of a step is the exact one, for a program and a configuration."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pyro
import torch
from enumerable import enumerable_noise, where_it_serves
from pyro import poutine
from pyro.infer import RenyiELBO, Trace_ELBO, TraceEnum_ELBO
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from fuzz.programs import COUNT_KINDS, FLOAT_KINDS, LAWFUL_KINDS, UNLIMITED, Allowed, Program, random_program
from pyro_bpq import LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO, TraceBackpropQ_IWAE
from pyro_bpq.errors import BPQError
from pyro_bpq.estimators import (
    CrossedLeaveOneOut,
    DebiasedStraightThrough,
    Differences,
    Hindsight,
    SecondRun,
)
from pyro_bpq.plan import rules
from pyro_bpq.testing import ChoiceNoise, iter_outcomes
from pyro_bpq.testing.choices import ChoiceMessenger, walk
from pyro_bpq.testing.moments import GradientReader

__all__ = ["CONFIGS", "Config", "Verdict", "check", "draw"]

TOLERANCE = 1e-10
MOST_OUTCOMES = 700


@dataclass(frozen=True)
class Config:
    """What is compared.

    Args:
        make: An objective, fresh.
        stock: Pyro's own objective for the same programs.
        estimator: Where it serves; the default's choice elsewhere.
        particles: Number of particles.
        options: Of :func:`random_program`.
        bound: Whether the exact gradient is that of the bound of two samples.
        changes: Whether programs change before the step that is looked at.
    """

    make: Callable[[], Any]
    stock: Callable[[], Any] = Trace_ELBO
    estimator: Any = None
    particles: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    bound: bool = False
    changes: bool = False


BROADCAST = Allowed(left=False, escapes=False)
# A pair of particles has the square of the states.
PAIRS: dict[str, Any] = {"max_states": 6}
CHANGING: dict[str, Any] = {"allowed": Allowed(changes=True)}
TWO: dict[str, Any] = {"num_particles": 2}
VECTORISED: dict[str, Any] = {**TWO, "vectorize_particles": True}


def _served(estimator: Any, particles: int = 1, **options: Any) -> Config:
    def make() -> TraceBackpropQ_ELBO:
        return TraceBackpropQ_ELBO(num_particles=particles)

    return Config(make, lambda: Trace_ELBO(particles), estimator, particles, options)


def _hidden() -> TraceBackpropQ_ELBO:
    """Particles in a hidden dimension, also where a plate of them would do."""
    elbo = TraceBackpropQ_ELBO(2)
    elbo.particles.change(is_hidden=True)
    return elbo


CONFIGS: dict[str, Config] = {
    "one": Config(lambda: TraceBackpropQ_ELBO(1)),
    # Four particles, see below, have the fourth power of the states.
    "default": Config(TraceBackpropQ_ELBO, options={"max_states": 4}),
    "two": Config(lambda: TraceBackpropQ_ELBO(2), lambda: Trace_ELBO(2), particles=2, options=PAIRS),
    "vectorised": Config(
        lambda: TraceBackpropQ_ELBO(**VECTORISED),
        lambda: Trace_ELBO(**VECTORISED),
        particles=2,
        options={**PAIRS, "allowed": BROADCAST},
    ),
    "hidden": Config(_hidden, lambda: Trace_ELBO(2), particles=2, options=PAIRS),
    "hidden_score": Config(_hidden, lambda: Trace_ELBO(2), ScoreFunction(LeaveOneOut()), particles=2, options=PAIRS),
    "score": _served(ScoreFunction(), max_states=32),
    "leave_one_out": _served(ScoreFunction(LeaveOneOut()), 2, **PAIRS),
    "crossed": _served(CrossedLeaveOneOut(), 2, **PAIRS),
    "hindsight": _served(Hindsight(), max_states=16, kinds=LAWFUL_KINDS),
    "hindsight_drawn": _served(Hindsight(draws=1), max_states=8, kinds=LAWFUL_KINDS),
    "counts": Config(TraceBackpropQ_ELBO, options={"max_states": 4, "kinds": COUNT_KINDS}),
    "differences": _served(Differences(), max_states=16, kinds=COUNT_KINDS),
    "differences_drawn": _served(Differences(draws=1, whole=1), max_states=9, kinds=COUNT_KINDS),
    "differences_two": _served(Differences(draws=1, whole=1), 2, max_states=4, kinds=COUNT_KINDS),
    "second_run": _served(SecondRun(), **PAIRS),
    "straight_through": _served(DebiasedStraightThrough(), **PAIRS, kinds=FLOAT_KINDS),
    "enumeration": Config(
        lambda: TraceBackpropQ_ELBO(enumeration="exact"),
        TraceEnum_ELBO,
        options={
            "max_states": 16,
            "allowed": Allowed(left=False, escapes=False, marks=True, dropped=False, costs=False),
        },
    ),
    "changes": Config(lambda: TraceBackpropQ_ELBO(1), options={"max_states": 16, **CHANGING}, changes=True),
    "changes_open": Config(TraceBackpropQ_ELBO, options={"max_states": 4, **CHANGING}, changes=True),
    "iwae": Config(lambda: TraceBackpropQ_IWAE(2), lambda: RenyiELBO(0, 2), particles=2, options=PAIRS, bound=True),
}
# Pyro's own, of programs for which it is right: they show that programs and comparison are.
CONTROLS: dict[str, Config] = {
    "pyro": Config(Trace_ELBO, options={"allowed": Allowed(costs=False, dropped=False)}),
    "pyro_vectorised": Config(
        lambda: Trace_ELBO(**VECTORISED),
        lambda: Trace_ELBO(**VECTORISED),
        options={**PAIRS, "allowed": Allowed(left=False, escapes=False, costs=False, dropped=False)},
    ),
}


@dataclass(frozen=True)
class Verdict:
    """What was found.

    ``kind`` is ``served``, ``failed`` (a wrong gradient), ``crash`` (an error where stock Pyro runs) or ``skipped``;
    ``error`` is the largest error of a component relative to the largest cost of a state, at least 1.
    """

    kind: str
    detail: str = ""
    error: float = 0.0

    @property
    def is_bad(self) -> bool:
        return self.kind in ("failed", "crash")


class TooLarge(Exception):
    """Too many outcomes."""


def draw(seed: int, config: str, **more: Any) -> Program:
    """The program of a seed for a configuration."""
    return random_program(seed, **{**({**CONFIGS, **CONTROLS})[config].options, **more})


def check(program: Program, config: str) -> Verdict:
    """Compares the expected gradient of a step, after some steps of training, with the exact one.

    Args:
        program: The program.
        config: Name of a configuration.

    Returns:
        The verdict.
    """
    chosen = {**CONFIGS, **CONTROLS}[config]
    try:
        truth = bound_gradient(program) if chosen.bound else program.changed if chosen.changes else program.exact
    except Exception as error:
        return Verdict("skipped", f"no exact gradient: {_headline(error)}")
    with warnings.catch_warnings(), pyro.validation_enabled(program.seed % 2 == 0):
        warnings.simplefilter("ignore")
        try:
            found = _changed_gradient(program, chosen) if chosen.changes else _trained_gradient(program, chosen)
        except TooLarge:
            return Verdict("skipped", "too many outcomes")
        except BPQError as error:
            return Verdict("skipped", _headline(error))
        except Exception as error:
            reason = _fails_in_pyro(program, chosen)
            return Verdict("skipped", f"Pyro too: {reason}") if reason else Verdict("crash", _headline(error))
    if any(name not in found or not bool(found[name].isfinite().all()) for name in truth):
        return Verdict("failed", "a gradient is missing or not finite", math.inf)
    errors = {name: float((found[name] - g).abs().max()) for name, g in truth.items() if g.numel()}
    name = max(errors, key=lambda key: errors[key])
    if errors[name] <= TOLERANCE:
        return Verdict("served", error=errors[name])
    error = errors[name] / largest_cost(program)
    detail = f"{name}: exact {_short(truth[name])}, expected {_short(found[name])}"
    return Verdict("failed" if error > TOLERANCE else "served", detail, error)


def _headline(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"


def _short(tensor: Tensor) -> str:
    return str([round(number, 5) for number in tensor.flatten().tolist()])


# The expected gradient.


def _trained_gradient(program: Program, config: Config) -> dict[str, Tensor]:
    elbo, noise = config.make(), ChoiceNoise()
    guide = program.guide
    if config.estimator is not None:
        guide = where_it_serves(guide, config.estimator, config.particles)
    num_states = program.num_states
    pyro.clear_param_store()
    pyro.set_rng_seed(program.seed)
    if program.seed % 3:
        # Else parameters are made in the steps themselves.
        with torch.no_grad():
            poutine.replay(program.model, trace=poutine.trace(program.guide).get_trace())()
    with enumerable_noise(noise):
        for _ in range(3 + program.seed % 4):
            elbo.loss_and_grads(program.model, guide)
        if hasattr(elbo, "eval"):
            elbo.eval()
        if num_states ** (1 + draws_again(elbo)) > MOST_OUTCOMES:
            raise TooLarge
        return expectation(lambda: elbo, program.model, guide, noise)


def _changed_gradient(program: Program, config: Config) -> dict[str, Tensor]:
    """The expected gradient of the step after a change: each of its outcomes has an objective of its own."""
    assert program.turn is not None
    model, guide, turn, noise = program.model, program.guide, program.turn, ChoiceNoise()
    pyro.clear_param_store()
    args = turn(0)
    with torch.no_grad():
        for _ in iter_outcomes(lambda: guide(*args), num_outcomes=UNLIMITED):
            pass

    def trained() -> Any:
        args = turn(0)
        pyro.set_rng_seed(program.seed)
        elbo = config.make()
        with enumerable_noise(ChoiceNoise()):
            for _ in range((1, 3, 4, 6)[program.seed % 4]):
                elbo.loss_and_grads(model, guide, *args)
        return elbo

    # Two particles where the number is open.
    with mock.patch.object(rules, "FEW_PARTICLES", 2), enumerable_noise(noise):
        return expectation(trained, model, guide, noise, lambda: turn(1))


def draws_again(elbo: Any) -> bool:
    """Whether an estimator runs the programs once more, with new draws."""
    needs = [known["estimator"].needs for known in getattr(elbo, "info", {}).values()]
    return any("program" in found and "hindsight" not in found for found in needs)


def expectation(
    make: Callable[[], Any],
    model: Any,
    guide: Any,
    noise: ChoiceNoise,
    turn: Callable[[], tuple[Any, ...]] = tuple,
) -> dict[str, Tensor]:
    """As :func:`pyro_bpq.testing.expected_gradient`, without its checks, which take time.

    Each outcome takes what ``make`` gives, and then the arguments that ``turn`` gives.
    """
    mean: dict[int, Tensor] = {}
    with torch.enable_grad(), GradientReader(model, guide, None) as reader:

        def step() -> dict[int, Tensor]:
            with _unhandled():
                elbo, args = make(), turn()
            reader.clear()
            elbo.loss_and_grads(model, guide, *args)
            return reader.read()

        for count, (probability, gradient) in enumerate(iter_outcomes(step, num_outcomes=UNLIMITED, noise=noise)):
            if count > MOST_OUTCOMES:
                raise TooLarge
            for key, g in gradient.items():
                mean[key] = mean.get(key, 0.0) + probability * g
    return reader.named(mean)


@contextlib.contextmanager
def _unhandled() -> Iterator[None]:
    """No handler sees what runs within, and the global generator stays as it is."""
    stack = _PYRO_STACK[:]
    _PYRO_STACK.clear()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        _PYRO_STACK[:] = stack


# What it is compared with.


def bound_gradient(program: Program) -> dict[str, Tensor]:
    """Exact gradient of minus the bound of two samples."""
    choices = ChoiceMessenger(UNLIMITED, keep_score=True)

    def run() -> tuple[Tensor, Tensor]:
        q = poutine.trace(program.guide).get_trace()
        p = poutine.trace(poutine.replay(program.model, trace=q)).get_trace()
        log_w = prune_subsample_sites(p).log_prob_sum() - prune_subsample_sites(q).log_prob_sum()
        return torch.as_tensor(log_w), torch.stack(choices.score).sum() if choices.score else torch.zeros(())

    pyro.clear_param_store()
    with torch.enable_grad(), GradientReader(program.model, program.guide, None) as reader:
        found = [(chance * (score - score.detach()).exp(), log_w) for chance, (log_w, score) in walk(choices, run)]
    q, log_w = (torch.stack(list(column)) for column in zip(*found, strict=True))
    pair = torch.logaddexp(log_w[:, None], log_w[None]) - math.log(2)
    loss = -(q[:, None] * q * pair).sum()
    return reader.gradient(loss)


def largest_cost(program: Program) -> float:
    """Largest absolute cost of a statement in any state, at least 1."""
    largest = 1.0

    def step() -> None:
        nonlocal largest
        q = poutine.trace(program.guide).get_trace()
        p = poutine.trace(poutine.replay(program.model, trace=q)).get_trace()
        for trace in (q, p):
            trace.compute_log_prob()
            sites = [site for site in trace.nodes.values() if site["type"] == "sample"]
            largest = max([largest, *(abs(float(site["log_prob_sum"])) for site in sites)])

    with torch.no_grad():
        for _ in iter_outcomes(step, num_outcomes=UNLIMITED):
            pass
    return largest


def _fails_in_pyro(program: Program, config: Config) -> str:
    """What Pyro's own objective raises; empty where it runs."""
    elbo = config.stock()
    for seed in range(10):
        pyro.set_rng_seed(seed)
        try:
            elbo.loss_and_grads(program.model, program.guide)
        except Exception as error:
            return _headline(error)
    return ""
