"""What every estimator owes, and that a new one has to be listed here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from problems import FakeProgram, wrong_sign
from torch import Tensor

import pyro_bpq.estimators as package
from pyro_bpq.estimators import (
    LAX,
    LAXQ,
    QRELAX,
    REBAR,
    RELAX,
    RELAXQ,
    AllAction,
    Annealed,
    Concrete,
    CriticBaseline,
    CrossedLeaveOneOut,
    DebiasedStraightThrough,
    Differences,
    DisARM,
    Estimator,
    GumbelStraightThrough,
    Hindsight,
    LambdaReturn,
    LeaveOneOut,
    MuProp,
    NetworkVariate,
    OptimalScale,
    ParentAdvantage,
    Pathwise,
    QAdvantage,
    QAllAction,
    QControlVariate,
    QPathwise,
    QProp,
    QRelaxation,
    QScoreFunction,
    ReinMax,
    RunningBaseline,
    ScoreFunction,
    SecondRun,
    StraightThrough,
    TrimmedBaseline,
)
from pyro_bpq.estimators.base import SiteContext, SiteTerm, initial_statistics
from pyro_bpq.rollout.features import Components
from pyro_bpq.testing import check_estimator
from pyro_bpq.testing.contract import Problem, default_problems, new_signals

ESTIMATORS: list[Any] = [
    ScoreFunction(),
    ScoreFunction(LeaveOneOut()),
    ScoreFunction(RunningBaseline()),
    ScoreFunction(TrimmedBaseline()),
    AllAction(),
    AllAction(exact=True),
    AllAction(exact=False),
    AllAction(adaptive=False),
    AllAction(trace=0.5),
    QProp(),
    LambdaReturn(),
    Pathwise(),
    Concrete(),
    DebiasedStraightThrough(),
    DebiasedStraightThrough(decay=0.5, mixture=1.0),
    Differences(),
    DisARM(),
    SecondRun(),
    SecondRun(decay=0.5),
    CrossedLeaveOneOut(),
    CrossedLeaveOneOut(decay=0.5),
    Hindsight(),
    Hindsight(draws=1, curvature=False, crossed=True),
    GumbelStraightThrough(),
    MuProp(),
    MuProp(LeaveOneOut()),
    MuProp(RunningBaseline()),
    MuProp(mean_field=True),
    ReinMax(),
    StraightThrough(),
    CriticBaseline(),
    CriticBaseline(scale=0.5),
    QControlVariate(),
    QControlVariate(num_samples=1, scale=OptimalScale(0.9)),
    QAllAction(),
    QScoreFunction(),
    QAdvantage(),
    QRelaxation(),
    QRelaxation(Annealed()),
    REBAR(),
    REBAR(temperature=Annealed(), scale=1.0),
    RELAX(),
    RELAX(NetworkVariate((8, 8))),
    RELAXQ(),
    RELAXQ(temperature=Annealed(0.9)),
    LAX(),
    LAXQ(),
    LAXQ(scale=0.5),
    ParentAdvantage(),
    ParentAdvantage(0.0),
    QPathwise(),
    QRELAX(),
    QRELAX(Annealed(), scale=1.0),
]
LOCAL = (QAllAction, QScoreFunction, QAdvantage, QRelaxation, QRELAX, ParentAdvantage)
# On finite components; those of continuous values have tests of their own.
CALLED = [e for e in ESTIMATORS if not e.is_pathwise and not e.needs & {"program", "moved_value"}]
each = pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
active = pytest.mark.parametrize("estimator", CALLED, ids=repr)


def contracts() -> Iterator[Any]:
    """Estimators, and the problems that they serve; of those with sampled noise every third by default, in turn."""
    every = default_problems()
    for n, estimator in enumerate(ESTIMATORS):
        served = [p for p in every if estimator.unsupported(p.info) is None and not estimator.is_pathwise]
        for i, problem in enumerate(served or every[:1]):
            is_slow = "program" in estimator.needs and len(served) > 2 and (i + n) % 3
            name = f"{problem.kind}-{problem.size}-{problem.is_scalar}-{problem.is_smooth}"
            yield pytest.param(
                estimator, problem, id=f"{estimator}-{name}", marks=[pytest.mark.slow] if is_slow else []
            )


def context(
    particles: int = 2,
    plates: tuple[int, ...] = (3,),
    sites: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[SiteContext, Tensor]:
    """Random tensors of vector sites of two components of three values, and their logits."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(sites, particles, *plates, *shape, generator=generator, dtype=dtype)

    logits = draw(2, 3).requires_grad_()
    log_probs = logits.log_softmax(-1)
    index = torch.randint(0, 3, (sites, particles, *plates, 2), generator=generator)
    score = log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1).sum(-1)
    made = SiteContext(
        names=tuple("abcdef"[:sites]),
        score=score,
        cost=draw(),
        num_particles=particles,
        log_probs=log_probs,
        index=index,
        exact=draw(2, 3),
        exact_cost=draw(),
        learned=draw(2, 3),
        level=draw(),
        correction=draw(),
        exact_correction=draw(),
    )
    split = Components("one_hot", (2,), 3)
    value = split.value(index).to(dtype)

    def cost(value: Tensor) -> Tensor:
        return value.square().flatten(-2).sum(-1) * made.cost + value[..., 0].sum(-1)

    signals = {"program": FakeProgram(cost, value, split, seed=seed), "advantage": made.cost, "q_value": made.cost}
    return replace(made, signals={**signals, **{name: draw().abs() for name in new_signals()}}), logits


def with_statistics(estimator: Any, made: SiteContext) -> SiteContext:
    like = made.cost
    initial = initial_statistics(estimator, 6)
    statistics = {
        name: torch.stack([torch.as_tensor(value).to(like)] * len(made.names)) for name, value in initial.items()
    }
    if "program" in made.signals:
        made.program.generator.manual_seed(0)
    return replace(made, statistics=statistics, count=like.new_full((len(made.names),), 3.0))


@each
def test_estimators_are_values(estimator: Any) -> None:
    assert isinstance(estimator, Estimator)
    again = eval(repr(estimator), vars(package))
    assert again == estimator and hash(again) == hash(estimator)
    with pytest.raises(AttributeError):
        estimator.is_unbiased = False


def test_estimators_are_all_listed() -> None:
    public = {getattr(package, name) for name in package.__all__}
    kinds = {
        kind for kind in public if isinstance(kind, type) and kind is not Estimator and hasattr(kind, "is_unbiased")
    }
    assert kinds <= {type(e) for e in ESTIMATORS}


@pytest.mark.parametrize(("estimator", "problem"), list(contracts()))
def test_estimators_keep_the_contract(estimator: Any, problem: Problem) -> None:
    check_estimator(estimator, problems=[problem])


@active
def test_call_keeps_sites_apart(estimator: Any) -> None:
    made, logits = context()
    first = with_statistics(estimator, made)
    changed = replace(
        first, cost=first.cost + torch.tensor([0.0, 1.0]).reshape(2, 1, 1) * torch.arange(6.0).reshape(2, 3)
    )
    gradients = []
    for made in (first, changed):
        made.program.generator.manual_seed(0)
        gradients.append(torch.autograd.grad(estimator(made).surrogate.sum(), logits, retain_graph=True)[0])
    torch.testing.assert_close(gradients[0][0], gradients[1][0])
    # Where Q takes the place of the costs, these do not enter.
    assert isinstance(estimator, LOCAL) or float((gradients[0][1] - gradients[1][1]).abs().max()) > 1e-3


@active
def test_statistics_of_this_step_do_not_enter_its_gradient(estimator: Any) -> None:
    # Unless they come from other particles: with one, the correction of a site is fixed before it is drawn.
    made, logits = context(particles=1)
    if isinstance(getattr(estimator, "baseline", None), LeaveOneOut):
        pytest.skip("needs two particles")
    made = with_statistics(estimator, made)
    (one,) = torch.autograd.grad(estimator(made).surrogate.sum(), logits, retain_graph=True)
    made.program.generator.manual_seed(0)
    moved = replace(made, cost=made.cost + torch.tensor([0.0, 0.0, 5.0]))
    (other,) = torch.autograd.grad(estimator(moved).surrogate.sum(), logits)
    torch.testing.assert_close(one[..., :2, :, :], other[..., :2, :, :])


# Planted faults: the check has to see each of them.


@dataclass(frozen=True)
class ThreePercentOff(DisARM):
    def __call__(self, context: SiteContext) -> SiteTerm:
        return SiteTerm(1.03 * super().__call__(context).surrogate)


@dataclass(frozen=True)
class BelievesTheProgram(DisARM):
    takes_outdated = True


@dataclass(frozen=True)
class Silent(DisARM):
    def unsupported(self, site: Any) -> str | None:
        return None if super().unsupported(site) is None else "no"


@dataclass(frozen=True)
class MixesSites(ScoreFunction):
    def __call__(self, context: SiteContext) -> SiteTerm:
        return super().__call__(replace(context, cost=context.cost - context.cost.mean(0)))


@dataclass(frozen=True)
class ChangesTheValue(StraightThrough):
    def attach(self, fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        return fn.mean


@pytest.mark.parametrize(
    ("estimator", "says"),
    [
        (wrong_sign(DisARM()), "biased"),
        (ThreePercentOff(), "biased"),
        (BelievesTheProgram(), "biased"),
        (Differences(), "supports none"),
        (Silent(), "what to write"),
        (MixesSites(), "another"),
        (ChangesTheValue(), "changes the drawn value"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_check_sees_a_planted_fault(estimator: Any, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_estimator(estimator)
