"""Every unbiased estimator of a finite site on every kind of site: three distributions, scalar and vector, in and out
of a plate, with a site downstream; critics, networks and scales trained first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import wrong_sign
from steps import trained
from torch import Tensor

import pyro_bpq.estimators as package
from pyro_bpq import MLPCritic, TraceBackpropQ_ELBO
from pyro_bpq.estimators import (
    REBAR,
    RELAX,
    RELAXQ,
    AllAction,
    CriticBaseline,
    CrossedLeaveOneOut,
    DebiasedStraightThrough,
    DisARM,
    Estimator,
    Hindsight,
    LeaveOneOut,
    MuProp,
    QControlVariate,
    RunningBaseline,
    ScoreFunction,
    SecondRun,
    SiteContext,
    SiteTerm,
)
from pyro_bpq.estimators.base import SiteInfo
from pyro_bpq.rollout.features import Components
from pyro_bpq.testing import exact_gradient, expected_gradient, sample_gradients, z_scores

KINDS = {"bernoulli": dist.Bernoulli, "categorical": dist.Categorical, "one_hot": dist.OneHotCategorical}
ROWS = 2


@dataclass(frozen=True)
class Kind:
    """A program ``z -> w -> x`` with ``z`` of this kind; ``w`` and ``x`` read it by a smooth nonlinear function.

    The site downstream is left out where two particles would have too many joint outcomes.
    """

    kind: str
    is_vector: bool
    in_plate: bool

    def __str__(self) -> str:
        return f"{self.kind}-{'vector' if self.is_vector else 'scalar'}-{'plate' if self.in_plate else 'alone'}"

    @property
    def values(self) -> int:
        return 2 if self.kind == "bernoulli" or (self.is_vector and self.in_plate) else 3

    @property
    def site(self) -> SiteInfo:
        event = (2,) if self.is_vector else ()
        name = "OneHotCategorical" if self.kind == "one_hot" else self.kind.title()
        return SiteInfo("z", name, False, Components(self.kind, event, self.values), 2)  # type: ignore[arg-type]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the logits of all rows."""
        event = (2,) if self.is_vector else ()
        own = () if self.kind == "bernoulli" else (self.values,)
        return (*((ROWS,) if self.in_plate else ()), *event, *own)

    def latent(self, logits: Tensor) -> Any:
        fn = KINDS[self.kind](logits=logits)
        return fn.to_event(1) if self.is_vector else fn

    def read(self, z: Tensor) -> Tensor:
        """A number per row."""
        z = z.to(torch.get_default_dtype())
        if self.kind == "one_hot":
            z = z @ torch.tensor([0.3, -0.9, 1.4])[: self.values]
        if self.is_vector:
            z = (z * torch.tensor([1.0, -0.7])).sum(-1) + 0.5 * z.prod(-1)
        return z + 0.4 * torch.sin(2.0 * z)

    def model(self, later: bool) -> None:
        with self.rows():
            prior = 0.3 * torch.cos(torch.arange(math.prod(self.shape[self.in_plate :]) or 1) + 0.5)
            z = pyro.sample("z", self.latent(prior.reshape(self.shape[self.in_plate :])))
            mean = self.read(z)
            if later:
                w = pyro.sample("w", dist.Bernoulli(logits=0.4 - 0.8 * mean))
                mean = mean + 1.2 * w * mean
            pyro.sample("x", dist.Normal(mean, 0.9), obs=torch.tensor([1.1, -0.6])[: ROWS if self.in_plate else 1])

    def guide(self, later: bool, estimator: Any) -> None:
        size = math.prod(self.shape)
        start = (0.8 * torch.sin(1.7 * torch.arange(size) + 0.4)).reshape(self.shape)
        with self.rows():
            options = {"estimator": estimator}
            if estimator.uses_critic:
                options["critic"] = MLPCritic((8,))
            z = pyro.sample("z", self.latent(pyro.param("qz", start)), infer={"bpq": options})
            if later:
                slope = pyro.param("qw", torch.tensor([0.5, -0.6]))
                pyro.sample("w", dist.Bernoulli(logits=slope[0] + slope[1] * self.read(z)))

    def rows(self) -> Any:
        # A plate of one row for the observation's sake, so that shapes are those of the plated program.
        return pyro.plate("rows", ROWS if self.in_plate else 1, dim=-1)

    def outcomes(self, later: bool) -> int:
        row = self.values ** (2 if self.is_vector else 1) * (2 if later else 1)
        return row ** (ROWS if self.in_plate else 1)


CASES = [Kind(kind, is_vector, in_plate) for kind in KINDS for is_vector in (False, True) for in_plate in (False, True)]

# Without noise of their own; what they run again draws from the program: particles, estimator.
EXACT: list[tuple[int, Any]] = [
    (1, ScoreFunction()),
    (1, ScoreFunction(RunningBaseline())),
    (2, ScoreFunction(LeaveOneOut())),
    (1, AllAction()),
    (1, AllAction(exact=True)),
    (1, AllAction(exact=False)),
    (2, AllAction()),
    (1, CriticBaseline()),
    (1, MuProp()),
    (2, MuProp(LeaveOneOut())),
    (1, SecondRun()),
    (2, CrossedLeaveOneOut()),
    (2, Hindsight()),
]
# Those with noise of their own.
NOISY: list[Any] = [
    DebiasedStraightThrough(),
    DisARM(),
    REBAR(),
    RELAX(),
    RELAXQ(),
    QControlVariate(),
]
# No finite sites, see their own tests; and what draws nothing that a score would need.
ELSEWHERE = {"Pathwise", "QProp", "LAX", "LAXQ", "Differences"}
MAX_OUTCOMES = 400


def serves(estimator: Any, case: Kind) -> bool:
    return estimator.unsupported(case.site) is None


def train(estimator: Any, case: Kind, particles: int, later: bool, steps: int = 20, **more: Any) -> tuple[Any, ...]:
    """A frozen ELBO that has learned, and its programs."""

    def model() -> None:
        case.model(later)

    def guide() -> None:
        case.guide(later, estimator)

    elbo = trained(TraceBackpropQ_ELBO(particles, critic=None, **more), model, guide, steps=steps)
    if estimator.uses_critic and later:
        # The head of the differences between values starts at zero: it has learned something.
        heads = [v for key, v in elbo.critics.blocks.state_dict().items() if key.endswith("critic.biases.1")]
        assert heads and all(bool(v.any()) for v in heads)
    return elbo.eval(), model, guide


def exact_params() -> Iterator[Any]:
    for i, (particles, estimator) in enumerate(EXACT):
        served = [case for case in CASES if serves(estimator, case)]
        for j, case in enumerate(served):
            # Two of each in the default run; which ones goes round.
            is_quick = j in (i % len(served), (i + 5) % len(served)) and case.outcomes(True) ** particles < 100
            marks = () if is_quick else (pytest.mark.slow,)
            yield pytest.param(particles, estimator, case, id=f"{estimator}-{particles}-{case}", marks=marks)


@pytest.mark.parametrize(("particles", "estimator", "case"), list(exact_params()))
def test_expected_gradient_is_exact(particles: int, estimator: Any, case: Kind) -> None:
    # Runs of their own multiply the outcomes.
    most = 6 if "program" in estimator.needs else MAX_OUTCOMES
    later = case.outcomes(True) ** particles <= most
    elbo, model, guide = train(estimator, case, particles, later)
    truth = exact_gradient(model, guide)
    assert float(truth["qz"].abs().max()) > 1e-2
    found = expected_gradient(elbo, model, guide)
    for name, gradient in truth.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10)


def noisy_params() -> Iterator[Any]:
    for i, estimator in enumerate(NOISY):
        served = [case for case in CASES if serves(estimator, case)]
        for j, case in enumerate(served):
            is_quick = j == i % len(served) and isinstance(estimator, (DisARM, REBAR, QControlVariate))
            marks = () if is_quick else (pytest.mark.slow,)
            yield pytest.param(estimator, case, id=f"{estimator}-{case}", marks=marks)


def worst_z(estimator: Any, case: Kind, particles: int = 3000, samples: int = 40) -> float:
    """Largest error of the site's gradient in standard errors, which are below 0.5 % of the gradient: 2 % show."""
    more = {"vectorize_particles": True, "max_plate_nesting": 1}
    elbo, model, guide = train(estimator, case, particles, True, steps=15, **more)
    truth = {"qz": exact_gradient(model, guide)["qz"]}
    pyro.set_rng_seed(3)
    found, scale = sample_gradients(elbo, model, guide, num_samples=samples)["qz"], float(truth["qz"].abs().max())
    # The first samples tell roughly how many are needed.
    for _ in range(4):
        error = float(found.std(0).max()) / math.sqrt(len(found)) / scale
        if error < 0.0047:
            break
        again = max(math.ceil(len(found) * ((error / 0.0045) ** 2 - 1.0)), 5)
        assert again < 2000, f"standard error {error:.1%}"
        found = torch.cat([found, sample_gradients(elbo, model, guide, num_samples=again)["qz"]])
    return float(z_scores({"qz": found}, truth, max_relative_error=0.005)["qz"].abs().max())


@pytest.mark.parametrize(("estimator", "case"), list(noisy_params()))
def test_mean_gradient_is_exact(estimator: Any, case: Kind) -> None:
    assert worst_z(estimator, case) < 4.0


# Planted faults, which both checks have to see.


@dataclass(frozen=True)
class Scaled(DisARM):
    factor: float = 1.0

    def __call__(self, context: SiteContext) -> SiteTerm:
        return SiteTerm(self.factor * super().__call__(context).surrogate)


@pytest.mark.parametrize(("factor", "least"), [(-1.0, 50.0), (1.02, 4.0), (0.98, 4.0)])
def test_worst_z_sees_a_wrong_sign_and_two_percent(factor: float, least: float) -> None:
    assert worst_z(Scaled(factor=factor), Kind("bernoulli", True, True)) > least


@dataclass(frozen=True)
class HalfTheCritic(CriticBaseline):
    """Half of the critic's own value in the baseline."""

    def __call__(self, context: SiteContext) -> SiteTerm:
        if context.learned is None or context.index is None:
            return super().__call__(context)
        own = context.learned.gather(-1, context.index.unsqueeze(-1)).squeeze(-1).sum(-1)
        return super().__call__(replace(context, cost=context.cost - 0.5 * own))


@pytest.mark.parametrize("estimator", [wrong_sign(SecondRun()), HalfTheCritic()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("case", [CASES[0], CASES[7], CASES[10]], ids=str)
def test_exact_check_sees_a_planted_fault(estimator: Any, case: Kind) -> None:
    elbo, model, guide = train(estimator, case, 1, estimator.uses_critic)
    truth, found = exact_gradient(model, guide), expected_gradient(elbo, model, guide)
    assert float((truth["qz"] - found["qz"]).abs().max()) > 1e-4


def test_nothing_is_left_out() -> None:
    public = {name: getattr(package, name) for name in package.__all__}
    unbiased = {
        name
        for name, kind in public.items()
        if isinstance(kind, type) and kind is not Estimator and getattr(kind, "is_unbiased", False)
    }
    tested = {type(e).__name__ for _, e in EXACT} | {type(e).__name__ for e in NOISY}
    assert unbiased - ELSEWHERE == tested
    assert len(CASES) == 12
