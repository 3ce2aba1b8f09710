"""The importance-weighted bound and its gradient, against enumeration of all joint states of K samples."""

from __future__ import annotations

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from bounds import (
    ATOL,
    COIN,
    DATA,
    coin_guide,
    coin_model,
    error,
    exact_bound,
    gradients,
    one_row,
    rows_guide,
    rows_model,
)
from models import Case, real
from pyro.infer import RenyiELBO
from steps import from_seed, rows, warnings_of

from pyro_bpq import AllAction, TraceBackpropQ_IWAE, config_bpq
from pyro_bpq.errors import PlateError, UnsupportedSiteError
from pyro_bpq.objectives.iwae import _without_each, leave_one_out_signal, multi_sample_bound
from pyro_bpq.testing import expected_gradient, expected_moments


@pytest.mark.parametrize("baseline", ["geometric", "arithmetic", None])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_gradient_of_more_samples_is_exact(k: int, baseline: str | None) -> None:
    assert error(TraceBackpropQ_IWAE(k, baseline=baseline), COIN, k) < ATOL
    vectorised = TraceBackpropQ_IWAE(k, baseline=baseline, vectorize_particles=True, max_plate_nesting=1)
    assert error(vectorised, COIN, k) < ATOL


def test_outer_samples_are_averaged() -> None:
    assert error(TraceBackpropQ_IWAE(2, num_outer=2), COIN, 2) < ATOL


def test_value_equals_pyros_bound_draw_by_draw() -> None:
    COIN.params()
    for vectorized in (False, True):
        options = {"num_particles": 4, "vectorize_particles": vectorized, "max_plate_nesting": 1}
        for seed in range(5):
            theirs, ours = RenyiELBO(alpha=0, **options), TraceBackpropQ_IWAE(**options)
            losses = [from_seed(seed, elbo.loss, coin_model, coin_guide) for elbo in (theirs, ours)]
            assert losses[0] == pytest.approx(losses[1])


def test_leave_one_out_lowers_the_variance() -> None:
    COIN.params()
    found = {}
    for baseline in ("geometric", "arithmetic", None):
        iwae = TraceBackpropQ_IWAE(3, baseline=baseline)
        found[baseline] = float(expected_moments(iwae, coin_model, coin_guide).variance["qa"].sum())
    assert found["geometric"] < 0.7 * found[None] and found["arithmetic"] < 0.7 * found[None]


# Rows.


@pytest.mark.parametrize("vectorised", [False, True])
@pytest.mark.parametrize("size", [None, 1, 2])
def test_rows_have_bounds_of_their_own(size: int | None, vectorised: bool) -> None:
    Case("rows", rows_model, rows_guide, {"pa": (), "qa": (3,)}, 8).params()
    truth = gradients(sum(exact_bound(*one_row(i), (), 2) for i in range(3)))
    options = {"vectorize_particles": vectorised, "max_plate_nesting": 2}
    if size is not None and not vectorised:
        with pytest.raises(PlateError, match="a subsample of its own"):
            expected_gradient(TraceBackpropQ_IWAE(2, plate="rows"), rows_model, rows_guide, DATA, size)
        return
    found = expected_gradient(TraceBackpropQ_IWAE(2, plate="rows", **options), rows_model, rows_guide, DATA, size)
    for name, gradient in truth.items():
        torch.testing.assert_close(found[name], gradient, rtol=0.0, atol=ATOL)
    # One weight for all rows is another bound.
    whole = expected_gradient(TraceBackpropQ_IWAE(2, **options), rows_model, rows_guide, DATA, size)
    assert any(float((whole[name] - gradient).abs().max()) > 1e-3 for name, gradient in truth.items())


def test_geometric_mean_by_hand() -> None:
    log_w = real(0.0, math.log(4.0), math.log(9.0)).reshape(1, 3, 1)
    found = _without_each(log_w, "geometric").exp().flatten()
    torch.testing.assert_close(found, real((6 + 4 + 9) / 3, (1 + 3 + 9) / 3, (1 + 4 + 2) / 3))
    found = _without_each(log_w, "arithmetic").exp().flatten()
    torch.testing.assert_close(found, real(6.5, 5.0, 2.5))


def test_impossible_samples_do_no_harm() -> None:
    log_w = real(0.0, -math.inf, 1.0).reshape(1, 3, 1)
    score = torch.zeros(1, 3, 1, dtype=torch.float64, requires_grad=True)
    for baseline in ("arithmetic", None):
        loss, surrogate = multi_sample_bound(log_w, score, leave_one_out_signal(log_w, baseline))
        (gradient,) = torch.autograd.grad(surrogate, score)
        assert bool(torch.isfinite(loss)) and bool(torch.isfinite(gradient).all())


def outside_model() -> None:
    rows_model()
    pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(0.0))


def test_errors() -> None:
    with pytest.raises(PlateError, match="'y' is not in"):
        TraceBackpropQ_IWAE(plate="rows").loss(outside_model, rows_guide)
    pyro.clear_param_store()
    with pytest.raises(UnsupportedSiteError, match=r"'a' .*one-sample"):
        TraceBackpropQ_IWAE().loss_and_grads(coin_model, config_bpq(coin_guide, estimator=AllAction()))


@pytest.mark.parametrize("options", [{}, {"vectorize_particles": True}, {"compile": "eager"}])
@pytest.mark.parametrize("meet", [False, True])
def test_rows_of_weights_of_their_own_have_to_keep_apart(meet: bool, options: dict[str, Any]) -> None:
    programs = rows(lambda z: torch.fft.fft(z, dim=-1).real if meet else 2.0 * z, DATA)
    options |= {"num_particles": 2, "plate": "rows", "max_plate_nesting": 1}
    found = warnings_of(*programs, steps=3, kind=TraceBackpropQ_IWAE, **options)
    assert len(found) == meet and all("Rows of the plate 'rows' meet in -log p(x)" in text for text in found)
