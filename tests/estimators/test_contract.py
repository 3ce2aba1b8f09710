"""What every estimator owes, and that a new one has to be listed here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import pyro_bpq.estimators as package
from pyro_bpq.estimators import (
    AllAction,
    Estimator,
    LambdaReturn,
    LeaveOneOut,
    Pathwise,
    QProp,
    RunningBaseline,
    ScoreFunction,
)
from pyro_bpq.estimators.base import SiteContext, SiteInfo
from pyro_bpq.features import Components

ESTIMATORS: list[Any] = [
    ScoreFunction(),
    ScoreFunction(LeaveOneOut()),
    ScoreFunction(RunningBaseline()),
    AllAction(),
    AllAction(exact=True),
    AllAction(exact=False),
    AllAction(adaptive=False),
    AllAction(trace=0.5),
    QProp(),
    LambdaReturn(),
    Pathwise(),
]
each = pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
active = pytest.mark.parametrize("estimator", [e for e in ESTIMATORS if not e.is_pathwise], ids=repr)


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
    return made, logits


def with_statistics(estimator: Any, made: SiteContext) -> SiteContext:
    like = made.cost
    initial = estimator.statistics(made.num_particles)
    statistics = {name: like.new_tensor([value] * len(made.names)) for name, value in initial.items()}
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
    gradients = [
        torch.autograd.grad(estimator(c).surrogate.sum(), logits, retain_graph=True)[0] for c in (first, changed)
    ]
    torch.testing.assert_close(gradients[0][0], gradients[1][0])
    assert float((gradients[0][1] - gradients[1][1]).abs().max()) > 1e-3


@active
def test_statistics_of_this_step_do_not_enter_its_gradient(estimator: Any) -> None:
    # Unless they come from other particles: with one, the correction of a site is fixed before it is drawn.
    made, logits = context(particles=1)
    if isinstance(getattr(estimator, "baseline", None), LeaveOneOut):
        pytest.skip("needs two particles")
    made = with_statistics(estimator, made)
    (one,) = torch.autograd.grad(estimator(made).surrogate.sum(), logits, retain_graph=True)
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
