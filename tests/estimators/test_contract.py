"""What every estimator owes, and that a new one has to be listed here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from problems import faulty, public, wrong_sign
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
from pyro_bpq.estimators.base import SiteContext, SiteTerm, site_mean
from pyro_bpq.step.signal_table import SIGNALS
from pyro_bpq.testing import check_estimator
from pyro_bpq.testing.contract import Problem, default_problems

SCORES = [ScoreFunction(), *map(ScoreFunction, (LeaveOneOut(), RunningBaseline(), TrimmedBaseline()))]
SUMS = [AllAction(), AllAction(exact=True), AllAction(exact=False), AllAction(adaptive=False), QProp(), LambdaReturn()]
PATHWISE = [Pathwise(), Concrete(), GumbelStraightThrough(), ReinMax(), StraightThrough()]
SLOPES = [MuProp(), MuProp(LeaveOneOut()), MuProp(RunningBaseline()), MuProp(mean_field=True)]
SLOPES += [DebiasedStraightThrough(), DebiasedStraightThrough(decay=0.5, mixture=1.0)]
RERUNS = [Differences(), DisARM(), SecondRun(), SecondRun(decay=0.5)]
RERUNS += [CrossedLeaveOneOut(), CrossedLeaveOneOut(decay=0.5)]
RERUNS += [Hindsight(), Hindsight(draws=1, curvature=False, crossed=True)]
RELAXED = [REBAR(), REBAR(temperature=Annealed(), scale=1.0), RELAX(), RELAX(NetworkVariate((8, 8))), LAX()]
CRITICS = [CriticBaseline(), CriticBaseline(scale=0.5), LAXQ(), LAXQ(scale=0.5), RELAXQ(), RELAXQ(Annealed(0.9))]
CRITICS += [QControlVariate(), QControlVariate(num_samples=1, scale=OptimalScale(0.9))]
BY_CRITIC = [QAllAction(), QScoreFunction(), QAdvantage(), QRelaxation(), QRelaxation(Annealed()), QPathwise()]
BY_CRITIC += [ParentAdvantage(), ParentAdvantage(0.0), QRELAX(), QRELAX(Annealed(), scale=1.0)]
ESTIMATORS: list[Any] = [*SCORES, *SUMS, *PATHWISE, *SLOPES, *RERUNS, *RELAXED, *CRITICS, *BY_CRITIC]
each = pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)


def contracts() -> Iterator[Any]:
    """Estimators, and the problems that they serve; of those with sampled noise every third by default, in turn."""
    every = default_problems()
    for n, estimator in enumerate(ESTIMATORS):
        served = [p for p in every if estimator.unsupported(p.info) is None and not estimator.is_pathwise]
        for i, problem in enumerate(served or every[: estimator.is_pathwise]):
            is_slow = "program" in estimator.needs and len(served) > 2 and (i + n) % 3
            name = f"{estimator}-{problem.kind}-{problem.size}-{problem.is_scalar}-{problem.is_smooth}"
            yield pytest.param(estimator, problem, id=name, marks=[pytest.mark.slow] if is_slow else [])


def context(particles: int = 2, seed: int = 0) -> tuple[SiteContext, Tensor]:
    """Vector sites of two components of three values, of which all that is known is random; and their logits."""
    made, logits = Problem("one_hot", size=2, cardinality=3, particles=particles).context((3,), seed)
    noise = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*made.cost.shape, *shape, generator=noise, dtype=torch.float64)

    numbers = {name: draw() for name in ("cost", "exact_cost", "level", "correction", "exact_correction")}
    return replace(made, exact=draw(2, 3), learned=draw(2, 3), **numbers), logits


@each
def test_estimators_are_values(estimator: Any) -> None:
    assert isinstance(estimator, Estimator)
    again = eval(repr(estimator), vars(package))
    assert again == estimator and hash(again) == hash(estimator)
    with pytest.raises(AttributeError):
        estimator.is_unbiased = False


def test_estimators_are_all_listed() -> None:
    assert {*public().values()} <= {type(e) for e in ESTIMATORS}


@pytest.mark.parametrize(("estimator", "problem"), list(contracts()))
def test_estimators_keep_the_contract(estimator: Any, problem: Problem) -> None:
    check_estimator(estimator, problems=[problem])


# Planted faults: the check has to see each of them.


@dataclass(frozen=True)
class BelievesTheProgram(DisARM):
    takes_outdated = True


@dataclass(frozen=True)
class Silent(DisARM):
    def unsupported(self, site: Any) -> str | None:
        return None if super().unsupported(site) is None else "no"


@dataclass(frozen=True)
class MixesRowsLater(ScoreFunction):
    """The same, but for the first step."""

    def statistics(self) -> dict[str, float]:
        return {"share": 0.0}

    def __call__(self, context: SiteContext) -> SiteTerm:
        share, level = context.statistics["share"], context.per_site(site_mean(context.cost))
        term = super().__call__(replace(context, cost=context.cost - context.per_site(share) * level))
        return SiteTerm(term.surrogate, {"share": torch.ones_like(share)})


@dataclass(frozen=True)
class WeighsRows(ScoreFunction):
    """It weighs rows by a signal, relative to the mean."""

    needs = frozenset({"table", "weight"})

    def __call__(self, context: SiteContext) -> SiteTerm:
        weight = context.signals["weight"]
        relative = weight / weight.mean(-1, keepdim=True) if weight.dim() > 2 else 1.0
        return super().__call__(replace(context, cost=relative * context.cost))


@dataclass(frozen=True)
class ChangesTheValue(StraightThrough):
    def attach(self, fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        return fn.mean


def three_percent_off(own: Any, context: SiteContext) -> SiteTerm:
    return SiteTerm(1.03 * own(context).surrogate)


def takes_the_smaller_cost(own: Any, context: SiteContext) -> SiteTerm:
    again = context.program.cost(context.program.value)
    return own(replace(context, cost=torch.minimum(context.cost, again)))


def mixes_sites(own: Any, context: SiteContext) -> SiteTerm:
    return own(replace(context, cost=context.cost - context.cost.mean(0)))


def mixes_rows(own: Any, context: SiteContext) -> SiteTerm:
    """Its baseline is the mean of all rows."""
    return own(replace(context, cost=context.cost - context.per_site(site_mean(context.cost))))


def has_no_gradient(own: Any, context: SiteContext) -> SiteTerm:
    return SiteTerm(context.cost * context.score.detach())


FAULTS: dict[str, tuple[Any, str]] = {
    "wrong sign": (wrong_sign(DisARM()), "biased"),
    "three percent off": (faulty(DisARM(), three_percent_off), "biased"),
    "believes the program": (BelievesTheProgram(), "biased"),
    "takes the smaller cost": (faulty(SecondRun(), takes_the_smaller_cost), "biased"),
    "supports none": (Differences(), "supports none.*assert_unbiased"),
    "silent": (Silent(), "what to write"),
    "mixes sites": (faulty(ScoreFunction(), mixes_sites), "another"),
    "mixes rows": (faulty(ScoreFunction(), mixes_rows), "enter its own baseline"),
    "mixes rows later": (MixesRowsLater(), "enter its own baseline"),
    "weighs rows": (WeighsRows(), "biased"),
    "has no gradient": (faulty(ScoreFunction(), has_no_gradient), "no gradient"),
    "changes the value": (ChangesTheValue(), "changes the drawn value"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_check_sees_a_planted_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    estimator, says = FAULTS[name]
    monkeypatch.setattr("pyro_bpq.testing.contract.SIGNALS", {**SIGNALS, "weight": None})
    with pytest.raises(AssertionError, match=says):
        check_estimator(estimator)
