"""Small problems for one estimator call: contexts and programs without Pyro, with known gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, initial_statistics
from pyro_bpq.estimators.hindsight import Changes, HeldCosts
from pyro_bpq.rollout.features import Components
from pyro_bpq.step.signal_table import SIGNALS

_NAMES = MappingProxyType({"bernoulli": "Bernoulli", "one_hot": "OneHotCategorical", "categorical": "Categorical"})
# Signals that a problem has, or that none of its estimators gets.
_STAND_INS = frozenset(
    {"program", "hindsight", "advantage", "q_value", "q_slope", "moved_value", "baseline", "crossed"}
)


class FakeProgram:
    """A :class:`~pyro_bpq.estimators.base.SiteProgram` with a cost in closed form."""

    rows_meet = False

    def __init__(
        self, problem: Problem, value: Tensor, generator: torch.Generator, later: float = 0.0, seed: int = 0
    ) -> None:
        self.problem, self.value, self.generator, self.later = problem, value, generator, later
        self._source = torch.Generator().manual_seed(seed)
        self._held: Tensor | None = None

    def cost(self, value: Tensor) -> Tensor:
        """The costs, with noise."""
        with torch.no_grad():
            cost = self.problem.cost(value)
            return cost + self.later * (self._noise(cost) if self._held is None else self._held)

    def independent(self) -> Tensor:
        """Costs of values drawn afresh, with noise."""
        index, probabilities = self.problem.outcomes(1)
        cost = self.cost(self.problem.components.value(index[:, 0]).to(self.value.dtype))
        lead = self.value.shape[: self.value.dim() - self.problem.components.value_ndim]
        drawn = torch.multinomial(probabilities, lead[1:].numel(), replacement=True, generator=self._source)
        own = cost[drawn].reshape(lead)
        return own + self.later * self._noise(own)

    def remaining(self) -> Tensor:
        """The same as :meth:`independent`, because no cost is known at every value."""
        return self.independent()

    def _noise(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._source, dtype=like.dtype).to(like.device)

    def mean_field(self) -> FakeProgram:
        """The program itself: nothing is sampled downstream that could take its mean."""
        return self

    def held(self, value: Tensor) -> FakeProgram:
        """The same program, in which the noise of sites downstream stays the same in all runs."""
        held = FakeProgram(self.problem, self.value, self.generator, self.later)
        held._held = self._noise(self.problem.cost(value).detach())
        return held

    def gradient(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The costs, with noise, and their slopes."""
        if not self.problem.is_smooth:
            return self.cost(value), torch.zeros_like(value)
        with torch.enable_grad():
            leaf = value.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.problem.cost(leaf).sum(), leaf)
        return self.cost(value), slope

    def slope(self) -> Tensor:
        """Slopes at the sampled values."""
        return self.gradient(self.value)[1]

    def from_index(self, index: Tensor) -> Tensor:
        """Values from indices."""
        return self.problem.components.value(index).to(self.value.dtype)

    def stack(self, pick: Callable[[Any], Tensor], event_ndim: int) -> Tensor:
        """Not known here: the problem has no distributions."""
        raise NotImplementedError("A FakeProgram has no distributions; finite sites read context.log_probs.")


@dataclass(frozen=True)
class Problem:
    r"""A site of ``D`` components of ``K`` values with a cost that is not a sum over components.

    f(x) = 1.5 + 2 a·x + ½ x·B x + 0.7 tanh(1.5 c·x)
    """

    kind: str = "bernoulli"  # `"bernoulli"`, `"one_hot"` or `"categorical"`
    size: int = 3  # number of components `D`; 1 for a scalar site (`is_scalar`)
    cardinality: int = 2  # number of values `K`
    is_scalar: bool = False  # whether the site has no event dimension for its components
    is_smooth: bool = True  # whether the cost has a gradient in the value
    sites: int = 2  # number of like-shaped sites `G`; each has parameters of its own
    particles: int = 2  # number of particles `M`

    @property
    def components(self) -> Components:
        """The components of a site."""
        return Components(self.kind, () if self.is_scalar else (self.size,), self.cardinality)

    @property
    def info(self) -> SiteInfo:
        """The facts about a site that an estimator gets."""
        return SiteInfo("a", _NAMES[self.kind], False, self.components, self.particles)

    @property
    def width(self) -> int:
        """Number of entries of the encoded value that the cost reads."""
        return self.size if self.kind == "bernoulli" else self.size * self.cardinality

    def logits(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Irregular logits ``(G, D, K)``; the logit of a Bernoulli's first value is zero."""
        count = self.sites * self.size * self.cardinality
        table = _irregular(count, 0.4).reshape(self.sites, self.size, self.cardinality).to(dtype)
        return table - table[..., :1] if self.kind == "bernoulli" else table

    def cost(self, value: Tensor) -> Tensor:
        """Costs of values ``(..., event)``, in nats."""
        lead = value.shape[: value.dim() - self.components.value_ndim]
        if self.kind == "categorical":
            value = one_hot(value.long(), self.cardinality).to(value.dtype)
        flat = value.reshape(*lead, self.width)
        weights = _irregular(self.width * (self.width + 2), 1.3).to(flat.dtype).to(flat.device)
        a, c, b = weights[: self.width], weights[self.width : 2 * self.width], weights[2 * self.width :]
        product = flat @ b.reshape(self.width, self.width)
        return 1.5 + 2.0 * (flat @ a) + 0.5 * (product * flat).sum(-1) + 0.7 * torch.tanh(1.5 * (flat @ c))

    def context(
        self,
        rows: tuple[int, ...],
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        later: float = 0.0,
        index: Tensor | None = None,
    ) -> tuple[SiteContext, Tensor]:
        """Draws values and makes the context of a call, and the leaf ``(G, M, rows, D, K)`` of logits below it.

        Half of the cost counts as immediate, with an exact table. The critic's predictions and the correction are
        meaningless numbers that do not depend on the values. Sites downstream add noise of standard deviation ``later``
        to a cost. ``index`` gives values ``(G, M, rows, D)`` in place of draws.
        """
        generator = torch.Generator().manual_seed(seed)
        batch = (self.sites, self.particles, *rows)
        fixed = self.logits(dtype).reshape(self.sites, *(1,) * (len(rows) + 1), self.size, self.cardinality)
        leaf = fixed.expand(*batch, self.size, self.cardinality).clone().requires_grad_()
        log_probs = leaf.log_softmax(-1)
        if index is None:
            probs = log_probs.detach().double().exp().reshape(-1, self.cardinality)
            index = torch.multinomial(probs, 1, generator=generator).reshape(*batch, self.size)
        value = self.components.value(index).to(dtype)
        program = FakeProgram(self, value, generator, later, seed + 1)

        def nonsense(*shape: int) -> Tensor:
            table = torch.randn(self.sites, *shape, generator=generator, dtype=torch.float64).to(dtype)
            return table.reshape(self.sites, *(1,) * (len(rows) + 1), *shape).expand(*batch, *shape)

        cost = program.cost(value)
        moved = [index.index_fill(-1, torch.tensor([d]), k) for d in range(self.size) for k in range(self.cardinality)]
        costs = [self.cost(self.components.value(one).to(dtype)).detach() for one in moved]
        table = torch.stack(costs, -1).reshape(*batch, self.size, self.cardinality)
        names = tuple("abcdefgh"[: self.sites])
        # All costs read the site, and no other site does. Half of them count as costs that read a site downstream.
        sampled = self.cost(value).detach()
        change = 0.5 * (table - sampled[..., None, None])
        held = HeldCosts(
            names, log_probs, index, Changes(torch.zeros_like(change), change, change), settled=0.5 * sampled
        )
        score = log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1).sum(-1)
        # Far from right, as the critics are, but no function of the value.
        learned, level, correction = nonsense(self.size, self.cardinality), nonsense(), nonsense()
        exact_correction = nonsense()
        signals = {"program": program, "hindsight": held, "advantage": cost - level, "q_value": level}
        context = SiteContext(
            names=names,
            score=score,
            cost=cost,
            num_particles=self.particles,
            log_probs=log_probs,
            index=index,
            exact=0.5 * table,
            exact_cost=0.5 * sampled,
            learned=learned,
            level=level,
            correction=correction,
            exact_correction=exact_correction,
            signals={**signals, **{name: nonsense().abs() for name in new_signals()}},
        )
        return context, leaf

    def outcomes(self, particles: int) -> tuple[Tensor, Tensor]:
        """All joint values of a number of particles.

        Returns:
            Indices ``(outcomes, particles, D)``, and their probabilities for every site, ``(G, outcomes)``.
        """
        joint = itertools.product(range(self.cardinality), repeat=particles * self.size)
        index = torch.tensor(list(joint)).reshape(-1, particles, self.size)
        log_probs = self.logits().log_softmax(-1)[:, None, None].expand(-1, *index.shape[:2], -1, -1)
        chosen = index.expand(self.sites, *index.shape).unsqueeze(-1)
        return index, log_probs.gather(-1, chosen).flatten(2).sum(-1).exp()

    def exact_gradient(self) -> Tensor:
        """Gradient of one particle's expected cost to the logits, ``(G, D, K)``, by enumeration."""
        index, probabilities = self.outcomes(1)
        costs = self.cost(self.components.value(index[:, 0]).to(probabilities.dtype))
        # In closed form: Σ_x q(x) f(x) (onehot(x) - q).
        score = one_hot(index[:, 0], self.cardinality) - self.logits().softmax(-1).unsqueeze(1)
        return ((probabilities * costs)[..., None, None] * score).sum(1)


def new_signals() -> tuple[str, ...]:
    """Names of the signals without a stand-in of their own: any tensor ``(G, M, plates)`` serves for them."""
    return tuple(name for name in SIGNALS if name not in _STAND_INS)


def with_statistics(estimator: Estimator, context: SiteContext, count: float = 3.0) -> SiteContext:
    """Fills in an estimator's initial running statistics, and keeps only the signals that it needs."""
    like = context.cost
    assert context.log_probs is not None
    components, cardinality = context.log_probs.shape[-2:]
    initial = initial_statistics(estimator, components * (cardinality if cardinality > 2 else 1))
    rows = len(context.names)
    statistics = {name: torch.stack([torch.as_tensor(value).to(like)] * rows) for name, value in initial.items()}
    counts = like.new_full((rows,), count)
    signals = {name: value for name, value in context.signals.items() if name in estimator.needs}
    return replace(context, statistics=statistics, count=counts, signals=signals)


def _irregular(count: int, start: float) -> Tensor:
    return 1.1 * torch.sin(1.7 * torch.arange(count, dtype=torch.float64) + 2.3 * start)
