"""Rows of a table whose number was drawn are views, and programs write into them."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import filtered, repeat
from torch import Tensor

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.testing import assert_unbiased


def taken_late(table: Tensor, z: Tensor) -> None:
    """A row that changes with its table."""
    row = table[z]
    table.mul_(2.0)
    table[0] = table[0] + row


WRITES = {
    "whole": lambda table, z: table[z].add_(1.0),
    "part": lambda table, z: table[z].__setitem__(0, 3.0),
    "back": lambda table, z: table.__setitem__(z, table[z].add_(1.0)),
    "elsewhere": lambda table, z: table.__setitem__((z + 1) % 3, table[z].add_(1.0)),
    "late": taken_late,
}


LOSSES = {"compile": "eager", "estimator": ScoreFunction()}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("options", [{}, {"num_particles": 1}, LOSSES])
def test_writes_into_rows_count(write: Callable[[Tensor, Tensor], Any], options: dict[str, Any]) -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Categorical(logits=torch.zeros(3)))
        table = torch.ones(3, 2)
        write(table, z)
        pyro.factor("f", -(table * torch.arange(6.0).reshape(3, 2)).sum())

    def guide() -> None:
        pyro.sample("z", dist.Categorical(logits=pyro.param("q", torch.tensor([0.1, 0.2, 0.3]))))

    def losses(**chosen: Any) -> list[float]:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        elbo = TraceBackpropQ_ELBO(**chosen)
        with filtered("ignore", BPQWarning):
            found = repeat(8, elbo.loss_and_grads, model, guide)
        assert_unbiased(elbo.eval(), model, guide)
        return found

    found = losses(**options)
    if options is LOSSES and write is not taken_late:
        assert found == pytest.approx(losses(estimator=ScoreFunction()), rel=1e-6)
