"""Estimators that compare values, on Pyro programs: exact over all values and all draws, and the order of variances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from enumerable import where_it_serves
from models import BY_NAME, Case
from problems import error_of_draws, moments_of_draws
from steps import trained

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import (
    CrossedLeaveOneOut,
    DebiasedStraightThrough,
    Differences,
    DisARM,
    LeaveOneOut,
    MuProp,
    RunningBaseline,
    ScoreFunction,
    SecondRun,
    SiteContext,
    SiteTerm,
)


def train(estimator: Any, case: Case, particles: int) -> tuple[Any, Any]:
    """An ELBO whose running statistics have seen some steps, and the guide that chooses the estimator."""
    elbo, guide = TraceBackpropQ_ELBO(particles, critic=None), where_it_serves(case.guide, estimator, particles)
    return trained(elbo, case.model, guide, *case.args, params=case.params).eval(), guide


EXACT: list[tuple[Any, int, tuple[str, ...]]] = [
    (DisARM(), 1, ("fork", "vector_layers", "mask_scale", "chain")),
    (DebiasedStraightThrough(), 1, ("vector", "onehot", "mask_scale", "reparam_above_discrete")),
    (MuProp(), 1, ("vector", "onehot", "plate", "fork", "mask_scale", "discrete_above_reparam")),
    (MuProp(RunningBaseline()), 1, ("shared_parameters",)),
    (MuProp(LeaveOneOut()), 2, ("vector",)),
    (MuProp(mean_field=True), 1, ("vector", "vector_layers", "diamond", "plate", "mask_scale")),
    (SecondRun(), 1, ("vector", "fork", "mask_scale", "discrete_above_reparam", "plate_subsample")),
    (SecondRun(), 2, ("vector",)),
    (CrossedLeaveOneOut(), 2, ("vector", "fork", "mask_scale", "discrete_above_reparam", "plate_subsample")),
]


CASES = [(*rest, name) for *rest, names in EXACT for name in names]


@pytest.mark.parametrize(("estimator", "particles", "name"), CASES, ids=str)
def test_expected_gradient_is_exact(estimator: Any, particles: int, name: str) -> None:
    case = BY_NAME[name]
    elbo, guide = train(estimator, case, particles)
    assert error_of_draws(elbo, case.model, guide, *case.args, params=case.params, truth=case.exact()) < 1e-10


# The mean-field pass

A, B, C, FIRST, SEEN = 0.4, -1.3, 0.8, 0.3, 0.9


def layers_model() -> None:
    a = pyro.sample("a", dist.Bernoulli(torch.tensor(0.35)))
    b = pyro.sample("b", dist.OneHotCategorical(logits=torch.stack((torch.zeros(()), C * a))))
    pyro.sample("x", dist.Normal(a + b[1], 1.0), obs=torch.tensor(SEEN))


def layers_guide(estimator: Any = None) -> None:
    infer = {} if estimator is None else {"bpq": {"estimator": estimator}}
    a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("q", torch.tensor(FIRST))), infer=infer)
    pyro.sample("b", dist.OneHotCategorical(logits=torch.stack((torch.zeros(()), A + B * a))))


@dataclass(frozen=True)
class Looking(MuProp):
    """Keeps what the program says at the mean."""

    def __call__(self, context: SiteContext) -> SiteTerm:
        from pyro_bpq.estimators.slopes import mean_value

        program = context.program.mean_field() if self.mean_field else context.program
        LOOKED.append(tuple(float(t) for t in program.gradient(mean_value(context).detach())))
        return super().__call__(context)


LOOKED: list[tuple[float, float]] = []


def looked(mean_field: bool) -> list[tuple[float, float]]:
    LOOKED.clear()
    trained(TraceBackpropQ_ELBO(1), layers_model, lambda: layers_guide(Looking(mean_field=mean_field)), steps=12)
    return LOOKED


def test_mean_field_pass_by_hand() -> None:
    """Equations 19 and 20: value and slope of the cost of a deterministic network of means."""
    mean = torch.sigmoid(torch.tensor(FIRST)).requires_grad_()
    below = torch.sigmoid(A + B * mean)
    log_q = torch.stack((torch.zeros(()), A + B * mean)).log_softmax(-1)
    log_p = torch.stack((torch.zeros(()), C * mean)).log_softmax(-1)
    prior = mean * torch.tensor(0.35).log() + (1.0 - mean) * torch.tensor(0.65).log()
    own = mean * FIRST - torch.nn.functional.softplus(torch.tensor(FIRST))
    cost = own - prior + (1.0 - below) * (log_q - log_p)[0] + below * (log_q - log_p)[1]
    cost = cost - torch.distributions.Normal(mean + below, 1.0).log_prob(torch.tensor(SEEN))
    (slope,) = torch.autograd.grad(cost, mean)
    found, cost = looked(mean_field=True), cost.detach()
    assert all(level == pytest.approx(float(cost), abs=1e-9) for level, _ in found)
    assert all(step == pytest.approx(float(slope), abs=1e-9) for _, step in found)
    # By default what lies downstream is drawn afresh.
    assert len({round(level, 6) for level, _ in looked(mean_field=False)}) == 2


# Order of variances, over all values and all draws.


def total_variance(estimator: Any, particles: int, name: str) -> float:
    elbo, guide = train(estimator, BY_NAME[name], particles)
    BY_NAME[name].params()
    moments = moments_of_draws(elbo, BY_NAME[name].model, guide)
    return sum(float(variance.sum()) for site, variance in moments.variance.items() if site.startswith("q"))


@pytest.mark.parametrize(
    ("better", "worse", "name"),
    [
        ((ScoreFunction(LeaveOneOut()), 2), (ScoreFunction(), 2), "fork"),
        ((DisARM(), 1), (ScoreFunction(LeaveOneOut()), 2), "vector"),
        ((MuProp(LeaveOneOut()), 2), (ScoreFunction(LeaveOneOut()), 2), "vector"),
    ],
    ids=str,
)
def test_order_of_variances(better: tuple[Any, int], worse: tuple[Any, int], name: str) -> None:
    assert total_variance(*better, name) < 0.9 * total_variance(*worse, name)


# Supports without end.


def wide_model() -> None:
    z = pyro.sample("z", dist.Categorical(logits=torch.zeros(50_000)))
    n = pyro.sample("n", dist.Poisson(torch.tensor(3.0)))
    pyro.sample("x", dist.Normal((z % 7 + n).to(torch.get_default_dtype()), 1.0), obs=torch.tensor(3.0))


def wide_guide(infer: Any = None) -> None:
    logits = pyro.param("logits", lambda: torch.linspace(0.0, 8.0, 50_000))
    pyro.sample("z", dist.Categorical(logits=logits), infer=infer or {})
    pyro.sample("n", dist.Poisson(pyro.param("rate", torch.tensor(2.5))))


@pytest.mark.parametrize("chosen", [None, SecondRun(), ScoreFunction()], ids=repr)
def test_huge_supports_do_not_blow_up(chosen: Any) -> None:
    elbo = TraceBackpropQ_ELBO()
    infer = None if chosen is None else {"bpq": {"estimator": chosen}}
    elbo.loss_and_grads(wide_model, lambda: wide_guide(infer))
    elbo.loss_and_grads(wide_model, lambda: wide_guide(infer))
    default = ScoreFunction(LeaveOneOut())
    assert elbo.info["z"]["estimator"] == (chosen or default) and elbo.info["n"]["estimator"] == Differences()
    grad = pyro.get_param_store()._params["logits"].grad
    assert grad is not None and bool(grad.isfinite().all()) and bool(grad.any())
