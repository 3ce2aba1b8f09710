"""``pyro.deterministic`` changes nothing: such programs are summed, and compiled, as those without."""

from __future__ import annotations

import itertools
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import SGD
from steps import WAYS, assert_recorded, filtered, fresh, repeat, trained
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.testing import expected_gradient

ROWS, STEPS = 4, 60
DATA = torch.tensor([0.3, 1.4, -0.2, 0.9])
OPTIONS: dict[str, dict[str, Any]] = {"default": {}, "critics": {"num_particles": 1}, "together": WAYS["vectorised"]}


class Rows:
    """A model and a guide, with statements or without, that count the runs of the model."""

    def __init__(self, has_statements: bool) -> None:
        # A number within reach that changes in each step would be another call in each step.
        self.has_statements, self.runs = has_statements, itertools.count()

    def say(self, name: str, value: Tensor) -> Tensor:
        return pyro.deterministic(name, value) if self.has_statements else value

    def model(self) -> None:
        next(self.runs)
        with pyro.plate("rows", ROWS):
            z = pyro.sample("z", dist.Bernoulli(0.4))
            mean = self.say("mean", 2.0 * z)
            pyro.sample("x", dist.Normal(mean, 1.0), obs=DATA)
        self.say("all", z)

    def guide(self) -> None:
        with pyro.plate("rows", ROWS):
            pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.linspace(-1.0, 1.0, ROWS))))


class Chain(Rows):
    def model(self) -> None:
        next(self.runs)
        zs = [torch.zeros(())]
        for t in range(ROWS):
            zs.append(pyro.sample(f"z_{t}", dist.Bernoulli(logits=zs[-1] - 0.3)))
            pyro.sample(f"x_{t}", dist.Normal(self.say(f"mean_{t}", 2.0 * zs[-1]), 1.0), obs=DATA[t])
        self.say("sum", zs[1] + zs[3])

    def guide(self) -> None:
        q = pyro.param("q", torch.linspace(-1.0, 1.0, ROWS))
        for t in range(ROWS):
            pyro.sample(f"z_{t}", dist.Bernoulli(logits=q[t]))


@pytest.mark.parametrize("kind", [Rows, Chain])
def test_the_loss_is_summed_in_as_many_runs(kind: type[Rows]) -> None:
    found = list[tuple[int, list[float]]]()
    for has_statements in (False, True):
        fresh()
        programs, elbo = kind(has_statements), TraceBackpropQ_ELBO()
        with filtered("error"):
            losses = repeat(STEPS, SVI(programs.model, programs.guide, SGD({"lr": 0.01}), elbo).step)
        assert "the loss is summed over all values" in str(elbo)
        found.append((next(programs.runs), losses))
    assert found[0][0] == found[1][0] and found[0][1] == pytest.approx(found[1][1], rel=1e-6)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", [Rows, Chain])
def test_steps_are_compiled(kind: type[Rows], options: dict[str, Any]) -> None:
    programs = kind(True)
    with filtered("error"):
        assert_recorded(lambda: (programs.model, programs.guide, [()] * STEPS), **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_expected_gradient_is_that_without_them(options: dict[str, Any]) -> None:
    found = []
    for has_statements in (False, True):
        programs, elbo = Chain(has_statements), TraceBackpropQ_ELBO(**options)
        trained(elbo, programs.model, programs.guide, steps=STEPS, lr=0.01)
        found.append(expected_gradient(elbo.eval(), programs.model, programs.guide)["q"])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)
