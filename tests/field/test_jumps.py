"""Costs that jump where the value of a reparameterised site passes a threshold: a pathwise gradient misses the jump.

q = N(m, 1),  p = N(0, 1),  factor f(x);   J = m²/2 - E[f(x)],   dJ/dm = m - E[f'(x)] - Σ_t jump(t) φ(t - m)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import Case
from steps import filtered, run
from torch import Tensor

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.diagnostics import diagnose
from pyro_bpq.errors import BPQWarning
from pyro_bpq.estimators import Estimator

MEAN = 0.195
STEPS = 400
TABLE = (0.5, -1.0, 2.0)
LSTM = torch.nn.LSTM(1, 1, dtype=torch.float32)

Program = Callable[[Tensor], Tensor | float]


def written(x: Tensor) -> Tensor:
    """Writes it in place, after operators that no cost reads."""
    rows, _ = torch.zeros(2), torch.ones(3) + torch.ones(3)
    rows[0] = x
    rows[1].add_(x)
    return 2.6 * (rows.sum() > 0)


def packed() -> Tensor:
    """A number from a tensor that is written into, and then indexed by a mask."""
    rows = torch.zeros(4, 2)
    rows[:2] = 1.0
    return rows[rows > 0].sum()


# What a program adds to the log-joint, and its jumps by threshold.
JUMPS: dict[str, tuple[Program, dict[float, float]]] = {
    "a branch": (lambda x: 2.6 if x > 0 else 0.0, {0.0: 2.6}),
    "where": (lambda x: 1.3 * torch.where(x > 0, 1.0, -1.0), {0.0: 2.6}),
    "round": (lambda x: 2.6 * x.round(), {k + 0.5: 2.6 for k in range(-7, 7)}),
    "a remainder": (lambda x: 2.6 * (x - x % 1), {float(k): 2.6 for k in range(-7, 8)}),
    "a write": (written, {0.0: 2.6}),
    "beside a write that has no rule": (lambda x: 2.6 * (x > 0) + 0.0 * packed(), {0.0: 2.6}),
    "fmod": (lambda x: 2.6 * (x - x.fmod(0.5)), {0.5 * k: 1.3 for k in range(-14, 15) if k}),
    "an index": (
        lambda x: torch.tensor(TABLE)[((x > -0.5).long() + (x > 0.5).long())],
        {-0.5: TABLE[1] - TABLE[0], 0.5: TABLE[2] - TABLE[1]},
    ),
}
# The same without a jump, with the expectation of the slope.
KINKS: dict[str, tuple[Program, float]] = {
    "where": (lambda x: torch.where(x > 0, x, 0.0), 0.5 * (1.0 + math.erf(MEAN / math.sqrt(2.0)))),
    "clamp": (lambda x: x.clamp(min=0.0), 0.5 * (1.0 + math.erf(MEAN / math.sqrt(2.0)))),
    "a remainder": (lambda x: x % 1 + x.floor(), 1.0),
    "fmod": (lambda x: x.fmod(2) + 2 * (x / 2).trunc(), 1.0),
    "a read that changes nothing": (lambda x: x + 0.0 * x.item(), 1.0),
}


def density(x: float) -> float:
    return math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def programs(adds: Program, **chosen: Estimator) -> tuple[Callable[[], None], Callable[[], None]]:
    def model() -> None:
        x = pyro.sample("x", dist.Normal(torch.tensor(0.0), 1.0))
        pyro.factor("f", torch.as_tensor(adds(x)))

    def guide() -> None:
        pyro.sample("x", dist.Normal(pyro.param("mean", lambda: torch.tensor(MEAN)), 1.0), infer={"bpq": chosen})

    return model, guide


def mean_gradient(adds: Program, **chosen: Estimator) -> tuple[float, float]:
    """The mean gradient of some steps, and its standard error."""
    found = run(TraceBackpropQ_ELBO(), Case("jump", *programs(adds, **chosen), {}), STEPS)
    gradients = torch.stack([gradient["mean"] for gradient in found])
    return float(gradients.mean()), float(gradients.std() / math.sqrt(STEPS))


@pytest.mark.filterwarnings("ignore::UserWarning")  # it may say which site jumps, and at what
@pytest.mark.parametrize("chosen", [{}, {"estimator": ScoreFunction()}], ids=["default", "score"])
@pytest.mark.parametrize("name", JUMPS)
def test_the_gradient_sees_a_jump(name: str, chosen: dict[str, Estimator]) -> None:
    adds, jumps = JUMPS[name]
    exact = MEAN - sum(size * density(place - MEAN) for place, size in jumps.items())
    mean, error = mean_gradient(adds, **chosen)
    # The pathwise gradient would be far off.
    assert abs(MEAN - exact) > (10.0 if chosen else 6.0) * error
    assert abs(mean - exact) < 5.0 * error


@pytest.mark.parametrize("name", KINKS)
def test_the_gradient_is_right_where_nothing_jumps(name: str) -> None:
    adds, slope = KINKS[name]
    mean, error = mean_gradient(adds)
    assert abs(mean - (MEAN - slope)) < 5.0 * error < 0.5


@pytest.mark.parametrize("name", JUMPS)
def test_a_diagnosis_does_not_keep_silent_about_jumps(name: str) -> None:
    programs_ = programs(JUMPS[name][0])
    elbo = TraceBackpropQ_ELBO()
    with filtered("ignore", UserWarning):
        elbo.loss_and_grads(*programs_)
        told = str(diagnose(elbo, *programs_, num_samples=20))
    assert "jump" in told and "'x'" in told


class Single(dist.Normal):
    """Draws one value at a time."""

    def sample(self, sample_shape: tuple[int, ...] = ()) -> Tensor:
        assert not sample_shape
        return super().sample()


def test_the_search_draws_as_the_program_does() -> None:
    def guide() -> None:
        pyro.sample("x", Single(pyro.param("mean", torch.tensor(MEAN)), 1.0))

    with pytest.warns(BPQWarning, match="jumps by 2.60 nats where 'gt' switches"):
        TraceBackpropQ_ELBO().loss_and_grads(programs(JUMPS["where"][0])[0], guide)


@pytest.mark.parametrize("other", [lambda x: torch.ones(2) @ x.expand(2), lambda x: LSTM(x.expand(1, 1, 1))[0].sum()])
def test_jumps_are_found_in_single_precision(other: Program) -> None:
    """Beside tensors of the default type, and operators that have no double precision."""
    torch.set_default_dtype(torch.float32)
    with pytest.warns(BPQWarning, match="jumps by 2.60 nats where 'gt' switches"):
        TraceBackpropQ_ELBO().loss_and_grads(*programs(lambda x: 2.6 * (x > 0) + 0.0 * other(x)))
