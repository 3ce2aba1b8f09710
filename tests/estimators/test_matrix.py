"""Every unbiased estimator of a finite site on every kind of site: three distributions, scalar and vector, in and out
of a plate, with a site downstream; critics, networks and scales trained first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from enumerable import enumerable_noise
from problems import public
from steps import largest_error, trained
from torch import Tensor

from pyro_bpq import MLPCritic, TraceBackpropQ_ELBO
from pyro_bpq.estimators import (
    AllAction,
    CriticBaseline,
    CrossedLeaveOneOut,
    DebiasedStraightThrough,
    DisARM,
    Hindsight,
    LeaveOneOut,
    MuProp,
    RunningBaseline,
    ScoreFunction,
    SecondRun,
)
from pyro_bpq.estimators.base import SiteInfo
from pyro_bpq.rollout.features import Components
from pyro_bpq.testing import ChoiceNoise, exact_gradient, expected_gradient

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

# Particles, estimator. What those run again draws from the program, and is enumerated, too.
EXACT: list[tuple[int, Any]] = [
    *((1, estimator) for estimator in (ScoreFunction(), ScoreFunction(RunningBaseline()), CriticBaseline())),
    *((1, estimator) for estimator in (AllAction(), AllAction(exact=True), AllAction(exact=False), MuProp())),
    *((1, estimator) for estimator in (SecondRun(), DisARM(), DebiasedStraightThrough())),
    *((2, estimator) for estimator in (ScoreFunction(LeaveOneOut()), AllAction(), MuProp(LeaveOneOut()))),
    *((2, estimator) for estimator in (CrossedLeaveOneOut(), Hindsight())),
]
# No finite sites, noise that has no few values, or counts: see their own tests.
ELSEWHERE = {"Pathwise", "QProp", "LAX", "LAXQ", "Differences", "REBAR", "RELAX", "RELAXQ", "QControlVariate"}
MAX_OUTCOMES = 400


def train(estimator: Any, case: Kind, particles: int, later: bool) -> tuple[Any, ...]:
    """A frozen ELBO that has learned, and its programs."""

    model, guide = partial(case.model, later), partial(case.guide, later, estimator)
    elbo = trained(TraceBackpropQ_ELBO(particles, critic=None), model, guide)
    if estimator.uses_critic and later:
        # The head of the differences between values starts at zero: it has learned something.
        heads = [v for key, v in elbo.critics.blocks.state_dict().items() if key.endswith("critic.biases.1")]
        assert heads and all(bool(v.any()) for v in heads)
    return elbo.eval(), model, guide


@pytest.mark.parametrize(
    ("particles", "estimator", "case"),
    [(*one, case) for one in EXACT for case in CASES if one[1].unsupported(case.site) is None],
    ids=str,
)
def test_expected_gradient_is_exact(particles: int, estimator: Any, case: Kind) -> None:
    # Runs of their own multiply the outcomes.
    most, noise = 6 if "program" in estimator.needs else MAX_OUTCOMES, ChoiceNoise()
    elbo, model, guide = train(estimator, case, particles, later=case.outcomes(True) ** particles <= most)
    truth = exact_gradient(model, guide)
    with enumerable_noise(noise):
        assert largest_error(truth, expected_gradient(elbo, model, guide, noise=noise)) < 1e-10


def test_nothing_is_left_out() -> None:
    unbiased = {name for name, kind in public().items() if kind.is_unbiased}
    assert unbiased - ELSEWHERE == {type(estimator).__name__ for _, estimator in EXACT} and len(CASES) == 12
