"""Rows of a table whose number was drawn are views, and programs write into them."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import filtered, fresh, hidden, repeat
from torch import Tensor

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.testing import assert_unbiased


def taken_late(table: Tensor, z: Tensor) -> None:
    """A row that changes with its table."""
    row = table[z]
    table.mul_(2.0)
    table[0] = table[0] + row


def other_row(table: Tensor, z: Tensor) -> None:
    """A row that is written into after another one, at an index that is drawn too, has been."""
    row = table[z]
    table[2 - z] += 3.0
    row.add_(5.0)


def put_over(table: Tensor, z: Tensor) -> None:
    """A row that is put over, and read afterwards."""
    row = table[z]
    table[z] = 5.0
    table[0] = table[0] + row


def put_back_early(table: Tensor, z: Tensor) -> None:
    """A row that is put back, and written into afterwards."""
    row = table[z]
    row += 1.0
    table[z] = row
    row += 2.0 * z


WRITES = {
    "whole": lambda table, z: table[z].add_(1.0),
    "part": lambda table, z: table[z].__setitem__(0, 3.0),
    "back": lambda table, z: table.__setitem__(z, table[z].add_(1.0)),
    "elsewhere": lambda table, z: table.__setitem__((z + 1) % 3, table[z].add_(1.0)),
    "late": taken_late,
    "other": other_row,
    "over": put_over,
    "early": put_back_early,
}

LOSSES = {"compile": "eager", "estimator": ScoreFunction()}
HIDDEN = {"num_particles": 2}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("options", [{}, {"num_particles": 1}, HIDDEN, LOSSES])
def test_writes_into_rows_count(write: Callable[[Tensor, Tensor], Any], options: dict[str, Any]) -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Categorical(logits=torch.zeros(3)))
        table = torch.ones(3, 2)
        write(table, z)
        pyro.factor("f", -(table * torch.arange(6.0).reshape(3, 2)).sum())

    def guide() -> None:
        pyro.sample("z", dist.Categorical(logits=pyro.param("q", torch.tensor([0.1, 0.2, 0.3]))))

    def losses(**chosen: Any) -> list[float]:
        fresh()
        elbo = hidden(TraceBackpropQ_ELBO(**chosen), options is HIDDEN)
        with filtered("ignore", BPQWarning):
            found = repeat(8, elbo.loss_and_grads, model, guide)
        assert_unbiased(elbo.eval(), model, guide)
        return found

    found = losses(**options)
    if options is LOSSES:
        assert found == pytest.approx(losses(estimator=ScoreFunction()), rel=1e-6)
