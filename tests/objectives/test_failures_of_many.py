"""Errors of programs that have run with many particles at once."""

from collections import deque
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import filtered, repeat
from torch import tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.errors import TooManyOutcomesError
from pyro_bpq.testing import expected_gradient


class Rows:
    """Bits in rows; the model fails in some runs."""

    def __init__(self) -> None:
        self.kept: Any = None
        self.errors = deque[bool]()  # of a library: a call with other contents does not look new

    def model(self) -> None:
        with pyro.plate("rows", 12):
            z = pyro.sample("z", dist.Bernoulli(0.4 * torch.ones(12, 2)).to_event(1))
            self.kept = z
            if self.errors and self.errors.pop():
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


def fail_once(elbo: TraceBackpropQ_ELBO, rows: Rows) -> None:
    rows.errors.append(True)
    with pytest.raises(RuntimeError, match="boom"):
        elbo.loss_and_grads(rows.model, rows.guide)
    assert elbo.num_particles == 8


def test_an_error_changes_nothing() -> None:
    elbo, rows = trained()
    plan = elbo.plan
    fail_once(elbo, rows)
    with filtered("error"):
        elbo.loss_and_grads(rows.model, rows.guide)
    assert elbo.num_particles == 8 and elbo.plan is plan


def test_evaluations_settle_nothing() -> None:
    elbo, rows = trained()
    elbo.eval()
    fail_once(elbo, rows)
    with pytest.raises(TooManyOutcomesError):
        expected_gradient(elbo, rows.model, rows.guide)
    assert elbo.num_particles == 8
