"""Steps and replay in several threads: refused at the same time, fine in turns."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pyro
import pytest
from pyro.poutine.runtime import _PYRO_STACK
from steps import CHAIN, assert_equal, from_seed, in_thread, run, state_of, step

from pyro_bpq import CriticLearner, Replay, TraceBackpropQ_ELBO
from pyro_bpq.errors import BusyError
from pyro_bpq.objectives.entry import Turn


def trained() -> TraceBackpropQ_ELBO:
    elbo = TraceBackpropQ_ELBO(1, learner=CriticLearner(replay=Replay(updates_per_step=0)))
    run(elbo, steps=3)
    return elbo


CALLS: dict[str, Any] = {"replay": (), "loss_and_grads": CHAIN.programs, "differentiable_loss": CHAIN.programs}


@pytest.mark.parametrize("meanwhile", ["step", "replay"])
@pytest.mark.parametrize("name", list(CALLS))
def test_another_thread_is_refused_while_programs_run(name: str, meanwhile: str) -> None:
    elbo, refused = trained(), []

    def guide() -> None:
        refused.append(in_thread(lambda: getattr(elbo, name)(*CALLS[name])))
        CHAIN.guide()

    undisturbed = copy.deepcopy(elbo)
    expected = from_seed(5, undisturbed.loss_and_grads, *CHAIN.programs)
    if meanwhile == "step":
        assert from_seed(5, elbo.loss_and_grads, CHAIN.model, guide) == expected
        assert_equal(state_of(elbo), state_of(undisturbed))
    else:
        elbo.loss_and_grads(CHAIN.model, guide)
        refused.clear()
        assert elbo.replay(updates=5) == 5
    assert refused and all(isinstance(error, BusyError) and "take turns" in str(error) for error in refused)
    assert not _PYRO_STACK


def test_threads_may_take_turns() -> None:
    one, other = trained(), trained()
    for elbo, call in ((one, in_thread), (other, lambda replay: replay())):
        pyro.set_rng_seed(5)
        for _ in range(3):
            step(elbo)
            assert call(elbo.replay) == 1
    assert_equal(state_of(one), state_of(other))


def test_a_failed_step_lets_others_in() -> None:
    elbo = trained()
    with pytest.raises(ZeroDivisionError):
        elbo.loss_and_grads(CHAIN.model, lambda: 1 / 0)
    assert in_thread(elbo.replay) == 1


@pytest.mark.parametrize("through", [copy.deepcopy, lambda turn: pickle.loads(pickle.dumps(turn))])
def test_a_copy_is_free(through: Callable[[Turn], Turn]) -> None:
    turn = Turn()
    with turn:
        assert in_thread(through(turn).__enter__) is None
        assert isinstance(in_thread(turn.__enter__), BusyError)
