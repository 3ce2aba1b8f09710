r"""The contract of every estimator: one check for the package's own estimators and for those of others.

The check calls an estimator on small problems without Pyro, whose gradients are known.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm, initial_statistics
from pyro_bpq.estimators.hindsight import Changes, HeldCosts
from pyro_bpq.rollout.features import Components, finite_components
from pyro_bpq.step.signal_table import SIGNALS

_WARM_UP = 3
# Standard deviation of the noise from sites downstream, as a share of a cost.
_LATER = 0.1
_POWER = 0.005
# How much of the costs an outdated program knows.
_OUTDATED = 0.7
_NAMES = MappingProxyType({"bernoulli": "Bernoulli", "one_hot": "OneHotCategorical", "categorical": "Categorical"})
_ELSEWHERE = "give some in problems=, or use assert_unbiased."
# Signals that a problem has, or that none of its estimators gets. Any tensor ``(G, M, plates)`` stands for a new one.
_KNOWN = frozenset("program hindsight advantage q_value q_slope moved_value baseline crossed".split())


@dataclass(eq=False)
class FakeProgram:
    """A :class:`~pyro_bpq.estimators.base.SiteProgram` with a cost in closed form."""

    problem: Problem
    value: Tensor
    generator: torch.Generator  # of noise, the estimator's and that from sites downstream
    later: float = 0.0  # the standard deviation of the latter, as a share of a cost
    share: float = 1.0  # how much of the costs it knows; less if it is outdated
    rows_meet: ClassVar[bool] = False

    @torch.no_grad()
    def cost(self, value: Tensor) -> Tensor:
        """The costs, with noise."""
        cost = self.share * self.problem.cost(value)
        return cost * (1.0 + self.later * torch.randn(cost.shape, generator=self.generator, dtype=cost.dtype))

    def independent(self) -> Tensor:
        """Costs of values drawn afresh, with noise."""
        index, probabilities = self.problem.outcomes(1)
        lead = self.value.shape[: self.value.dim() - self.problem.components.value_ndim]
        drawn = torch.multinomial(probabilities, lead[1:].numel(), True, generator=self.generator)
        return self.cost(self.from_index(index[drawn, 0]).reshape(self.value.shape))

    def mean_field(self) -> FakeProgram:
        """The program itself: nothing is sampled downstream that could take its mean."""
        return self

    def held(self, value: Tensor) -> FakeProgram:
        """The program in which sites downstream keep their values: without their noise."""
        return replace(self, later=0.0)

    def gradient(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The costs, with noise, and their slopes."""
        if not self.problem.is_smooth:
            return self.cost(value), torch.zeros_like(value)
        with torch.enable_grad():
            leaf = value.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.share * self.problem.cost(leaf).sum(), leaf)
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
        width = self.size if self.kind == "bernoulli" else self.size * self.cardinality
        flat = value.reshape(*lead, width)
        a, c, *b = _irregular(width * (width + 2), 1.3).to(flat).reshape(-1, width)
        product = flat @ torch.stack(b)
        return 1.5 + 2.0 * (flat @ a) + 0.5 * (product * flat).sum(-1) + 0.7 * torch.tanh(1.5 * (flat @ c))

    def context(
        self,
        rows: tuple[int, ...],
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        index: Tensor | None = None,
        later: float = 0.0,
        share: float = 1.0,
    ) -> tuple[SiteContext, Tensor]:
        """Draws values and makes the context of a call, and the leaf ``(G, M, rows, D, K)`` of logits below it.

        Half of the cost counts as immediate, with an exact table. The critic's predictions and the correction are
        meaningless numbers that do not depend on the values. ``index`` gives values ``(G, M, rows, D)`` in place of
        draws. Sites downstream make noise in a cost, whose standard deviation is the share ``later`` of it. ``share``
        is how much of the costs the program knows.
        """
        generator, batch = torch.Generator().manual_seed(seed), (self.sites, self.particles, *rows)
        fixed = self.logits(dtype).reshape(self.sites, *(1,) * (len(rows) + 1), self.size, self.cardinality)
        leaf = fixed.expand(*batch, self.size, self.cardinality).clone().requires_grad_()
        log_probs = leaf.log_softmax(-1)
        if index is None:
            probs = log_probs.detach().double().exp().reshape(-1, self.cardinality)
            index = torch.multinomial(probs, 1, generator=generator).reshape(*batch, self.size)
        value = self.components.value(index).to(dtype)
        program = FakeProgram(self, value, generator, later, share)

        # More of these numbers leave the noise as it is.
        others = torch.Generator().manual_seed(1000 + seed)

        def nonsense(*event: int) -> Tensor:
            # Where all values are enumerated, they are those of the first dimension of rows.
            shape = (*batch[:2], *(1 for _ in rows[:-1]), *rows[-1:], *event)
            return torch.randn(shape, generator=others, dtype=torch.float64).to(dtype).expand(*batch, *event)

        moved = [index.index_fill(-1, torch.tensor([d]), k) for d in range(self.size) for k in range(self.cardinality)]
        costs = [self.cost(self.components.value(one).to(dtype)).detach() for one in moved]
        table, names = torch.stack(costs, -1).reshape(leaf.shape), tuple("abcdefgh"[: self.sites])
        # All costs read the site, and no other site does. Half of them count as costs that read a site downstream.
        sampled = self.cost(value).detach()
        change = 0.5 * (table - sampled[..., None, None])
        changes = Changes(torch.zeros_like(change), change, change)
        held = HeldCosts(log_probs, index, changes, settled=0.5 * sampled)
        score = log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1).sum(-1)
        cost = replace(program, share=1.0).cost(value)
        known = SiteContext(names, score, cost, self.particles, log_probs, index, 0.5 * table, 0.5 * sampled)
        # Far from right, as the critics are, but no function of the value.
        learned, level = nonsense(self.size, self.cardinality), nonsense()
        known = replace(known, learned=learned, level=level, correction=nonsense(), exact_correction=nonsense())
        signals = {"program": program, "hindsight": held, "advantage": cost - level, "q_value": level}
        signals |= {name: nonsense() for name in SIGNALS if name not in _KNOWN}
        return replace(known, signals=signals), leaf

    def outcomes(self, particles: int) -> tuple[Tensor, Tensor]:
        """All joint values of a number of particles.

        Returns:
            Indices ``(outcomes, particles, D)``, and their probabilities for every site, ``(G, outcomes)``.
        """
        joint = torch.cartesian_prod(*[torch.arange(self.cardinality)] * (particles * self.size))
        index = joint.reshape(-1, particles, self.size)
        log_probs = self.logits().log_softmax(-1)[:, None, None].expand(-1, *index.shape[:2], -1, -1)
        chosen = index.expand(self.sites, *index.shape).unsqueeze(-1)
        return index, log_probs.gather(-1, chosen).flatten(2).sum(-1).exp()

    def exact_gradient(self) -> Tensor:
        """Gradient of one particle's expected cost to the logits, ``(G, D, K)``, by enumeration."""
        index, probabilities = self.outcomes(1)
        costs = self.cost(self.components.value(index[:, 0]).to(probabilities))
        # In closed form: Σ_x q(x) f(x) (onehot(x) - q).
        score = one_hot(index[:, 0], self.cardinality) - self.logits().softmax(-1).unsqueeze(1)
        return torch.einsum("gn,gndk->gdk", probabilities * costs, score)


def gradient_of(estimator: Estimator, context: SiteContext, leaf: Tensor) -> tuple[SiteTerm, Tensor]:
    """The term of an estimator, and its gradient to the logits."""
    term = estimator(context)
    says = f"{estimator!r}: its surrogate has no gradient: leave out .detach() on the score."
    assert term.surrogate.requires_grad, says
    return term, torch.autograd.grad(term.surrogate.sum(), leaf)[0]


def with_statistics(
    estimator: Estimator, context: SiteContext, count: float = 3.0, learned: Mapping[str, Tensor] | None = None
) -> SiteContext:
    """Fills in statistics, ``learned`` or initial ones, and keeps only the signals that an estimator needs."""
    like, (components, cardinality) = context.cost, context.table[0].shape[-2:]
    initial = initial_statistics(estimator, components * (cardinality if cardinality > 2 else 1))
    rows = len(context.names)
    statistics = {name: torch.stack([torch.as_tensor(value).to(like)] * rows) for name, value in initial.items()}
    signals = {name: value for name, value in context.signals.items() if name in estimator.needs}
    statistics |= learned or {}
    return replace(context, statistics=statistics, count=like.new_full((rows,), count), signals=signals)


def _irregular(count: int, start: float) -> Tensor:
    return 1.1 * torch.sin(1.7 * torch.arange(count, dtype=torch.float64) + 2.3 * start)


def default_problems() -> tuple[Problem, ...]:
    """Sites of one and of several components, of all kinds, with smooth and non-smooth costs."""
    bits = Problem("bernoulli", 2), Problem("bernoulli", 1, is_scalar=True), Problem("bernoulli", 2, is_smooth=False)
    return bits + tuple(Problem(kind, *size) for kind in ("categorical", "one_hot") for size in ((2, 3), (1, 4, True)))


def check_estimator(estimator: Estimator, *, num_rows: int = 40_000, problems: Sequence[Problem] | None = None) -> None:
    r"""Checks that an estimator follows the protocol, and that it is unbiased if it declares so.

    The estimator must be an immutable value. For a site that it does not support it must say what to write instead. It
    must give finite gradients in both precisions, for all shapes of plates. It must keep sites apart. It must return
    detached statistics of the right shape. An unbiased estimator must have the exact gradient as its mean. The mean is
    over all values of two particles, and over samples of its own noise and of noise from downstream, within four
    standard errors. These are small enough to show a bias of two percent. Without noise, and for a bit, the mean is
    also over the values of two rows of a plate: a row must not enter its own baseline. With ``takes_outdated`` the
    program's costs are others than those of the run. The check uses sites of one and of several Bernoulli, Categorical
    and OneHotCategorical components, with smooth and non-smooth costs, meaningless critics, and running statistics
    that earlier steps have moved.

    Args:
        estimator: The estimator.
        num_rows: Number of calls per site if the estimator draws noise; more if standard errors are too large.
        problems: The sites, by default those of :func:`default_problems`; unsupported ones are left out.

    Raises:
        AssertionError: If a check fails, or if none of the default problems is supported; the message says which.
    """
    is_default, problems = problems is None, default_problems() if problems is None else problems
    _check_value(estimator)
    _check_unsupported(estimator, problems)
    if estimator.is_pathwise:
        return _check_pathwise(estimator)
    served = [problem for problem in problems if estimator.unsupported(problem.info) is None]
    assert served or not is_default, f"{estimator} supports none of the sites; {_ELSEWHERE}"
    for problem in served:
        _check_calls(estimator, problem)
        statistics = _warmed(estimator, problem)
        _check_sites_apart(estimator, problem, statistics)
        if estimator.is_unbiased:
            _check_mean(estimator, problem, statistics, num_rows)
            if "program" not in estimator.needs and problem.cardinality ** (problem.size * problem.particles) <= 4:
                _check_joint(estimator, problem, statistics)


def _warmed(estimator: Estimator, problem: Problem) -> dict[str, Tensor]:
    """Statistics after some steps: those of the first step may turn parts of an estimator off."""
    statistics = dict[str, Tensor]()
    for step in range(_WARM_UP):
        context, _ = problem.context((64,), seed=101 + step, later=_LATER)
        statistics.update(estimator.at(step)(with_statistics(estimator, context, step, statistics)).statistics)
    return statistics


def _gradient(estimator: Estimator, context: SiteContext, leaf: Tensor, statistics: Mapping[str, Tensor]) -> Tensor:
    """The gradient of the step after these."""
    return gradient_of(estimator.at(_WARM_UP), with_statistics(estimator, context, _WARM_UP, statistics), leaf)[1]


def _check_mean(
    estimator: Estimator, problem: Problem, statistics: Mapping[str, Tensor], num_rows: int, is_last: bool = False
) -> None:
    """Checks the mean gradient of an estimator; takes other rows, once, where these are too few by little, or may err.

    The values of all particles are enumerated; noise of the estimator and from downstream is sampled. Without noise
    the gradient of each row is exact, up to 4e-10 of its largest component.
    """
    has_noise, share = "program" in estimator.needs, _OUTDATED if estimator.takes_outdated else 1.0
    outcomes, probabilities = problem.outcomes(problem.particles)
    rows = (len(outcomes), max(num_rows // len(outcomes), 2) if has_noise else 2)
    index = outcomes.transpose(0, 1).reshape(1, problem.particles, rows[0], 1, problem.size)
    index = index.expand(problem.sites, -1, -1, rows[1], -1)
    context, leaf = problem.context(rows, seed=7 + is_last, index=index, later=_LATER * has_noise, share=share)
    gradient = _gradient(estimator, context, leaf, statistics).sum(1)
    exact = problem.particles * problem.exact_gradient().unsqueeze(1)
    means = (probabilities[..., None, None, None] * gradient).sum(1)
    error = has_noise * means.std(1, keepdim=True) / math.sqrt(rows[1])
    scale = float(exact.abs().max())
    distance = ((means.mean(1, keepdim=True) if has_noise else means) - exact).abs()
    largest, noise = float((distance / error.clamp(min=1e-10 * scale)).max()), float(error.max()) / scale
    if has_noise and not is_last and (_POWER < noise < 4.0 * _POWER or 4.0 <= largest < 5.0):
        more = int(1.3 * num_rows * max(1.0, noise / _POWER) ** 2)
        return _check_mean(estimator, problem, statistics, more, is_last=True)
    assert noise < _POWER, f"{estimator}: standard errors of {noise:.1%} of the gradient; use more rows. {problem}"
    assert largest < 4.0, f"{estimator} is biased: {largest:.1f} standard errors off the exact gradient on {problem}."


def _check_joint(estimator: Estimator, problem: Problem, statistics: Mapping[str, Tensor]) -> None:
    """Checks the mean over all joint values of two rows: a baseline may have other rows' costs, but not its own."""
    values, probabilities = problem.outcomes(2 * problem.particles)
    found = torch.zeros_like(problem.logits())
    for value, probability in zip(values, probabilities.T, strict=True):
        index = value.reshape(1, problem.particles, 2, problem.size).expand(problem.sites, -1, -1, -1)
        gradient = _gradient(estimator, *problem.context((2,), index=index), statistics)
        found += probability[:, None, None] * gradient.sum((1, 2))
    is_exact = torch.allclose(found, 2 * problem.particles * problem.exact_gradient(), rtol=1e-8)
    assert is_exact, f"{estimator} is biased in two rows together: does a row enter its own baseline? {problem}"


def _check_value(estimator: Any) -> None:
    says = f"{estimator!r} is no estimator; write an object, such as AllAction(), of a class derived from Estimator."
    assert isinstance(estimator, Estimator), says
    again = copy.deepcopy(estimator)
    assert again == estimator and hash(again) == hash(estimator), f"{estimator!r} is no value: its copy differs."
    thing: Any = estimator
    with contextlib.suppress(AttributeError):
        thing.is_unbiased = not thing.is_unbiased
        raise AssertionError(f"{type(estimator).__name__} is not immutable; write @dataclass(frozen=True).")


def _check_unsupported(estimator: Estimator, problems: Sequence[Problem]) -> None:
    sites = [
        SiteInfo("z", "Normal", True, None, 1),
        SiteInfo("z", "Poisson", False, None, 1),
        SiteInfo("z", "Gamma", True, None, 1),
        SiteInfo("z", "Categorical", False, Components("categorical", (), 50_000), 1),
        SiteInfo("z", "Bernoulli", False, Components("bernoulli", (), 2), 2),
        *(problem.info for problem in problems),
    ]
    reasons = [estimator.unsupported(site) for site in sites]
    for reason in reasons:
        says = reason is None or "use " in reason or "write " in reason
        assert says, f"{estimator!r} does not say what to write instead: {reason!r}"
    assert None in reasons, f"{estimator!r} supports none of {[s.distribution for s in sites]}; {_ELSEWHERE}"


def _check_pathwise(estimator: Any) -> None:
    context, _ = default_problems()[0].context((3,))
    assert not estimator(context).surrogate.any(), f"{estimator!r} is pathwise but adds a surrogate term."
    for cls, shape in ((dist.Bernoulli, (4,)), (dist.OneHotCategorical, (4, 3))):
        leaf = torch.linspace(-1.0, 1.0, math.prod(shape)).reshape(shape).requires_grad_()
        fn = cls(logits=leaf)
        if estimator.unsupported(SiteInfo("z", cls.__name__, False, finite_components(fn), 1)) is not None:
            continue
        drawn = fn.sample()
        value = estimator.at(0).attach(fn, drawn, torch.Generator().manual_seed(0))
        assert torch.equal(value.detach(), drawn), f"{estimator!r} changes the drawn value."
        weights = torch.linspace(0.5, 2.0, drawn.numel()).reshape(drawn.shape)
        (gradient,) = torch.autograd.grad((value * weights).sum(), leaf)
        assert bool(gradient.isfinite().all()) and bool(gradient.any()), f"{estimator!r} attaches no gradient."


def _check_calls(estimator: Estimator, problem: Problem) -> None:
    for dtype in (torch.float32, torch.float64):
        for rows in ((), (5,), (2, 3)):
            context, leaf = problem.context(rows, dtype=dtype)
            context = with_statistics(estimator, context)
            term, gradient = gradient_of(estimator.at(0), context, leaf)
            where = f"{estimator!r} with {problem}, rows {rows}, {dtype}"
            assert gradient.dtype == dtype and bool(gradient.isfinite().all()), f"{where}: gradient {gradient}"
            # A biased estimator may not see a cost without slope.
            may_vanish = not rows or not (estimator.is_unbiased or problem.is_smooth)
            assert may_vanish or bool(gradient.any()), f"{where}: the gradient is zero."
            assert set(term.statistics) <= set(context.statistics), f"{where}: statistics that it did not announce."
            for name, value in term.statistics.items():
                old = context.statistics[name]
                assert value.shape == old.shape and value.dtype == dtype, f"{where}: statistic {name!r} {value}"
                assert bool(value.isfinite().all()) and not value.requires_grad, f"{where}: statistic {name!r} {value}"


def _check_sites_apart(estimator: Estimator, problem: Problem, statistics: Mapping[str, Tensor]) -> None:
    """Changes values and costs of the second site; checks that the gradient of the first stays the same."""
    one, other = (problem.context((6,), seed=seed)[0].table[1] for seed in (0, 1))
    gradients = []
    for index in (one, torch.stack([one[0], other[1]])):
        gradients.append(_gradient(estimator, *problem.context((6,), index=index), statistics)[0])
    same = torch.allclose(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)
    assert same, f"{estimator!r}: the cost of one site enters the gradient of another. {problem}"
