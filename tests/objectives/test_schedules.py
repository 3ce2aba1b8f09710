"""Slow tracking, warm-up, schedules, several critic steps per rollout."""

from __future__ import annotations

import copy
from typing import Any

import pyro
import pytest
import torch
from steps import CHAIN, assert_equal, is_equal, run, state_of
from torch import Tensor

from pyro_bpq import AllAction, CriticLearner, Replay, SlowTracking, TabularCritic, TraceBackpropQ_ELBO


def slow_elbo(rate: float = 0.1, **options: Any) -> TraceBackpropQ_ELBO:
    return TraceBackpropQ_ELBO(1, learner=CriticLearner(slow=SlowTracking(rate), **options))


def weights(elbo: TraceBackpropQ_ELBO) -> list[Tensor]:
    """The weights of the critics."""
    return [weight.detach().clone() for block in elbo.critics.blocks.values() for weight in block.weights().values()]


def slow_weights(elbo: TraceBackpropQ_ELBO) -> list[Tensor]:
    return [weight.clone() for block in elbo.critics.blocks.values() for weight in block.slow_weights().values()]


def test_slow_copies_lag_behind() -> None:
    elbo = slow_elbo(0.1)
    run(elbo, steps=1)
    assert_equal(slow_weights(elbo), weights(elbo))
    for seed in (3, None, None, None, None):
        before = slow_weights(elbo)
        run(elbo, steps=1, seed=seed)
        for old, slow, weight in zip(before, slow_weights(elbo), weights(elbo), strict=True):
            torch.testing.assert_close(slow, old + 0.1 * (weight - old))
    # The first site has no context, whose weights are empty.
    pairs = zip(weights(elbo), slow_weights(elbo), strict=True)
    assert max(float((weight - slow).abs().max()) for weight, slow in pairs if slow.numel() > 0) > 1e-3


def test_targets_come_from_the_slow_copies() -> None:
    elbo = slow_elbo(0.1)
    run(elbo, steps=8)
    twin = copy.deepcopy(elbo)
    with torch.no_grad():
        for block in twin.critics.blocks.values():
            for weight in block.slow_weights().values():
                weight.add_(5.0)
    # The gradient's critics are the current ones, the same in both; what they learn is not.
    assert_equal(run(elbo, steps=1, seed=1), run(twin, steps=1, seed=1))
    assert not is_equal(weights(elbo), weights(twin))


def test_replay_redraws_from_the_slow_guide() -> None:
    """With a rate near zero the slow guide is the first one, whatever the guide has become since."""
    learner = CriticLearner(replay=Replay(capacity=8, updates_per_step=0), slow=SlowTracking(1e-9, guide=True))
    elbo = TraceBackpropQ_ELBO(1, learner=learner)
    run(elbo, steps=1)
    leaves = dict(pyro.get_param_store().named_parameters())
    first = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.data.add_(3.0)
    seen, run_program = [], elbo.run_program

    def spy(*given: Any) -> Any:
        traced = run_program(*given)
        seen.append(traced.run.sites["c"].fn.logits.detach().clone())
        return traced

    elbo.run_program = spy  # type: ignore[method-assign]
    elbo.replay(updates=2)
    assert seen and all(float(logits) in first["qc"].tolist() for logits in seen)
    assert all(torch.equal(leaf, first[name] + 3.0) for name, leaf in leaves.items())


# Warm-up


def test_warm_up_trains_critics_and_leaves_the_guide() -> None:
    CHAIN.params(seed=0)
    elbo = TraceBackpropQ_ELBO(1)
    loss = elbo.warm_up(CHAIN.model, CHAIN.guide, steps=6)
    assert elbo.num_steps == 6 and loss == pytest.approx(loss)
    assert all(p.grad is None for _, p in pyro.get_param_store().named_parameters())
    # The same as steps at fixed parameters.
    other = TraceBackpropQ_ELBO(1)
    run(other, steps=6)
    assert_equal(state_of(other), state_of(elbo))


def test_warm_up_refuses_what_cannot_learn() -> None:
    with pytest.raises(ValueError, match="learner=CriticLearner"):
        TraceBackpropQ_ELBO(learner=None).warm_up(CHAIN.model, CHAIN.guide, steps=1)
    with pytest.raises(ValueError, match="train"):
        TraceBackpropQ_ELBO().eval().warm_up(CHAIN.model, CHAIN.guide, steps=1)
    with pytest.raises(ValueError, match="positive"):
        TraceBackpropQ_ELBO().warm_up(CHAIN.model, CHAIN.guide, steps=0)


# Schedules


def test_lam_and_gamma_follow_their_functions_of_the_step() -> None:
    elbo = TraceBackpropQ_ELBO(lam=lambda at: 1.0 - 0.1 * at, gamma=lambda at: 1.0 / (1 + at))
    for at in range(3):
        options = elbo.learning()
        assert (options.lam, options.gamma) == pytest.approx((1.0 - 0.1 * at, 1.0 / (1 + at)))
        run(elbo, steps=1, seed=at)


def test_more_critic_steps_fit_the_rollout_better() -> None:
    losses = []
    for steps in (1, 30):
        optimiser = {"optimizer": torch.optim.SGD, "lr": 0.1}
        learner = CriticLearner(steps=steps, **optimiser)  # type: ignore[arg-type]
        options: dict[str, Any] = {"critic": TabularCritic(), "estimator": AllAction(exact=False), "learner": learner}
        elbo = TraceBackpropQ_ELBO(64, vectorize_particles=True, max_plate_nesting=0, **options)
        run(elbo, steps=6)
        losses.append(float(elbo.info["a"]["td_loss"]))
    assert losses[1] < 0.5 * losses[0]
