"""Critics of the importance-weighted bound: unbiased against enumeration, and worth their while."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
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
from lattice import Lattice
from models import BY_NAME, Case, irregular, observe
from steps import assert_equal, state_of, trained
from torch import Tensor

from pyro_bpq import (
    AllAction,
    CriticLearner,
    FlipCritic,
    LeaveOneOut,
    MLPCritic,
    MomentCritic,
    Replay,
    RunningBaseline,
    ScoreFunction,
    SlowTracking,
    TabularCritic,
    TraceBackpropQ_IWAE,
    config_bpq,
)
from pyro_bpq.errors import OptionError, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.estimators import DisARM
from pyro_bpq.objectives.multi_sample import bound_rollout
from pyro_bpq.testing import TwoPoint, expected_gradient, expected_moments

STEPS = 20


def train(iwae: TraceBackpropQ_IWAE, case: Case, steps: int = STEPS) -> TraceBackpropQ_IWAE:
    """Trains critics while the programs move, then freezes them."""
    return trained(iwae, *case.programs, params=case.params, steps=steps, lr=0.02).eval()


def largest_table(iwae: TraceBackpropQ_IWAE) -> float:
    """The largest weight of a trained head of a critic."""
    return max(float(weight.detach().abs().max()) for weight in iwae.critics.weights().values())


OPTIONS: dict[str, dict[str, Any]] = {
    "perceptron": {"critic": MLPCritic()},
    "table": {"critic": TabularCritic()},
    "user's optimiser": {"critic": MLPCritic(), "learner": None},
    "several steps": {"critic": MLPCritic(), "learner": CriticLearner(steps=2, slow=SlowTracking(0.1))},
    "arithmetic": {"critic": MLPCritic(), "baseline": "arithmetic"},
    "no baseline": {"critic": MLPCritic(), "baseline": None},
    "flips": {"critic": FlipCritic()},
}
PAIRS = [
    *[
        (name, "perceptron")
        for name in ("fork", "chain", "discrete_above_reparam", "plate", "global_local", "mask_scale")
    ],
    *[("chain", option) for option in OPTIONS if option not in ("perceptron", "flips")],
    *[("vector", "perceptron"), ("vector", "flips")],
]


@pytest.mark.parametrize(("name", "option"), PAIRS)
def test_gradient_with_trained_critics_is_exact(name: str, option: str) -> None:
    options = OPTIONS[option]
    iwae = train(TraceBackpropQ_IWAE(2, **options), BY_NAME[name])
    # A perceptron is no critic for many components.
    assert bool(iwae.critics.weights()) == ((name, option) != ("vector", "perceptron"))
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


@pytest.mark.parametrize("k", [2, 3])
def test_fixed_scales(k: int) -> None:
    case = Case("coin", coin_model, config_bpq(coin_guide, estimator=AllAction(adaptive=False)), COIN.shapes, 2)
    iwae = train(TraceBackpropQ_IWAE(k, critic=MLPCritic()), case)
    assert error(iwae, case, k) < ATOL
    with_critics = expected_moments(iwae, case.model, case.guide).variance["qa"]
    without = expected_moments(TraceBackpropQ_IWAE(k), coin_model, coin_guide).variance["qa"]
    assert not torch.allclose(with_critics, without, rtol=1e-2)


# Other kinds of sites.


def lattice_model() -> None:
    a = pyro.sample("a", Lattice(irregular(3, start=7)))
    z = pyro.sample("z", dist.Bernoulli(logits=0.4 * a))
    observe("x", a * pyro.param("mean") + z, 0.9)


def lattice_guide() -> None:
    a = pyro.sample("a", Lattice(pyro.param("qa")))
    pyro.sample("z", dist.Bernoulli(logits=pyro.param("qz") * a))


def reparameterised_guide() -> None:
    z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("qz")), infer={"bpq": {"critic": MLPCritic()}}).long()
    fn = TwoPoint(pyro.param("loc")[z], pyro.param("scale")[z])
    pyro.sample("x", fn, infer={"bpq": {"critic": MomentCritic()}})


REPARAMETERISED = BY_NAME["discrete_above_reparam"]
KINDS = {
    "infinite support": (Case("lattice", lattice_model, lattice_guide, {"mean": (), "qa": (3,), "qz": ()}, 6), 2),
    "critic of a reparameterised site": (replace(REPARAMETERISED, guide=reparameterised_guide), 2),
    "steered": (BY_NAME["python_table"], 1),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_other_kinds_of_sites(kind: str) -> None:
    case, groups = KINDS[kind]
    critic = None if case.guide is reparameterised_guide else MLPCritic()
    iwae = train(TraceBackpropQ_IWAE(2, critic=critic), case)
    assert sum(block.critic is not None for block in iwae.critics.blocks.values()) == groups
    assert error(iwae, case, 2) < ATOL


def test_samples_with_different_sites_are_refused() -> None:
    case = BY_NAME["dynamic_sites"]
    case.params()
    with pytest.raises(UnsupportedProgramError, match=r"different sites.*critic=None"):
        train(TraceBackpropQ_IWAE(3, critic=MLPCritic()), case)
    assert error(TraceBackpropQ_IWAE(2), case, 2) < ATOL


@pytest.mark.parametrize("size", [None, 2])
def test_rows_with_critics(size: int | None) -> None:
    case = Case("rows", rows_model, rows_guide, {"pa": (), "qa": (3,)}, 8, args=(DATA, size))
    options = {"plate": "rows", "vectorize_particles": True, "max_plate_nesting": 2}
    iwae = train(TraceBackpropQ_IWAE(2, critic=MLPCritic(), **options), case)
    case.params()
    truth = gradients(sum(exact_bound(*one_row(i), (), 2) for i in range(3)))
    found = expected_gradient(iwae, case.model, case.guide, *case.args)
    for name, gradient in truth.items():
        torch.testing.assert_close(found[name], gradient, rtol=0.0, atol=ATOL)
    assert iwae.critics.weights()


# What would be wrong, and what it is worth.


def samples_as_particles(*args: Any) -> Any:
    found = bound_rollout(*args)
    total = found.num_particles * found.num_samples
    return replace(found, num_particles=total, num_samples=1)


def test_samples_of_a_bound_as_baselines_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_bpq.objectives.iwae.bound_rollout", samples_as_particles)
    assert error(train(TraceBackpropQ_IWAE(3, critic=MLPCritic()), COIN), COIN, 3) > 1e-3


def test_critic_that_knows_its_own_weight_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def knowing(log_w: Tensor) -> Tensor:
        return torch.stack((log_w, log_w), -1).detach()

    monkeypatch.setattr("pyro_bpq.objectives.iwae.features_of_others", knowing)
    assert error(train(TraceBackpropQ_IWAE(3, critic=MLPCritic()), COIN), COIN, 3) > 1e-3


def test_critics_lower_the_variance() -> None:
    case = BY_NAME["chain"]
    case.params()
    iwae = TraceBackpropQ_IWAE(2, critic=MLPCritic())
    pyro.set_rng_seed(0)
    iwae.warm_up(case.model, case.guide, *case.args, steps=300)
    iwae.eval()
    found, plain = (
        expected_moments(each, case.model, case.guide, *case.args) for each in (iwae, TraceBackpropQ_IWAE(2))
    )
    assert found.total_variance < 0.6 * plain.total_variance


# State.


def step_twice(iwae: TraceBackpropQ_IWAE) -> dict[str, Tensor]:
    COIN.params()
    pyro.set_rng_seed(3)
    for _ in range(2):
        iwae.loss_and_grads(coin_model, coin_guide)
    return {name: leaf.grad.clone() for name, leaf in pyro.get_param_store().named_parameters()}


def reload(iwae: TraceBackpropQ_IWAE) -> TraceBackpropQ_IWAE:
    fresh = TraceBackpropQ_IWAE(2, critic=MLPCritic())
    fresh.load_state_dict(copy.deepcopy(iwae.state_dict()))
    return fresh


@pytest.mark.parametrize("through", [copy.deepcopy, reload, lambda iwae: pickle.loads(pickle.dumps(iwae))])
def test_state_survives(through: Callable[[Any], Any]) -> None:
    iwae = train(TraceBackpropQ_IWAE(2, critic=MLPCritic()), COIN, 10).train()
    again = through(iwae)
    expected, found = step_twice(iwae), step_twice(again)
    assert again.num_steps == iwae.num_steps == 12
    assert_equal(found, expected)
    assert_equal(state_of(again), state_of(iwae))


def test_evaluation_freezes_critics() -> None:
    iwae = train(TraceBackpropQ_IWAE(2, critic=MLPCritic()), COIN, 10)
    before = state_of(iwae)
    step_twice(iwae)
    iwae.train().loss(coin_model, coin_guide)
    assert_equal(state_of(iwae), before)
    step_twice(iwae)
    assert iwae.num_steps == 12


def test_value_does_not_change_with_critics() -> None:
    losses = []
    for critic in (None, MLPCritic()):
        COIN.params()
        iwae = TraceBackpropQ_IWAE(3, critic=critic)
        pyro.set_rng_seed(0)
        losses.append([iwae.loss_and_grads(coin_model, coin_guide) for _ in range(3)])
        losses[-1].append(iwae.loss(coin_model, coin_guide))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("guide", "options", "kind", "text"),
    [
        ({}, {"critic": MLPCritic}, OptionError, "is not a critic"),
        ({}, {"learner": CriticLearner(replay=Replay())}, OptionError, "leave replay"),
        ({}, {"learner": CriticLearner(first_order=1.0)}, OptionError, "first_order out"),
        ({"estimator": AllAction()}, {}, UnsupportedSiteError, "'a' .*without a critic.*critic=MLPCritic"),
        ({"estimator": DisARM()}, {"critic": MLPCritic()}, UnsupportedSiteError, "'a' .*one-sample"),
        ({"estimator": AllAction(exact=True)}, {"critic": MLPCritic()}, UnsupportedSiteError, "'a' .*AllAction\\(\\)"),
        ({"estimator": ScoreFunction(), "critic": MLPCritic()}, {}, UnsupportedSiteError, "'a' .*reads no critic"),
        ({"estimator": ScoreFunction(LeaveOneOut())}, {}, UnsupportedSiteError, "'a' .*at least two"),
        ({"critic": MomentCritic()}, {}, OptionError, "'a' .*finite components"),
    ],
)
def test_errors(guide: dict[str, Any], options: dict[str, Any], kind: type[Exception], text: str) -> None:
    COIN.params()
    with pytest.raises(kind, match=text):
        TraceBackpropQ_IWAE(2, **options).loss_and_grads(coin_model, config_bpq(coin_guide, **guide))
