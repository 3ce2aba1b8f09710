"""What ``elbo.info`` says of a critic."""

from __future__ import annotations

import pytest
import torch
from models import BY_NAME

from pyro_bpq import TraceBackpropQ_ELBO


@pytest.mark.parametrize("particles", [1, 2])
def test_explained_variance_needs_something_that_varies(particles: int) -> None:
    case = BY_NAME["chain"].params()
    torch.manual_seed(0)
    elbo = TraceBackpropQ_ELBO(num_particles=particles)
    found = []
    for _ in range(30):
        elbo.loss_and_grads(case.model, case.guide)
        found.append(elbo.info["a"]["explained"])
    # Two particles that agree tell no more than one.
    assert all(value.isnan() for value in found) == (particles == 1)
    assert all(value <= 1.0 for value in found if not value.isnan())


def test_info_tells_where_the_time_goes() -> None:
    case = BY_NAME["chain"].params()
    elbo = TraceBackpropQ_ELBO()
    for _ in range(2):
        elbo.loss_and_grads(case.model, case.guide)
        assert set(elbo.ms) == {"runs", "signals"} and min(elbo.ms.values()) > 0.0
