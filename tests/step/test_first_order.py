"""Critics whose slopes match the gradient of the costs."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_bpq import AllAction, CriticLearner, LinearCritic, MLPCritic, TraceBackpropQ_ELBO
from pyro_bpq.critics.bank import Block
from pyro_bpq.errors import BPQWarning, OptionError, UnsupportedProgramError
from pyro_bpq.testing import assert_unbiased

SIZE = 4
WEIGHT = torch.tensor([1.0, -0.6, 0.8, 0.3], dtype=torch.float64)


def model() -> None:
    z = pyro.sample("z", dist.Bernoulli(logits=torch.zeros(SIZE)).to_event(1))
    y = pyro.sample("y", dist.OneHotCategorical(logits=torch.zeros(3)))
    pyro.factor("cost", -torch.nn.functional.softplus(2.0 * z @ WEIGHT + y @ WEIGHT[:3]))


def guide() -> None:
    z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q_z", 0.3 * WEIGHT.flip(0))).to_event(1))
    shift = z.sum(-1, keepdim=True) - 2.0
    pyro.sample("y", dist.OneHotCategorical(logits=shift * pyro.param("q_y", WEIGHT[1:].clone())))


def explained(first_order: float, steps: int) -> float:
    """Share of the variance of a smooth cost of 20 components that a critic explains, before it learns from it."""
    weight = torch.randn(20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def wide_model() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=torch.zeros(20)).to_event(1))
        pyro.factor("cost", -torch.nn.functional.softplus(0.3 * z @ weight + 1.0))

    def wide_guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q_z", torch.zeros(20))).to_event(1))

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    learner = CriticLearner(first_order=first_order)
    estimator = AllAction(exact=False)
    elbo = TraceBackpropQ_ELBO(num_particles=4, critic=LinearCritic(), estimator=estimator, learner=learner)
    found = []
    for step in range(steps):
        elbo.loss_and_grads(wide_model, wide_guide)
        if step >= steps // 2:
            found.append(float(elbo.info["z"]["explained"]))
    return sum(found) / len(found)


def test_smooth_costs_are_fitted_faster() -> None:
    assert explained(1.0, 30) > explained(0.0, 30) + 0.1


def test_slopes_are_those_of_the_costs_that_are_learned() -> None:
    # One site and a linear cost: the slope of the cost alone is the difference of the table, log q and log p apart.
    def linear() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=torch.zeros(SIZE)).to_event(1))
        pyro.factor("cost", -3.0 * z @ WEIGHT)

    def site() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q_z", WEIGHT.clone())).to_event(1))

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    learner = CriticLearner(lr=0.1, first_order=10.0)
    elbo = TraceBackpropQ_ELBO(critic=LinearCritic(), estimator=AllAction(exact=False), learner=learner)
    for _ in range(500):
        elbo.loss_and_grads(linear, site)
    (tables,) = _tables(elbo, linear, site)
    assert torch.allclose(tables[..., 1] - tables[..., 0], 3.0 * WEIGHT, atol=0.15)


def _tables(elbo: TraceBackpropQ_ELBO, *programs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    class Spy(AllAction):
        def __call__(self, context: Any) -> Any:
            found.append(context.learned)
            return super().__call__(context)

    elbo.eval()
    elbo.planner = type(elbo.planner)(Spy(exact=False), elbo.planner.critic, elbo.planner.reduction)
    elbo.runner.plans.forget()
    elbo.loss_and_grads(*programs)
    return found


@pytest.mark.parametrize("critic", [LinearCritic(), MLPCritic((8,))], ids=str)
def test_unbiased_with_first_order_critics(critic: Any) -> None:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    learner = CriticLearner(first_order=0.5)
    elbo = TraceBackpropQ_ELBO(critic=critic, estimator=AllAction(exact=False), learner=learner)
    for _ in range(60):
        elbo.loss_and_grads(model, guide)
    assert_unbiased(elbo.eval(), model, guide, atol=1e-10)


def test_particles_one_by_one_and_the_global_generator() -> None:
    def run(first_order: float) -> tuple[list[float], torch.Tensor]:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        elbo = TraceBackpropQ_ELBO(
            num_particles=2, critic=LinearCritic(), learner=CriticLearner(first_order=first_order)
        )
        return [elbo.loss_and_grads(model, guide) for _ in range(3)], torch.get_rng_state()

    (plain, state), (both, other) = run(0.0), run(1.0)
    assert plain == both and torch.equal(state, other)


def writes_out(z: Any) -> Any:
    return torch.sum(z, -1, out=torch.empty(z.shape[:-1], dtype=z.dtype))


def fails_backward(z: Any) -> Any:
    squares, rest = z.square(), z.clone()
    total = (squares * rest).sum(-1)
    rest.zero_()
    return total


@pytest.mark.parametrize("read", [writes_out, fails_backward])
@pytest.mark.parametrize("particles", [1, 2])
def test_programs_that_do_not_run_with_gradients_are_served(read: Any, particles: int) -> None:
    def reading() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor([0.3, 0.6, 0.5])).to_event(1))
        w = pyro.sample("w", dist.Bernoulli(logits=read(z) - 1.0))
        pyro.sample("x", dist.Normal(w + z[..., 0], 1.0), obs=torch.tensor(0.4))

    def plain() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor([0.1, -0.4, 0.7]))).to_event(1))
        pyro.sample("w", dist.Bernoulli(logits=pyro.param("p", torch.tensor(0.2)) + z[..., 1]))

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    options = {"critic": LinearCritic(), "estimator": AllAction(exact=False)}
    elbo = TraceBackpropQ_ELBO(particles, learner=CriticLearner(first_order=1.0), **options)
    with pytest.warns(BPQWarning, match="Site 'z'.*carried gradients"):
        for _ in range(20):
            elbo.loss_and_grads(reading, plain)
    (critic,) = [
        block.critic
        for block in elbo.critics.blocks.values()
        if isinstance(block, Block) and block.critic is not None and block.keys[0].startswith("z")
    ]
    assert any(bool(tensor.any()) for tensor in critic.state_dict().values())
    assert_unbiased(elbo.eval(), reading, plain)


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(OptionError, match="first_order"):
        CriticLearner(first_order=-1.0)

    def die() -> None:
        pyro.sample("x", dist.Categorical(logits=torch.zeros(3)))
        pyro.sample("w", dist.Categorical(logits=torch.zeros(3)))

    def coin() -> None:
        if pyro.sample("x", dist.Bernoulli(0.5)).item():
            pyro.sample("w", dist.Bernoulli(0.5))

    with pytest.raises(OptionError, match="'x'"):
        TraceBackpropQ_ELBO(learner=CriticLearner(first_order=1.0)).loss_and_grads(die, die)
    with pytest.raises(UnsupportedProgramError, match="'x'"):
        TraceBackpropQ_ELBO(learner=CriticLearner(first_order=1.0)).loss_and_grads(coin, coin)
