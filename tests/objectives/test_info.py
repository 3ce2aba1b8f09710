"""What ``elbo.info`` says of a critic, and ``elbo.ms`` of time."""

from __future__ import annotations

import pytest
from models import BY_NAME

from pyro_bpq import TraceBackpropQ_ELBO


@pytest.mark.parametrize("particles", [1, 2])
def test_explained_variance_needs_something_that_varies(particles: int) -> None:
    case = BY_NAME["chain"].params(seed=0)
    elbo = TraceBackpropQ_ELBO(num_particles=particles)
    found = []
    for _ in range(30):
        elbo.loss_and_grads(case.model, case.guide)
        found.append(elbo.info["a"]["explained"])
        assert set(elbo.ms) == {"runs", "signals"} and min(elbo.ms.values()) > 0.0
    # Two particles that agree tell no more than one.
    assert all(value.isnan() for value in found) == (particles == 1)
    assert all(value <= 1.0 for value in found if not value.isnan())
