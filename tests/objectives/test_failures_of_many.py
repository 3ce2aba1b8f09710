"""Errors of programs that have run with many particles at once."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import filtered, repeat
from torch import tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning, TooManyOutcomesError
from pyro_bpq.testing import expected_gradient


class Rows:
    """Bits in rows; the model fails in some runs."""

    def __init__(self) -> None:
        self.kept: Any = None
        self.errors = 0

    def model(self) -> None:
        with pyro.plate("rows", 12):
            z = pyro.sample("z", dist.Bernoulli(0.4 * torch.ones(12, 2)).to_event(1))
            self.kept = z
            if self.errors:
                self.errors -= 1
                raise RuntimeError("boom")
            pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=torch.linspace(-1.0, 2.0, 12))

    def guide(self) -> None:
        logits = pyro.param("logits", tensor([0.3, -0.2]))
        with pyro.plate("rows", 12):
            pyro.sample("z", dist.Bernoulli(logits=logits.expand(12, 2)).to_event(1))


def trained() -> tuple[TraceBackpropQ_ELBO, Rows]:
    elbo, rows = TraceBackpropQ_ELBO(), Rows()
    repeat(20, elbo.loss_and_grads, rows.model, rows.guide)
    assert elbo.num_particles == 8
    return elbo, rows


def fail_once(elbo: TraceBackpropQ_ELBO, rows: Rows, warning: str) -> None:
    rows.errors = 1
    with pytest.warns(BPQWarning, match=warning):
        elbo.loss_and_grads(rows.model, rows.guide)


def test_one_error_costs_one_step_of_many_particles() -> None:
    elbo, rows = trained()
    fail_once(elbo, rows, "at once so far, but it failed: boom. This step took one particle")
    assert elbo.num_particles == 1
    with filtered("error"):
        elbo.loss_and_grads(rows.model, rows.guide)
    assert elbo.num_particles == 8


def test_an_error_that_comes_again_settles_one_particle() -> None:
    elbo, rows = trained()
    # One run of the first step, and both ways of the second: in a plate, and hidden, where a kept tensor is refused.
    fail_once(elbo, rows, "the next one tries 8 again")
    fail_once(elbo, rows, "From now on one particle runs")
    elbo.loss_and_grads(rows.model, rows.guide)
    assert elbo.num_particles == 1


def test_an_error_in_one_particle_too_changes_nothing() -> None:
    elbo, rows = trained()
    rows.errors = 2
    with pytest.raises(RuntimeError, match="boom"):
        elbo.loss_and_grads(rows.model, rows.guide)
    assert elbo.num_particles == 8


def test_evaluations_settle_nothing() -> None:
    elbo, rows = trained()
    elbo.eval()
    rows.errors = 1
    elbo.loss_and_grads(rows.model, rows.guide)
    assert elbo.num_particles == 8
    with pytest.raises(TooManyOutcomesError):
        expected_gradient(elbo, rows.model, rows.guide)
    assert elbo.num_particles == 8
