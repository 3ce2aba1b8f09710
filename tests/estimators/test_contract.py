"""What every estimator owes, and that a new one has to be listed here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from programs import FakeProgram
from torch import Tensor

import pyro_bpq.estimators as package
from pyro_bpq.estimators import (
    LAX,
    REBAR,
    RELAX,
    RELAXQ,
    AllAction,
    Annealed,
    ConstantBaseline,
    CriticBaseline,
    DisARM,
    Estimator,
    GeneralisedReparameterisation,
    LearnedTemperature,
    LeaveOneOut,
    NetworkVariate,
    OptimalScale,
    Pathwise,
    QAdvantage,
    QAllAction,
    QControlVariate,
    QRelaxation,
    QScoreFunction,
    RunningBaseline,
    ScoreFunction,
    StraightThrough,
)
from pyro_bpq.estimators.base import SiteContext, SiteInfo, initial_statistics
from pyro_bpq.features import Components

ESTIMATORS: list[Any] = [
    ScoreFunction(),
    ScoreFunction(LeaveOneOut()),
    ScoreFunction(RunningBaseline()),
    AllAction(),
    AllAction(exact=True),
    AllAction(exact=False),
    AllAction(adaptive=False),
    Pathwise(),
    ScoreFunction(ConstantBaseline(1.5)),
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
    REBAR(temperature=LearnedTemperature(), scale=1.0),
    RELAX(),
    RELAX(NetworkVariate((8, 8)), uses_cost=True),
    RELAXQ(),
    RELAXQ(temperature=Annealed(0.9)),
    LAX(),
    GeneralisedReparameterisation(),
    DisARM(),
    StraightThrough(),
]
LOCAL = (QAllAction, QScoreFunction, QAdvantage, QRelaxation)
# On finite components; LAX has tests of its own.
CALLED = [e for e in ESTIMATORS if not e.is_pathwise and not isinstance(e, LAX | DisARM)]
each = pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
active = pytest.mark.parametrize("estimator", CALLED, ids=repr)


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
    )
    split = Components("one_hot", (2,), 3)
    value = split.value(index).to(dtype)

    def cost(value: Tensor) -> Tensor:
        return value.square().flatten(-2).sum(-1) * made.cost + value[..., 0].sum(-1)

    return replace(made, program=FakeProgram(cost, value, split, seed=seed)), logits


def with_statistics(estimator: Any, made: SiteContext) -> SiteContext:
    like = made.cost
    initial = initial_statistics(estimator, made.num_particles, 6)
    statistics = {
        name: torch.stack([torch.as_tensor(value).to(like)] * len(made.names)) for name, value in initial.items()
    }
    assert made.program is not None
    made.program.generator.manual_seed(0)
    return replace(made, statistics=statistics, count=like.new_full((len(made.names),), 3.0))


@each
def test_estimators_are_values(estimator: Any) -> None:
    assert isinstance(estimator, Estimator)
    assert eval(repr(estimator)) == estimator and hash(eval(repr(estimator))) == hash(estimator)
    with pytest.raises(AttributeError):
        estimator.is_unbiased = False


def test_estimators_are_all_listed() -> None:
    public = {getattr(package, name) for name in package.__all__}
    kinds = {
        kind for kind in public if isinstance(kind, type) and kind is not Estimator and hasattr(kind, "is_unbiased")
    }
    assert kinds <= {type(e) for e in ESTIMATORS}


@active
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("plates", [(), (3,), (2, 3)])
def test_call_gives_a_finite_gradient_and_statistics(
    estimator: Any, plates: tuple[int, ...], dtype: torch.dtype
) -> None:
    made, logits = context(plates=plates, dtype=dtype)
    made = with_statistics(estimator, made)
    term = estimator(made)
    (gradient,) = torch.autograd.grad(term.surrogate.sum(), logits)
    assert gradient.dtype == dtype and bool(gradient.isfinite().all()) and bool(gradient.any())
    for name, value in term.statistics.items():
        assert value.shape == made.statistics[name].shape and value.dtype == dtype
        assert bool(value.isfinite().all()) and not value.requires_grad


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


@each
def test_unsupported_says_what_to_write(estimator: Any) -> None:
    sites = [
        SiteInfo("z", "Normal", True, None, 1),
        SiteInfo("z", "Poisson", False, None, 1),
        SiteInfo("z", "Bernoulli", False, Components("bernoulli", (), 2), 2),
    ]
    for site in sites:
        reason = estimator.unsupported(site)
        assert reason is None or "use " in reason or "write " in reason
    assert any(estimator.unsupported(site) is None for site in sites)
