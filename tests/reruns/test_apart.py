"""Particles in one vectorised call cost what they cost alone, or they do not run that way."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import repeat, trained
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.testing import assert_unbiased
from pyro_bpq.tracing.component_costs import PlateRows

ROWS = 12


class Programs:
    """A global latent that hardly varies beside rows of data; ``read`` says how the model takes the latent."""

    def __init__(self, read: Any, probability: float = 0.98) -> None:
        self.read, self.probability, self.calls = read, probability, Counter[str]()
        self.data = torch.linspace(-1.0, 1.0, ROWS)

    def model(self) -> None:
        self.calls["model"] += 1
        g = pyro.sample("g", dist.Bernoulli(0.5))
        with pyro.plate("rows", ROWS):
            y = pyro.sample("y", dist.Bernoulli(logits=torch.zeros(ROWS, 2)).to_event(1))
            z = pyro.sample("z", dist.Bernoulli(logits=y - 0.5).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1) + self.read(g), 1.0), obs=self.data)

    def guide(self) -> None:
        pyro.sample("g", dist.Bernoulli(pyro.param("p", torch.tensor(self.probability))))
        with pyro.plate("rows", ROWS):
            logits = pyro.param("w", torch.zeros(2)) * self.data.unsqueeze(-1)
            y = pyro.sample("y", dist.Bernoulli(logits=logits).to_event(1))
            pyro.sample("z", dist.Bernoulli(logits=y - 0.5).to_event(1))


MIXES = {
    "first": lambda g: g.reshape(-1)[0],
    "mean": lambda g: g.mean(),
    "largest": lambda g: g.max(),
    "rolled": lambda g: g.roll(1, 0) if g.dim() else g,
}


@pytest.fixture
def by_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only values tell that particles mix, as after operators that tracked runs do not follow."""
    monkeypatch.setattr(PlateRows, "meeting", lambda self, costs: {})


@pytest.mark.usefixtures("by_values")
@pytest.mark.parametrize("mixes", MIXES)
@pytest.mark.parametrize("probability", [0.5, 0.98, 0.9999])
def test_particles_of_an_open_number_are_hidden_where_they_mix(mixes: str, probability: float) -> None:
    """Sampled values of the latent are nearly always the same in all particles, and do not tell."""
    programs = Programs(MIXES[mixes], probability)
    elbo = TraceBackpropQ_ELBO()
    for _ in range(3):
        elbo.loss_and_grads(programs.model, programs.guide)
        assert elbo.particles.now.is_hidden and elbo.num_particles == 8


PATTERN = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0])
# Costs that differ between particles at one value that is neither likely nor extreme, or not at all yet.
HIDDEN_COSTS = {
    "match": lambda z: 8.0 * (z == PATTERN).all(),
    "match in a row": lambda z: 8.0 * (z == PATTERN).all(-1).any(),
    "eleven": lambda z: 8.0 * (z.sum() == 11.0),
    "weight of zero": lambda z: torch.tensor(0.0) * z.sum(),
    "softmax": lambda z: torch.tensor(0.0) * z.softmax(0).sum(-1),
}


@pytest.mark.parametrize("kind", HIDDEN_COSTS)
@pytest.mark.parametrize("given", [False, True])
def test_tracked_runs_see_particles_meet(kind: str, given: bool) -> None:
    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", 2.0 * PATTERN - 1.0)).to_event(1))

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.full((10,), 0.5)).to_event(1))
        pyro.factor("hit", HIDDEN_COSTS[kind](z))

    options: Any = {"num_particles": 4, "vectorize_particles": True, "max_plate_nesting": 0} if given else {}
    elbo = TraceBackpropQ_ELBO(**options)
    with pytest.warns(BPQWarning, match="depend on the others") if given else contextlib.nullcontext():
        elbo.loss_and_grads(model, guide)
    assert elbo.particles.now.is_hidden and elbo.num_particles == (4 if given else 8)


def test_an_open_number_falls_to_one_where_particles_cannot_be_hidden() -> None:
    kept = []

    def read(g: Tensor) -> Tensor:
        kept.append(g)
        return g.reshape(-1)[0]

    programs, elbo = Programs(read), TraceBackpropQ_ELBO()
    for _ in range(3):
        elbo.loss_and_grads(programs.model, programs.guide)
        assert elbo.num_particles == 1


def test_an_open_number_stays_where_particles_keep_apart() -> None:
    programs = Programs(lambda g: g)
    elbo = trained(TraceBackpropQ_ELBO(), programs.model, programs.guide, steps=20)
    assert elbo.num_particles == 8


def guide(read: Any) -> None:
    pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor([0.3, -0.5]))).to_event(1))


def model(read: Any) -> None:
    z = pyro.sample("z", dist.Bernoulli(torch.tensor([0.1, 0.6])).to_event(1))
    pyro.sample("x", dist.Normal(read(z), 1.0), obs=torch.tensor(0.7))


@pytest.mark.parametrize("nesting", [float("inf"), 0, 2])
@pytest.mark.parametrize("read", [lambda z: z.sum(), lambda z: z.mean() * z[..., 0]], ids=["sum", "mean"])
def test_particles_that_the_user_vectorised_are_hidden_where_they_mix(read: Any, nesting: float) -> None:
    options: dict[str, Any] = {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": nesting}
    elbo = TraceBackpropQ_ELBO(**options)
    with pytest.warns(BPQWarning, match="without seeing each other"):
        elbo.loss_and_grads(model, guide, read)
    assert elbo.max_plate_nesting == (0 if nesting == float("inf") else nesting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        repeat(4, elbo.loss_and_grads, model, guide, read)
        elbo.eval()
        assert_unbiased(elbo, model, guide, read)
