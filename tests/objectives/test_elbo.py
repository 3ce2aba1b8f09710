"""The ELBO as an object: its two interfaces, what learns and when, its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from models import BY_NAME
from pyro.infer import ELBO, SVI, Trace_ELBO
from pyro.optim import SGD
from steps import CHAIN, DATA, OPTIONS, assert_equal, from_seed, is_equal, module, repeat, run, state_of, step, stepped

from pyro_bpq import TraceBackpropQ_ELBO

# One computation behind both interfaces


@pytest.mark.parametrize("number", [1, None])
@pytest.mark.parametrize("name", ["chain", "global_local_subsample", "discrete_above_reparam", "python_branch"])
def test_differentiable_loss_gives_the_gradients_of_loss_and_grads(name: str, number: int | None) -> None:
    case = BY_NAME[name]
    one, other = TraceBackpropQ_ELBO(number), TraceBackpropQ_ELBO(number)
    case.params()
    for seed in range(8):
        expected = from_seed(seed, step, one, case)
        assert_equal(from_seed(seed, step, other, case, through_loss=True), expected)
    assert one.num_steps == other.num_steps + 1 == 8  # the last update waits for the next call
    other.trainer.learn(other)
    assert_equal(state_of(one), state_of(other))


def test_differentiable_loss_returns_the_loss(options: dict[str, Any]) -> None:
    elbo, alike = TraceBackpropQ_ELBO(**options), None
    CHAIN.params()
    if not options.keys() - {"learner"}:
        # An evaluation takes one particle, where their number is open.
        elbo.differentiable_loss(CHAIN.model, CHAIN.guide)
        alike = Trace_ELBO(elbo.num_particles, vectorize_particles=True, max_plate_nesting=0)
        assert alike.num_particles > 1
    for seed in range(4):
        loss = from_seed(seed, (elbo.differentiable_loss, elbo.forward)[seed % 2], *CHAIN.programs)
        assert loss.shape == () and loss.requires_grad
        expected = from_seed(seed, (alike or elbo).loss, *CHAIN.programs)
        assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_own_learner_keeps_critics_out_of_the_parameters() -> None:
    fit = module(TraceBackpropQ_ELBO(1))
    names = {name for name, _ in fit.named_parameters()}
    fit(DATA)
    assert {name for name, _ in fit.named_parameters()} == names
    assert any("critics.blocks" in name and "weights" in name for name in fit.state_dict())
    assert not any("critics" in name for name in names)


def test_without_learner_gradient_of_model_and_guide_is_the_same() -> None:
    # The critics' loss is added to the surrogate, and reaches the critics only.
    one, other = run(TraceBackpropQ_ELBO(1), steps=1), run(TraceBackpropQ_ELBO(1, learner=None), steps=1)
    assert_equal(one, other)


# What learns, and when


def evaluated(elbo: TraceBackpropQ_ELBO) -> None:
    elbo.eval()
    run(elbo, steps=5, seed=9)
    repeat(3, step, elbo, through_loss=True)
    elbo.train()


def without_grad(elbo: TraceBackpropQ_ELBO) -> None:
    with torch.no_grad():
        assert not elbo.differentiable_loss(CHAIN.model, CHAIN.guide).requires_grad
        elbo.loss_and_grads(CHAIN.model, CHAIN.guide)


def looked_at(elbo: TraceBackpropQ_ELBO) -> None:
    svi = SVI(CHAIN.model, CHAIN.guide, SGD({"lr": 0.1}), elbo)
    grads = {n: p.grad for n, p in pyro.get_param_store().named_parameters()}
    assert isinstance(elbo.loss(CHAIN.model, CHAIN.guide), float)
    assert isinstance(svi.evaluate_loss(), float)
    assert all(p.grad is grads[n] for n, p in pyro.get_param_store().named_parameters())


@pytest.mark.parametrize("look", [evaluated, without_grad, looked_at])
def test_a_look_changes_nothing(look: Callable[[TraceBackpropQ_ELBO], None], options: dict[str, Any]) -> None:
    """In evaluation mode, without gradients, or of the loss alone; also while an update waits."""
    elbo = TraceBackpropQ_ELBO(**options)
    run(elbo)
    if look is looked_at:
        elbo.differentiable_loss(CHAIN.model, CHAIN.guide)
    before = state_of(elbo)
    look(elbo)
    assert_equal(state_of(elbo), before)


@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_eval_before_the_first_step_builds_nothing(options: dict[str, Any]) -> None:
    elbo = TraceBackpropQ_ELBO(**options).eval()
    before = state_of(elbo)
    run(elbo, steps=3)
    assert_equal(state_of(elbo), before)
    assert not list(elbo.critics.blocks)


def test_train_learns_again(options: dict[str, Any]) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    run(elbo)
    before = state_of(elbo.eval().critics.blocks)
    elbo.train()
    run(elbo, steps=2)
    assert elbo.num_steps == 12 and not is_equal(state_of(elbo.critics.blocks), before)


def test_nothing_changes_between_forward_and_backward() -> None:
    elbo, found = TraceBackpropQ_ELBO(1), []
    run(elbo)
    for _ in range(2):
        loss = elbo.differentiable_loss(CHAIN.model, CHAIN.guide)
        found.append(state_of(elbo.critics.blocks))
    loss.backward()
    assert_equal(state_of(elbo.critics.blocks), found[1])
    assert not is_equal(*found)  # the update of the call before came first


def test_two_backward_passes_need_retain_graph() -> None:
    CHAIN.params()
    model, weight = CHAIN.model, torch.tensor(0.3, requires_grad=True)
    scaled = weight.exp() * 1.0

    def guide() -> None:
        CHAIN.guide()
        pyro.factor("f", scaled.sin(), has_rsample=True)

    elbo = stepped(2, TraceBackpropQ_ELBO(retain_graph=True), model, guide)
    torch.testing.assert_close(weight.grad, 2 * (scaled * scaled.cos()).detach())
    elbo = stepped(1, TraceBackpropQ_ELBO(), model, guide)
    with pytest.raises(RuntimeError, match="second time"):
        elbo.loss_and_grads(model, guide)


def test_constructor_takes_all_of_pyros_arguments() -> None:
    import inspect

    theirs = list(inspect.signature(ELBO.__init__).parameters)
    assert list(inspect.signature(TraceBackpropQ_ELBO.__init__).parameters)[: len(theirs)] == theirs
    with pytest.warns(DeprecationWarning):
        assert TraceBackpropQ_ELBO(max_iarange_nesting=1).max_plate_nesting == 1
