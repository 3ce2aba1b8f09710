"""Slow tracking, warm-up, schedules, several critic steps per rollout."""

from __future__ import annotations

import copy
from typing import Any

import pyro
import pytest
import torch
from models import BY_NAME
from steps import CHAIN, assert_equal, bias, is_equal, run, state_of, trained
from torch import Tensor

from pyro_bpq import AllAction, CriticLearner, Replay, SlowTracking, TabularCritic, TraceBackpropQ_ELBO
from pyro_bpq.critics.blocks import Block


def slow_elbo(rate: float = 0.1, **options: Any) -> TraceBackpropQ_ELBO:
    return TraceBackpropQ_ELBO(1, learner=CriticLearner(slow=SlowTracking(rate), **options))


def critics(elbo: TraceBackpropQ_ELBO) -> list[Block]:
    return [block for block in elbo.critics.blocks.values() if isinstance(block, Block) and block.critic is not None]


def critics_of(elbo: TraceBackpropQ_ELBO) -> list[dict[str, Tensor]]:
    """The weights of the critics."""
    return [{name: weight.detach() for name, weight in block.weights().items()} for block in critics(elbo)]


def test_slow_copies_lag_behind() -> None:
    elbo = slow_elbo(0.1)
    run(elbo, steps=1)
    block = critics(elbo)[0]
    assert_equal(list(block.slow_weights().values()), [w.detach() for w in block.weights().values()])
    run(elbo, steps=1, seed=3)
    for _ in range(5):
        before = copy.deepcopy(block.slow_weights())
        run(elbo, steps=1, seed=None)
        for name, slow in block.slow_weights().items():
            assert torch.allclose(slow, before[name] + 0.1 * (block.weights()[name].detach() - before[name]))
    pairs = [(block.weights()[name].detach(), slow) for name, slow in block.slow_weights().items()]
    # The first site has no context, whose weights are empty.
    gaps = [float((weight - slow).abs().max()) for weight, slow in pairs if slow.numel() > 0]
    assert max(gaps) > 1e-3


def test_rate_one_is_no_tracking() -> None:
    plain, one, slow = TraceBackpropQ_ELBO(1), slow_elbo(1.0), slow_elbo(0.1)
    assert_equal(run(one, steps=8), run(plain, steps=8))
    run(slow, steps=8)
    # Critics do not count yet in the gradient, but they learn.
    assert_equal(critics_of(one), critics_of(plain))
    assert not is_equal(critics_of(slow), critics_of(plain))


def test_targets_come_from_the_slow_copies() -> None:
    elbo = slow_elbo(0.1)
    run(elbo, steps=8)
    twin = copy.deepcopy(elbo)
    with torch.no_grad():
        for block in critics(twin):
            for weight in block.slow_weights().values():
                weight.add_(5.0)
    # The gradient's critics are the current ones, the same in both; what they learn is not.
    assert_equal(run(elbo, steps=1, seed=1), run(twin, steps=1, seed=1))
    assert not is_equal(*([w.tolist() for b in critics(e) for w in b.weights().values()] for e in (elbo, twin)))


def test_slow_state_is_saved() -> None:
    elbo = slow_elbo(0.1)
    run(elbo, steps=8)
    fresh = slow_elbo(0.1)
    fresh.load_state_dict(copy.deepcopy(elbo.state_dict()))
    assert_equal(run(fresh, steps=4, seed=5), run(elbo, steps=4, seed=5))
    assert_equal(state_of(fresh), state_of(elbo))


def test_replay_redraws_from_the_slow_guide() -> None:
    """With a rate near zero the slow guide is the first one, whatever the guide has become since."""
    case = BY_NAME["chain"].params()
    learner = CriticLearner(replay=Replay(capacity=8, updates_per_step=0), slow=SlowTracking(1e-9, guide=True))
    elbo = TraceBackpropQ_ELBO(1, learner=learner)
    pyro.set_rng_seed(0)
    elbo.loss_and_grads(case.model, case.guide)
    first = {name: value.detach().clone() for name, value in pyro.get_param_store().named_parameters()}
    for _, leaf in pyro.get_param_store().named_parameters():
        leaf.data.add_(3.0)
    seen = []
    run_program = elbo.run_program

    def spy(*given: Any) -> Any:
        traced = run_program(*given)
        seen.append(traced.run.sites["c"].fn.logits.detach().clone())
        return traced

    elbo.run_program = spy  # type: ignore[method-assign]
    elbo.replay(updates=2)
    assert seen and all(float(logits) in first["qc"].tolist() for logits in seen)
    assert all(torch.equal(leaf, first[name] + 3.0) for name, leaf in pyro.get_param_store().named_parameters())


@pytest.mark.parametrize(
    "learner",
    [
        CriticLearner(slow=SlowTracking(0.05)),
        CriticLearner(replay=Replay(capacity=16, batch_size=2)),
        CriticLearner(steps=3, replay=Replay(coparents="stored", batch_size=1), slow=SlowTracking(0.1, guide=True)),
    ],
    ids=["slow", "replay", "all"],
)
@pytest.mark.parametrize("name", ["chain", "diamond"])
def test_steps_stay_unbiased(name: str, learner: CriticLearner) -> None:
    case = BY_NAME[name]
    elbo = trained(TraceBackpropQ_ELBO(1, learner=learner), *case.programs, params=case.params, lr=0.02).eval()
    assert any(bool(w.any()) for w in elbo.critics.weights().values())
    assert bias(elbo, *case.programs, params=case.params, truth=case.exact()) < 1e-10


# Warm-up


def test_warm_up_trains_critics_and_leaves_the_guide() -> None:
    CHAIN.params()
    pyro.set_rng_seed(0)
    elbo = TraceBackpropQ_ELBO(1)
    loss = elbo.warm_up(CHAIN.model, CHAIN.guide, steps=6)
    assert elbo.num_steps == 6 and loss == pytest.approx(loss)
    assert all(p.grad is None for _, p in pyro.get_param_store().named_parameters())
    # The same as steps at fixed parameters.
    other = TraceBackpropQ_ELBO(1)
    run(other, steps=6)
    assert_equal(state_of(other), state_of(elbo))


def test_warm_up_refuses_what_cannot_learn() -> None:
    CHAIN.params()
    with pytest.raises(ValueError, match="learner=CriticLearner"):
        TraceBackpropQ_ELBO(learner=None).warm_up(CHAIN.model, CHAIN.guide, steps=1)
    with pytest.raises(ValueError, match="train"):
        TraceBackpropQ_ELBO().eval().warm_up(CHAIN.model, CHAIN.guide, steps=1)
    with pytest.raises(ValueError, match="positive"):
        TraceBackpropQ_ELBO().warm_up(CHAIN.model, CHAIN.guide, steps=0)


# Schedules


def test_lam_and_gamma_follow_their_functions_of_the_step() -> None:
    asked: list[int] = []

    def lam(at: int) -> float:
        asked.append(at)
        return 1.0 - 0.1 * at

    elbo = TraceBackpropQ_ELBO(lam=lam, gamma=lambda at: 1.0 / (1 + at))
    for at in range(3):
        options = elbo.learning()
        assert (options.lam, options.gamma) == pytest.approx((1.0 - 0.1 * at, 1.0 / (1 + at)))
        run(elbo, steps=1, seed=at)
    assert set(asked) == {0, 1, 2}


def test_more_critic_steps_fit_the_rollout_better() -> None:
    losses = []
    for steps in (1, 30):
        optimiser = {"optimizer": torch.optim.SGD, "lr": 0.1}
        elbo = TraceBackpropQ_ELBO(
            num_particles=64,
            vectorize_particles=True,
            max_plate_nesting=0,
            critic=TabularCritic(),
            estimator=AllAction(exact=False),
            learner=CriticLearner(steps=steps, **optimiser),  # type: ignore[arg-type]
        )
        run(elbo, steps=6)
        losses.append(float(elbo.info["a"]["td_loss"]))
    assert losses[1] < 0.5 * losses[0]


@pytest.mark.parametrize("options", [{"steps": 0}, {"steps": 1.5}, {"replay": 5}, {"slow": 0.1}])
def test_learner_refuses_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        CriticLearner(**options)
    for rate in (0.0, -0.1, 1.5):
        with pytest.raises(ValueError, match="rate"):
            SlowTracking(rate)
