"""Bounds of several samples whose gradients were biased without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import rows, warnings_of

from pyro_bpq import TraceBackpropQ_IWAE
from pyro_bpq.errors import UnsupportedProgramError

STEERED = rows(lambda z: z if z[..., 0].any() else -z, torch.tensor([0.3, -0.7, 1.2]))


@pytest.mark.parametrize("plate", [None, "rows"])
def test_values_that_leave_torch_where_samples_run_in_one_call(plate: Any) -> None:
    with pytest.raises(UnsupportedProgramError, match="each of 2 particles that ran at once has its own"):
        TraceBackpropQ_IWAE(2, plate=plate, vectorize_particles=True).loss_and_grads(*STEERED)


@pytest.mark.parametrize("plate", [None, "rows"])
def test_values_that_leave_torch_where_rows_have_bounds_of_their_own(plate: Any) -> None:
    found = warnings_of(*STEERED, steps=3, kind=TraceBackpropQ_IWAE, num_particles=2, plate=plate)
    assert len(found) == bool(plate)
    assert all("Rows of the plate 'rows' may meet, as values of 'z' leave torch" in text for text in found)
