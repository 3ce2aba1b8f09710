"""Critics of the importance-weighted bound: unbiased against enumeration, and worth their while."""

from __future__ import annotations

from typing import Any

import pyro
import pytest
from bounds import (
    ATOL,
    COIN,
    coin_guide,
    coin_model,
    error,
)
from models import BY_NAME, Case
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_bpq import (
    LeaveOneOut,
    MLPCritic,
    RunningBaseline,
    ScoreFunction,
    TabularCritic,
    TraceBackpropQ_IWAE,
    config_bpq,
)

STEPS = 100


def train(iwae: TraceBackpropQ_IWAE, case: Case, steps: int = STEPS) -> TraceBackpropQ_IWAE:
    """Trains critics while the programs move, then freezes them."""
    case.params()
    svi = SVI(case.model, case.guide, Adam({"lr": 0.02}), iwae)
    pyro.set_rng_seed(1)
    for _ in range(steps):
        svi.step(*case.args)
    return iwae.eval()


def largest_table(iwae: TraceBackpropQ_IWAE) -> float:
    """The largest weight of a trained head of a critic."""
    return max(float(weight.abs().max()) for weight in iwae.critics.weights().values())


OPTIONS: dict[str, dict[str, Any]] = {
    "perceptron": {"critic": MLPCritic()},
    "table": {"critic": TabularCritic()},
    "user's optimiser": {"critic": MLPCritic(), "learner": None},
    "arithmetic": {"critic": MLPCritic(), "baseline": "arithmetic"},
    "no baseline": {"critic": MLPCritic(), "baseline": None},
}
SMALL = ["fork", "chain", "discrete_above_reparam", "vector", "plate", "global_local"]


@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
@pytest.mark.parametrize("name", [n for n in SMALL if BY_NAME[n].num_states <= 16])
def test_gradient_with_trained_critics_is_exact(name: str, options: dict[str, Any]) -> None:
    iwae = train(TraceBackpropQ_IWAE(2, **options), BY_NAME[name])
    assert iwae.critics.weights() or name == "vector"
    assert error(iwae, BY_NAME[name], 2) < ATOL


@pytest.mark.parametrize("vectorised", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_any_number_of_samples(k: int, vectorised: bool) -> None:
    shape = {"vectorize_particles": vectorised, "max_plate_nesting": 1}
    iwae = train(TraceBackpropQ_IWAE(k, critic=MLPCritic(), **shape), COIN)
    assert largest_table(iwae) > 0.0
    assert error(iwae, COIN, k) < ATOL


@pytest.mark.parametrize("estimator", [None, ScoreFunction(LeaveOneOut()), ScoreFunction(RunningBaseline())], ids=str)
def test_other_bounds_are_the_baseline(estimator: Any) -> None:
    guide = coin_guide if estimator is None else config_bpq(coin_guide, estimator=estimator)
    case = Case("coin", coin_model, guide, COIN.shapes, 2)
    critic = MLPCritic() if estimator is None else None
    iwae = train(TraceBackpropQ_IWAE(2, num_outer=2, critic=critic), case)
    assert error(iwae, case, 2) < ATOL
    assert iwae.critics.blocks
