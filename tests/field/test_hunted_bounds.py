"""Bounds of several samples whose gradients were biased without a word."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import repeat, told
from torch import Tensor

from pyro_bpq import TraceBackpropQ_IWAE
from pyro_bpq.errors import BPQWarning, UnsupportedProgramError


def steered(odds: Tensor, *data: Tensor) -> None:
    with pyro.plate("rows", 3):
        z = pyro.sample("z", dist.Bernoulli(logits=odds))
        for x in data:
            pyro.sample("x", dist.Normal(z if z[..., 0].any() else -z, 1.0), obs=x)


def model() -> None:
    steered(torch.zeros(3), torch.tensor([0.3, -0.7, 1.2]))


def guide() -> None:
    steered(pyro.param("q", torch.tensor([0.3, -0.4, 0.7])))


@pytest.mark.parametrize("plate", [None, "rows"])
def test_values_that_leave_torch_where_samples_run_in_one_call(plate: Any) -> None:
    with pytest.raises(UnsupportedProgramError, match="each of 2 particles that ran at once has its own"):
        TraceBackpropQ_IWAE(2, plate=plate, vectorize_particles=True).loss_and_grads(model, guide)


@pytest.mark.parametrize("plate", [None, "rows"])
def test_values_that_leave_torch_where_rows_have_bounds_of_their_own(plate: Any) -> None:
    elbo = TraceBackpropQ_IWAE(2, plate=plate)
    with told(BPQWarning) as found:
        repeat(3, elbo.loss_and_grads, model, guide)
    assert len(found) == bool(plate)
    assert all("Rows of the plate 'rows' may meet, as values of 'z' leave torch" in text for text in found)
