r"""What was tried, what it measured and what was chosen.

All candidates are unbiased estimators of the same gradient. With a well-chosen step size, progress per second is
proportional to ``1 / (t (1 + v))``. A step takes ``t`` seconds. ``v`` is the variance of the gradient over the squared
norm of its mean. All candidates have the same mean, so the best one has the least

    J = t Σ_p E|g_p|² / s_p

over the tensors ``p`` of model and guide, with a scale ``s_p`` that all candidates share.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Any, Protocol

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_bpq.choice.candidates import BY_NAME, FIXED, Candidate, ProgramFacts, candidates_for
from pyro_bpq.reruns.shared_backward import inputs_of
from pyro_bpq.tracing.sandbox import Sandbox
from pyro_bpq.tracing.work import EAGER, Weights, Work, WorkMode

GAIN = 0.1
"""Smallest relative gain for which a choice changes."""
_BLOCKS = 4
_ERRORS = 2.0
_WARM_UP, _FIRST_STEP, _SHARE = 1, 20, 0.03
# Numbers of rounds after which candidates are compared; where it stays in doubt, the present choice goes on.
ROUNDS = (8, 16, 32, 64)
# Factor between the numbers of steps at two looks.
_LATER = 10
# Number of trials of a candidate whose work is counted, and how many times as long these take.
_COUNTED, _COUNTING = 8, 2.0
# A candidate is left out of further rounds if its ``J`` is more than so many times the best one.
HOPELESS = 2.0
# What a candidate is taken to cost before it was tried, in steps.
_GUESS = 3.0


def normalised(squares: Mapping[str, Sequence[Sequence[float]]], present: str) -> dict[str, list[float]]:
    r"""``Σ_p |g_p|² / s_p`` of each round; ``s_p`` is the mean of ``|g_p|²`` over the present choice's rounds."""
    scales = [fmean(one) for one in zip(*squares[present], strict=True)]
    weights = [1.0 / scale if scale > 0.0 else 0.0 for scale in scales]
    return {
        name: [sum(w * square for w, square in zip(weights, one, strict=True)) for one in rounds]
        for name, rounds in squares.items()
    }


def median_of_means(values: Sequence[float]) -> float:
    """A mean that single outliers do not move: the median of the means of consecutive quarters of the rounds.

    The median of shorter blocks is too low where rounds are skewed.
    """
    size = -(-len(values) // _BLOCKS)
    return median(fmean(values[i : i + size]) for i in range(0, len(values), size))


def products(seconds: Mapping[str, float], moments: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """``J`` of each candidate: less is better."""
    return {name: seconds[name] * median_of_means(rounds) for name, rounds in moments.items()}


def better_than(seconds: Mapping[str, float], moments: Mapping[str, Sequence[float]], present: str) -> str:
    """Name of the candidate with the least ``J``, or ``present`` if the gain is below :data:`GAIN` or not significant.

    Args:
        seconds: Seconds of a step, by name of the candidate.
        moments: ``Σ_p |g_p|² / s_p`` of each round, by name.
        present: Name of the present choice.
    """
    values = products(seconds, moments)
    best = min(values, key=lambda name: values[name])
    if not values[best] < (1.0 - GAIN) * values[present]:
        return present
    pairs = zip(moments[present], moments[best], strict=True)
    gains = [seconds[present] * old - seconds[best] * new for old, new in pairs]
    error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    return best if values[present] - values[best] > _ERRORS * error else present


class Trial(Protocol):
    """An objective that tries a candidate; see :class:`~pyro_bpq.TraceBackpropQ_ELBO`."""

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a step."""


@dataclass
class Measurement:
    """What is known of a candidate."""

    taken: list[Work] = field(default_factory=list)  # counted work of each step
    tries: int = 0  # number of trials
    # Squared norms of the gradient of each tensor, by trial, without the first ones.
    squares: list[list[float]] = field(default_factory=list)

    def seconds(self, is_steered: bool, weights: Weights) -> float:
        """Counted seconds of a step: the median in steered programs, whose steps differ; else the least.

        Some steps track or compare runs, and take longer. The least leaves these out.
        """
        found = [work.step_seconds(weights) for work in self.taken]
        return median(found[_WARM_UP:] or found) if is_steered else min(found)

    @property
    def making(self) -> int:
        """Number of operators that a compiled step would be made of."""
        return min(work.operators for work in self.taken)

    @property
    def is_warm(self) -> bool:
        """Whether critics and baselines have been taught by the first trials."""
        return self.tries > _WARM_UP


class MeasuredChoice:
    """Measures candidates beside training, and says which one is to go on.

    A trial takes a step of the candidate on the arguments of the present step and asks for its gradients alone: nothing
    is added to ``.grad``, parameters stay as they are, generators and buffers of modules are put back. Time is counted
    and not read from a clock, so the same seed chooses the same. Trials take at most 3 % of the counted time so far.
    They run eagerly also where training steps are compiled; a change then has to win back its compilation in as many
    steps as were taken so far.

    Args:
        make: Makes an objective for a candidate.
        seed: Where the generators of trials start from.
        pinned: The candidate that the user chose, or ``None`` to measure.
        tries_all: Whether to try all candidates of a program, or only those that were the best on some of its kind.

    Attributes:
        is_measured: Whether the choice is left to measurement.
        chosen: The present choice.
        candidates: What is tried, the default first; empty before the first look.
        looks: Number of looks that are over.
        dropped: Why a candidate is not tried, by name.
        known: What was measured in this look, by name.
        hopeless: What is left out of the further rounds of this look, by name.
        report: What the last look found, a line for each candidate, by name.
        share: Largest share of the time so far that trials take.
        weights: Seconds that the work of a training step takes: :data:`~pyro_bpq.tracing.work.EAGER` or ``COMPILED``.
    """

    def __init__(
        self, make: Callable[[Candidate], Trial], seed: int, pinned: Candidate | None, tries_all: bool = False
    ) -> None:
        self._make, self._seed, self._tries_all = make, seed, tries_all
        self.is_measured = pinned is None
        self.chosen = FIXED if pinned is None else pinned
        self.candidates: tuple[Candidate, ...] = ()
        self.looks = 0
        self.dropped: dict[str, str] = {}
        self.known: dict[str, Measurement] = {}
        self.hopeless: set[str] = set()
        self.report: dict[str, str] = {}
        self.share, self.weights = _SHARE, EAGER
        self._start, self._since, self._spent, self._tries = _FIRST_STEP, 0, 0.0, 0
        self._trials: dict[str, Trial] = {}
        self._is_steered = False
        self._leaves: list[Tensor] = []

    def __str__(self) -> str:
        if not self.is_measured:
            return f"{self.chosen.name}, not measured"
        number = f"{self.looks} look{'' if self.looks == 1 else 's'}"
        dropped = [f"{name}: not tried, {reason}" for name, reason in self.dropped.items()]
        return "\n    ".join([f"{self.chosen.name}, after {number}", *self.report.values(), *dropped])

    def __repr__(self) -> str:
        return f"MeasuredChoice({self.chosen.name!r}, {self.looks} looks)"

    def __getstate__(self) -> dict[str, Any]:
        # Trials belong to the process.
        return {**vars(self), "_trials": {}, "_leaves": []}

    # When.

    def begin(self, facts: ProgramFacts) -> None:
        """Lists what is tried, once the program is known."""
        self.candidates, self._is_steered = candidates_for(facts, self._tries_all), facts.is_steered

    def is_due(self, num_steps: int) -> bool:
        """Whether something may be tried after so many steps."""
        if not self.is_measured or num_steps < self._start:
            return False
        if not self.candidates:
            return True
        if len(self._tried()) == 1:
            return False
        if not self._of(self.chosen).taken:
            return True
        own = self._seconds(self.chosen.name, EAGER)
        cost = sum(self._guess(candidate, own) for candidate in self._next())
        so_far = self._seconds(self.chosen.name, self.weights) * (num_steps - self._since)
        return self._spent + cost <= self.share * so_far

    def counting(self, candidate: Candidate | None = None) -> WorkMode | contextlib.nullcontext[None]:
        """Counts the work of a step: that of the first trials of a candidate, for ``None`` the present one."""
        is_known = len(self._of(candidate or self.chosen).taken) >= _COUNTED
        return contextlib.nullcontext() if is_known else WorkMode()

    def look(
        self, present: Trial, work: Work | None, model: Any, guide: Any, args: Any, kwargs: Any, num_steps: int
    ) -> Candidate | None:
        """Tries what is due."""
        if len(self._tried()) == 1:
            return None
        if work is not None:
            self.known.setdefault(self.chosen.name, Measurement()).taken.append(work)
        for candidate in self._next():
            self._try(candidate, present, model, guide, args, kwargs)
        tried = self._tried()
        rounds = min(len(self._of(candidate).squares) for candidate in tried)
        if rounds not in ROUNDS:
            return None
        before, moments = self.chosen, self._moments(rounds)
        seconds = {name: self._seconds(name, self.weights) for name in moments}
        for name, rounds_of in moments.items():
            squared = f"squared gradient {median_of_means(rounds_of):.3g}"
            self.report[name] = f"{name}: {1e3 * seconds[name]:.3g} ms counted, {squared}"
        best, found = better_than(seconds, moments, before.name), products(seconds, moments)
        limit = HOPELESS * min(found.values())
        self.hopeless |= {name for name, value in found.items() if value > limit and name != before.name}
        if best != before.name:
            saved = num_steps * seconds[before.name] * (1.0 - found[best] / found[before.name])
            if saved < self.weights.making * self.known[best].making:
                self.report[best] += ", would not win back its compilation"
                best = before.name
        if best == before.name and rounds < ROUNDS[-1] and len(self._tried()) > 1:
            return None
        self.chosen = next(candidate for candidate in tried if candidate.name == best)
        self.looks += 1
        self._start, self._since, self._spent = _LATER * num_steps, num_steps, 0.0
        self.known, self.hopeless, self._leaves = {}, set(), []
        if self.looks > 1:
            self._trials = {}
        # What goes on is the objective itself.
        self._trials.pop(best, None)
        return self.chosen if self.chosen != before else None

    # Trials.

    def _of(self, candidate: Candidate) -> Measurement:
        return self.known.get(candidate.name, Measurement())

    def _seconds(self, name: str, weights: Weights) -> float:
        return self.known[name].seconds(self._is_steered, weights)

    def _tried(self) -> list[Candidate]:
        """What is tried, the present choice first."""
        gone = self.dropped.keys() | self.hopeless
        found = [candidate for candidate in self.candidates if candidate.name not in gone]
        return sorted(found, key=lambda candidate: candidate.name != self.chosen.name)

    def _next(self) -> list[Candidate]:
        """What is tried next: the first time one after the other, then all together."""
        tried = self._tried()
        unknown = [candidate for candidate in tried if not self._of(candidate).is_warm]
        return unknown[:1] or tried

    def _guess(self, candidate: Candidate, own: float) -> float:
        known = self._of(candidate)
        # The first step also finds out in which way particles run.
        factor = _COUNTING if len(known.taken) < _COUNTED else 1.0
        return factor * (self._seconds(candidate.name, EAGER) if known.is_warm else _GUESS * own)

    def _moments(self, rounds: int) -> dict[str, list[float]]:
        size = len(self._leaves)
        squares = {
            candidate.name: [row + [0.0] * (size - len(row)) for row in self._of(candidate).squares[:rounds]]
            for candidate in self._tried()
        }
        return normalised(squares, self.chosen.name)

    def _try(self, candidate: Candidate, present: Trial, model: Any, guide: Any, args: Any, kwargs: Any) -> None:
        """A step of a candidate; the first ones only teach its critics and baselines."""
        name, store = candidate.name, set(pyro.get_param_store().keys())
        own = self.known.setdefault(name, Measurement())
        self._tries += 1
        try:
            with (
                Sandbox(self._seed * 1_000_003 + self._tries),
                # SVI would hand parameters of a trial to its optimiser.
                poutine.block(hide_types=["param"]),
                warnings.catch_warnings(),
                self.counting(candidate) as mode,
            ):
                warnings.simplefilter("ignore")
                trial = present if candidate == self.chosen else self._trials.get(name)
                if trial is None:
                    trial = self._trials[name] = self._make(candidate)
                loss = trial.differentiable_loss(model, guide, *args, **kwargs)
                leaves = inputs_of(loss)
                gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()
        except Exception as error:
            if candidate == self.chosen:
                raise
            self.dropped[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self._trials.pop(name, None)
            return
        finally:
            for created in set(pyro.get_param_store().keys()) - store:
                del pyro.get_param_store()[created]
        if mode is None:
            self._spent += self._seconds(name, EAGER)
        else:
            self._spent += _COUNTING * mode.total.step_seconds()
            if candidate != self.chosen or self.weights is not EAGER:
                # What the present choice takes, its learning included, is counted in eager steps of training.
                own.taken.append(mode.total)
        own.tries += 1
        if own.is_warm:
            own.squares.append(self._squares(leaves, gradients))

    def _squares(self, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[float]:
        """Squared norms of gradients, each tensor at a place of its own."""
        places = {id(leaf): i for i, leaf in enumerate(self._leaves)}
        for leaf in leaves:
            if id(leaf) not in places:
                places[id(leaf)] = len(self._leaves)
                self._leaves.append(leaf)
        found = [0.0] * len(self._leaves)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                found[places[id(leaf)]] = float(gradient.detach().square().sum())
        return found

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The choice and when it is looked at again, as plain values."""
        return {
            "chosen": self.chosen.name,
            "looks": self.looks,
            "start": self._start,
            "report": list(self.report.values()),
        }

    def load_state_dict(self, state: Mapping[str, Any], num_steps: int) -> None:
        """Inverse of :meth:`state_dict`; a pinned choice stays, and one that is unknown is measured anew."""
        if not self.is_measured or state["chosen"] not in BY_NAME:
            return
        self.chosen, self.looks, self._start = BY_NAME[state["chosen"]], state["looks"], state["start"]
        self.report, self._since = {line.split(":")[0]: line for line in state["report"]}, num_steps
