"""Estimators that compare values, on Pyro programs: exact where the randomness is enumerable, else by statistics."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, Case
from problems import wrong_sign
from steps import bias, trained
from torch import Tensor

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
from pyro_bpq.testing import assert_unbiased, exact_gradient, expected_moments, sample_gradients, z_scores

ATOL = 1e-10
VECTORISED = {"vectorize_particles": True, "max_plate_nesting": 2}


@dataclass(frozen=True)
class WhereItServes:
    """An estimator at the sites that it supports, sums over all values elsewhere."""

    estimator: Any
    num_particles: int = 1

    def options(self, case: Case, **more: Any) -> dict[str, Any]:
        return {"num_particles": self.num_particles, "critic": None, **more}

    def guide(self, case: Case) -> Any:
        from pyro_bpq.record.watch import site_info

        def choose(site: Any) -> dict[str, Any]:
            info = site_info(site, (), self.num_particles)
            chosen = self.estimator if self.estimator.unsupported(info) is None else None
            return {"bpq": {"estimator": chosen}} if chosen is not None and not info.has_rsample else {}

        return pyro.poutine.infer_config(case.guide, choose)


def error(elbo: Any, case: Case, guide: Any) -> float:
    return bias(elbo, case.model, guide, *case.args, params=case.params, truth=case.exact())


def train(estimator: Any, case: Case, particles: int, steps: int = 20, **more: Any) -> tuple[Any, Any]:
    """An ELBO whose running statistics have seen some steps, and the guide that chooses the estimator."""
    chosen = WhereItServes(estimator, particles)
    elbo, guide = TraceBackpropQ_ELBO(**chosen.options(case, **more)), chosen.guide(case)
    return trained(elbo, case.model, guide, *case.args, params=case.params, steps=steps).eval(), guide


# Without noise of their own: what a rerun draws is enumerated too.
EXACT: list[tuple[Any, int, tuple[str, ...]]] = [
    (MuProp(), 1, ("vector", "onehot", "plate", "fork", "mask_scale", "discrete_above_reparam")),
    (MuProp(RunningBaseline()), 1, ("shared_parameters",)),
    (MuProp(LeaveOneOut()), 2, ("vector",)),
    (MuProp(mean_field=True), 1, ("vector", "vector_layers", "diamond", "plate", "mask_scale")),
    (SecondRun(), 1, ("vector", "fork", "mask_scale", "discrete_above_reparam", "plate_subsample")),
    (SecondRun(), 2, ("vector",)),
    (CrossedLeaveOneOut(), 2, ("vector", "fork", "mask_scale", "discrete_above_reparam", "plate_subsample")),
]


def exact_cases() -> Iterator[Any]:
    for estimator, particles, names in EXACT:
        for name in names:
            yield pytest.param(estimator, particles, BY_NAME[name], id=f"{estimator}-{name}")


@pytest.mark.parametrize(("estimator", "particles", "case"), list(exact_cases()))
def test_expected_gradient_is_exact(estimator: Any, particles: int, case: Case) -> None:
    elbo, guide = train(estimator, case, particles)
    assert error(elbo, case, guide) < ATOL


# With noise of their own.

NOISY: list[Any] = [DebiasedStraightThrough(), DisARM()]
NOISY_CASES = ("fork", "mask_scale", "chain", "vector_layers", "onehot", "global_local", "reparam_above_discrete")
QUICK = {("fork", DisARM()), ("vector_layers", DisARM()), ("chain", DebiasedStraightThrough())}


def noisy_cases() -> Iterator[Any]:
    for name in NOISY_CASES:
        for estimator in NOISY:
            marks = () if (name, estimator) in QUICK else (pytest.mark.slow,)
            yield pytest.param(name, estimator, id=f"{name}-{estimator}", marks=marks)


def repeat_in_particles(case: Case, estimator: Any, num_samples: int, particles: int) -> dict[str, Tensor]:
    """Gradients of many steps, each the mean over vectorised particles."""
    elbo, guide = train(estimator, case, particles, steps=0, **VECTORISED)
    case.params()
    pyro.set_rng_seed(3)
    return sample_gradients(elbo, case.model, guide, *case.args, num_samples=num_samples)


def largest_z(case: Case, estimator: Any, num_samples: int = 40, particles: int = 3500, power: float = 0.005) -> float:
    samples = repeat_in_particles(case, estimator, num_samples, particles)
    case.params()
    truth = exact_gradient(case.model, case.guide, *case.args)
    z = z_scores(samples, truth, max_relative_error=power)
    return max(float(value.abs().max()) for value in z.values())


@pytest.mark.parametrize(("name", "estimator"), list(noisy_cases()))
def test_mean_gradient_is_exact(name: str, estimator: Any) -> None:
    assert largest_z(BY_NAME[name], estimator) < 4.0


def test_wrong_sign_is_seen() -> None:
    assert largest_z(BY_NAME["fork"], wrong_sign(DisARM())) > 20.0
    case = BY_NAME["vector"]
    elbo, guide = train(MuPropWithoutSlope(), case, 1)
    assert error(elbo, case, guide) > 1e-2


@dataclass(frozen=True)
class MuPropWithoutSlope(MuProp):
    """Leaves out the gradient of the expansion."""

    def __call__(self, context: SiteContext) -> SiteTerm:
        term = super().__call__(context)
        return SiteTerm(term.surrogate - _slope_part(context))


def _slope_part(context: SiteContext) -> Tensor:
    from pyro_bpq.estimators.base import event_sum
    from pyro_bpq.estimators.slopes import mean_value

    mean = mean_value(context)
    _, slope = context.program.gradient(mean.detach())
    return event_sum(slope * mean, context.cost.dim())


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


def test_both_expansions_are_unbiased_and_not_the_same() -> None:
    variances = []
    for mean_field in (False, True):
        pyro.clear_param_store()
        elbo, guide = TraceBackpropQ_ELBO().eval(), functools.partial(layers_guide, MuProp(mean_field=mean_field))
        assert_unbiased(elbo, layers_model, guide)
        variances.append(float(expected_moments(elbo, layers_model, guide).variance["q"]))
    assert variances[0] != pytest.approx(variances[1], rel=1e-3)


# Order of variances, on fixed models.


def total_variance(estimator: Any, case: Case, names: tuple[str, ...]) -> float:
    elbo, guide = train(estimator, case, 2)
    case.params()
    moments = expected_moments(elbo, case.model, guide, *case.args)
    return sum(float(moments.variance[name].sum()) for name in names)


@pytest.mark.parametrize(("name", "names"), [("vector", ("qz",)), ("fork", ("qa", "qb", "qc"))])
def test_leave_one_out_has_less_variance_than_the_score_function(name: str, names: tuple[str, ...]) -> None:
    case = BY_NAME[name]
    plain = total_variance(ScoreFunction(), case, names)
    assert total_variance(ScoreFunction(LeaveOneOut()), case, names) < 0.9 * plain


LATENTS, PIXELS = 8, 12


def vae(rows: int) -> tuple[Any, Any, Tensor]:
    """A fixed VAE of Bernoulli latents, its guide, and the leaf of its logits: rows are repetitions."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(LATENTS, PIXELS, generator=generator)
    x = (torch.rand(PIXELS, generator=generator) < 0.4).to(weight.dtype)
    logits = torch.randn(LATENTS, generator=generator).expand(rows, -1).clone().requires_grad_()

    def model() -> None:
        with pyro.plate("rows", rows, dim=-1):
            z = pyro.sample("z", dist.Bernoulli(logits=torch.zeros(LATENTS)).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=(2 * z - 1) @ weight).to_event(1), obs=x.expand(rows, -1))

    def guide() -> None:
        with pyro.plate("rows", rows, dim=-1):
            pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))

    return model, guide, logits


def squares(estimator: Any, particles: int, rows: int = 40_000) -> tuple[Tensor, Tensor]:
    """Mean gradient, and the squared deviation from it of each row."""
    pyro.set_rng_seed(0)
    model, guide, logits = vae(rows)
    more = {"vectorize_particles": True, "max_plate_nesting": 1} if particles > 1 else {}
    TraceBackpropQ_ELBO(particles, estimator=estimator, critic=None, **more).loss_and_grads(model, guide)
    assert logits.grad is not None
    mean = logits.grad.mean(0)
    return mean, (logits.grad - mean).square().sum(-1)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ((DisARM(), 1), (ScoreFunction(LeaveOneOut()), 2)),
        ((MuProp(LeaveOneOut()), 2), (ScoreFunction(LeaveOneOut()), 2)),
        ((DebiasedStraightThrough(), 1), (DisARM(), 1)),
    ],
    ids=repr,
)
def test_variance_on_a_vae(better: tuple[Any, int], worse: tuple[Any, int]) -> None:
    (mean, low), (other, high) = squares(*better), squares(*worse)
    error = (low.var() + high.var()).div(len(low)).sqrt()
    assert float((high.mean() - low.mean()) / error) > 4.0
    # Both are unbiased: their means agree.
    distance = float((mean - other).square().sum() / ((low.mean() + high.mean()) / len(low)))
    assert distance < 4.0


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


# Supports without end, by closed forms.
