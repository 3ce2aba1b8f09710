r"""Tree search over the executions of a program: enumerates every joint outcome of its draws.

A run of a program is a path of choices. The first run takes the first value of every choice that it meets. Each later
run repeats a prefix of the path and takes the next value at its end. So sites may exist in some branches only.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pyro_bpq.errors import StructureChangedError, TooManyOutcomesError, UnsupportedProgramError, UnsupportedSiteError

T = TypeVar("T")

_MAX_MISSING_PROBABILITY = 1e-5


class TwoPoint(dist.Normal):
    r"""Replaces a reparameterised distribution in tests whose expectations must be exact.

    The value is a differentiable function of two-point noise,

        x = loc + scale · ε,   P(ε = -1) = P(ε = +1) = 1/2,

    and the log-probability is that of ``Normal(loc, scale)``. It is a formal cost, not the density of
    ``x``: an estimator that weighs values by the law of a child, as ``Hindsight`` does, is biased above it. The noise
    has the first two moments of a standard normal. So ``E[∂ log_prob] = 0`` holds for ``loc`` and for ``scale``, and
    estimators that drop the score of a pathwise site stay unbiased.

    Args:
        loc: Mean, any shape.
        scale: Standard deviation, positive; broadcast with ``loc`` to the ``batch_shape``.
        validate_args: As in ``torch.distributions``.
    """

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws a value without a gradient."""
        return self.rsample(sample_shape)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws the noise and returns ``loc + scale * noise``."""
        shape = self._extended_shape(sample_shape)
        with torch.no_grad():
            noise = 2 * torch.bernoulli(self.loc.new_full(shape, 0.5)) - 1
        return self.transport(noise)

    def transport(self, noise: Tensor) -> Tensor:
        """Returns ``loc + scale * noise``, differentiable in ``loc`` and ``scale``."""
        return self.loc + self.scale * noise


class _Choice:
    """One choice on the current path: ``num_elements`` independent picks among ``num_values``."""

    def __init__(self, name: str, log_probs: Tensor) -> None:
        self.what = (name, *log_probs.shape)
        self.is_left = False
        # A recording of the program would take it for a number that steers the program.
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            rows = log_probs.exp().T.tolist()
        # torch clamps the probabilities of a categorical distribution to eps; such a value counts as impossible.
        zero = 2 * torch.finfo(log_probs.dtype).eps
        self._rest: Iterator[tuple[tuple[int, float], ...]] = itertools.product(
            *([(value, p) for value, p in enumerate(row) if p > zero] for row in rows)
        )
        if not self.advance():
            raise UnsupportedSiteError(
                f"Site {name!r}: no value has a positive probability. Check its parameters for NaN."
            )

    def leave(self) -> None:
        """Stays at its index, since nothing depends on it."""
        self.is_left, self.probability, self._rest = True, 1.0, iter(())

    def advance(self) -> bool:
        """Moves on to the next possible index; returns False when there is none."""
        if (found := next(self._rest, None)) is not None:
            self.index = tuple(value for value, _ in found)
            self.probability = math.prod(p for _, p in found)  # given the choices before it
        return found is not None


class ChoiceMessenger(Messenger):
    """Replaces every draw of a program by the choices of the current path.

    As the outermost handler of the step it sees distributions that the particle plate has expanded, and all other
    handlers treat its values as ordinary samples. With ``keep_score``, ``score`` collects the log-probability.
    """

    def __init__(self, num_outcomes: int, keep_score: bool = False) -> None:
        super().__init__()
        self.num_outcomes = num_outcomes
        self.keep_score = keep_score
        self.score: list[Tensor] = []
        self._path: list[_Choice] = []
        # The next choice, and the end of those that this run has met: between them lies what was undone.
        self._position = self._met = 0

    def advance(self) -> bool:
        """Moves on to the next path; returns False when all have been taken."""
        while self._path and not self._path[-1].advance():
            self._path.pop()
        return bool(self._path)

    @property
    def probability(self) -> float:
        """Probability of the path."""
        return math.prod(choice.probability for choice in self._path)

    def choose(self, name: str, num_values: int, num_elements: int, log_probs: Callable[[], Tensor]) -> tuple[int, ...]:
        """Returns the index of every element at the next choice of the path.

        ``log_probs`` is called when the choice is first met, and returns shape ``(num_values, num_elements)``.
        """
        what = name, num_values, num_elements
        while self._position < self._met and self._path[self._position].is_left:
            self._position += 1
        if self._position < self._met and self._path[self._position].what != what:
            self.leave_undone()
        if self._position == len(self._path):
            taken = (choice.what[1:] for choice in self._path if not choice.is_left)
            size = math.prod(values**elements for values, elements in taken)
            if size * num_values**num_elements > self.num_outcomes:
                # A tree of which each path has a product of at most n has at most n paths (Kraft's inequality).
                raise TooManyOutcomesError(
                    f"More than num_outcomes={self.num_outcomes} joint outcomes at site {name!r}, with {num_elements} "
                    f"elements of {num_values} values. Use a smaller program, fewer particles or a larger "
                    "num_outcomes; for large programs use sample_gradients and z_scores."
                )
            with torch.no_grad():
                self._path.append(_Choice(name, log_probs()))
        choice = self._path[self._position]
        if choice.what != what:
            self.raise_changed(f"site {name!r} with {num_elements} elements of {num_values} values")
        self._position += 1
        self._met = max(self._met, self._position)
        return choice.index

    def leave_undone(self) -> None:
        """Takes none of the choices that were met only by a run that was undone."""
        for choice in self._path[self._position : self._met]:
            choice.leave()
        self._position = self._met

    def raise_changed(self, found: str) -> NoReturn:
        """Refuses a program that is not deterministic given its choices."""
        name, num_values, num_elements = self._path[self._position].what
        raise StructureChangedError(
            f"Under the same choices the program met {found} where it had met site {name!r} with "
            f"{num_elements} elements of {num_values} values. It must be deterministic given what it draws "
            "through pyro.sample: make it free of counters, caches and noise of its own, and call elbo.eval() first."
        )

    def _pyro_bpq_mark(self, msg: Any) -> None:
        msg["value"], msg["done"] = (self._position, len(self.score)), True

    def _pyro_bpq_rewind(self, msg: Any) -> None:
        self._position, kept = msg["args"][0]
        del self.score[kept:]

    def _pyro_bpq_draw(self, msg: Any) -> None:
        name, fn = msg["args"][:2]
        msg["value"] = self._value(name, fn)
        msg["done"] = msg["value"] is not None

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] or msg["done"] or msg["value"] is not None:
            return
        name, fn = msg["name"], msg["fn"]
        if isinstance(fn, _Subsample):
            msg["value"] = self._subset(name, fn)
            return
        if msg["args"] or msg["kwargs"]:
            raise UnsupportedSiteError(
                f"Site {name!r}: arguments of pyro.sample other than obs and infer cannot be enumerated. "
                "Expand the distribution instead: fn.expand_by(shape)."
            )
        msg["value"] = self._value(name, fn)

    def _subset(self, name: str, fn: _Subsample) -> Tensor | None:
        size, chosen = fn.size, fn.subsample_size
        if chosen is None or chosen >= size:
            return None  # Pyro draws nothing here
        count = math.comb(size, chosen)
        found = self._indices(name, count, torch.Size(), lambda: torch.full((count, 1), -math.log(count)).double())
        subsets = torch.combinations(torch.arange(size, device=fn.device), chosen)
        return subsets[found.to(fn.device)]

    def _value(self, name: str, fn: Any) -> Tensor | None:
        core = fn
        # Elements are independent, and masked elements are drawn too.
        while isinstance(core, (torch.distributions.Independent, dist.MaskedDistribution)):
            core = core.base_dist
        if isinstance(core, dist.Delta):
            return None  # one outcome
        # The shape of a distribution that was built under provenance tracking is a bare tuple.
        shape = torch.Size(core.batch_shape)
        if isinstance(core, TwoPoint) and core.has_rsample:
            even = torch.full((2, shape.numel()), -math.log(2.0), dtype=torch.float64)
            return core.transport(2 * self._indices(name, 2, shape, lambda: even).to(core.loc) - 1)
        support = _support(name, core)
        index = self._indices(name, len(support), shape, lambda: _log_probs(core, support))
        value = support.reshape((len(support), *core.event_shape))[index.to(support.device)]
        if self.keep_score:
            self.score.append(core.log_prob(value).sum())
            return value
        # Computed from a real draw, so that TraceGraph_ELBO sees the parents of the site.
        with torch.random.fork_rng(devices=[]):
            drawn = core.sample()
        return torch.where(torch.ones((), dtype=torch.bool, device=value.device), value, drawn)

    def _indices(self, name: str, num_values: int, shape: torch.Size, log_probs: Callable[[], Tensor]) -> Tensor:
        """The index of every element, in the given shape."""
        return torch.tensor(self.choose(name, num_values, shape.numel(), log_probs), dtype=torch.long).reshape(shape)


def _support(name: str, core: Any) -> Tensor:
    """Values of one element, shape ``(num_values, 1, ..., 1) + event_shape``."""
    if isinstance(core, dist.Binomial):
        # Elements may have total counts of their own.
        numbers = torch.arange(1.0 + float(core.total_count.max()), dtype=core.probs.dtype, device=core.probs.device)
        return numbers.reshape(-1, *(1,) * len(core.batch_shape))
    if getattr(core, "has_enumerate_support", False) and not core.has_rsample:
        with contextlib.suppress(NotImplementedError):
            return core.enumerate_support(expand=False)
    raise UnsupportedSiteError(
        f"Site {name!r} ({type(core).__name__}) with batch shape {tuple(core.batch_shape)} and event shape "
        f"{tuple(core.event_shape)} has no finite support that can be enumerated. In the program under test, use a "
        "discrete distribution, or pyro_bpq.testing.TwoPoint(loc, scale) in place of a reparameterised one."
    )


def _log_probs(core: Any, support: Tensor) -> Tensor:
    """Log-probability of every value of every element, shape ``(num_values, num_elements)``."""
    if isinstance(core, dist.Binomial):
        is_beyond = support > core.total_count
        table = core.log_prob(torch.minimum(support, core.total_count)).masked_fill(is_beyond, -math.inf)
    else:
        table = core.log_prob(support)
    return table.expand((len(support), *core.batch_shape)).reshape(len(support), -1)


class ChoiceNoise:
    """A source of finite noise whose outcomes can be enumerated.

    An estimator with noise of its own takes such an object and draws with :meth:`draw_choice`. If the object is
    passed to :func:`expected_gradient` as ``noise=``, its draws are part of the outcome. At any other
    time they come from a generator of its own, never from the global one.

    Args:
        seed: Seed of that generator.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.choices: ChoiceMessenger | None = None

    def __repr__(self) -> str:
        return f"ChoiceNoise(seed={self._generator.initial_seed()})"

    def draw_choice(self, probabilities: Tensor) -> Tensor:
        """Draws one index per row.

        Args:
            probabilities: Shape ``(*rows, num_values)``, each row sums to one; detached.

        Returns:
            Indices, integers of shape ``rows``.
        """
        *rows, num_values = probabilities.shape
        flat = probabilities.detach().reshape(-1, num_values)
        if self.choices is None:
            drawn = torch.multinomial(flat.cpu(), 1, generator=self._generator)
            return drawn.reshape(rows).to(probabilities.device)
        index = self.choices.choose("noise", num_values, flat.shape[0], lambda: flat.log().T)
        return torch.tensor(index, dtype=torch.long, device=probabilities.device).reshape(rows)


def iter_outcomes(
    step: Callable[[], T], *, num_outcomes: int = 200_000, noise: ChoiceNoise | None = None
) -> Iterator[tuple[float, T]]:
    """Runs ``step`` once for every joint outcome of its draws.

    Args:
        step: Runs Pyro programs, any number of times; must be deterministic given their draws.
        num_outcomes: Limit on the number of outcomes.
        noise: Source of further noise that belongs to the step.

    Yields:
        Probability of the outcome and the return value of ``step``; the probabilities sum to one.

    Raises:
        TooManyOutcomesError: If there are more than ``num_outcomes`` outcomes.
        UnsupportedSiteError: If a site has no finite support.
        UnsupportedProgramError: If ``step`` draws from the global generator outside of the choices.
        StructureChangedError: If ``step`` is not deterministic given its choices.
    """
    return walk(ChoiceMessenger(num_outcomes), step, noise)


def walk(
    choices: ChoiceMessenger, step: Callable[[], T], noise: ChoiceNoise | None = None
) -> Iterator[tuple[float, T]]:
    """Runs ``step`` on every path of ``choices``; see :func:`iter_outcomes`."""
    total, is_left = 0.0, True
    while is_left:
        result, has_drawn = _run(choices, step, noise)
        if has_drawn and not total:  # e.g. Pyro's guess of max_plate_nesting draws once per object
            choices._path.clear()
            result, has_drawn = _run(choices, step, noise)
        choices.leave_undone()
        if choices._position < len(choices._path):
            choices.raise_changed("nothing")
        if has_drawn:
            raise UnsupportedProgramError(
                "The step drew from torch's global generator behind the choices, so its expectation cannot be "
                "computed. Look for a site hidden by poutine.block, dropout, or an estimator with noise of its "
                "own: let that draw through a ChoiceNoise, passed as noise=."
            )
        total += choices.probability
        yield choices.probability, result
        is_left = choices.advance()
    if abs(total - 1) > _MAX_MISSING_PROBABILITY:
        raise UnsupportedProgramError(
            f"The probabilities of all outcomes sum to {total}, not to 1: some distribution is not normalised."
        )


def _run(choices: ChoiceMessenger, step: Callable[[], T], noise: ChoiceNoise | None) -> tuple[T, bool]:
    """Runs ``step`` once; returns its result and whether it moved the global generator, which is restored."""
    state, noise = torch.get_rng_state(), noise or ChoiceNoise()
    choices._position, choices._met, choices.score = 0, 0, []
    noise.choices = choices
    try:
        with choices:
            result = step()
    finally:
        noise.choices = None
        has_drawn = not torch.equal(state, torch.get_rng_state())
        torch.set_rng_state(state)
    return result, has_drawn
