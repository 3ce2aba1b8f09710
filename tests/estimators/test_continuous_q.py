"""Critics of a normal value: exact expectations by quadrature, and what each of them follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import faulty
from quadrature import NodeNormal, expected_gradient, grid
from steps import repeat, stepped
from steps import trained as steps_of
from torch import Tensor

from pyro_bpq import CriticLearner, ExpectedCost, MomentCritic, QProp, RunningBaseline, ScoreFunction, ValueCritic, cost
from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators import LAXQ, LeaveOneOut, ParentAdvantage, QAdvantage, QAllAction, QPathwise, QScoreFunction
from pyro_bpq.estimators.base import SiteContext, SiteInfo, SiteTerm
from pyro_bpq.rollout.runs import Program

PARAMS = {"l_a": 0.3, "s_a": -0.4, "l_b": -0.2, "s_b": 0.1}


def price(x: Tensor, y: Tensor) -> Tensor:
    """A polynomial of two values, told without a gradient."""
    return ((x - 0.7) ** 2 + 0.3 * x**3 + (y - 1.1) * x * y + 0.5 * y**2).detach()


def draw(name: str, loc: Tensor, estimator: Any, critic: Any, **more: Any) -> Tensor:
    own, log_scale = (pyro.param(key, torch.tensor(PARAMS[key])) for key in (f"l_{name}", f"s_{name}"))
    options = {"bpq": {"estimator": estimator, "critic": critic, **more}}
    return pyro.sample(name, NodeNormal(own + loc, log_scale.exp()), infer=options)


def program(estimator: Any, critic: Any = None, sites: int = 2) -> Any:
    def policy() -> None:
        x = draw("a", torch.zeros(()), estimator, critic)
        y = draw("b", 0.6 * x.detach(), estimator, critic) if sites == 2 else torch.tensor(0.4)
        cost("price", price, x, y)

    return policy


def exact() -> dict[str, Tensor]:
    """The gradient of the expected cost, by quadrature of the cost as a function of the parameters."""
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in PARAMS.items()}
    total = torch.zeros(())
    for (e, f), weight in grid((4, 4)):
        x = leaves["l_a"] + leaves["s_a"].exp() * e
        y = leaves["l_b"] + 0.6 * x + leaves["s_b"].exp() * f
        total = total + weight * ((x - 0.7) ** 2 + 0.3 * x**3 + (y - 1.1) * x * y + 0.5 * y**2)
    found = torch.autograd.grad(total, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def trained(policy: Any, steps: int = 30, **options: Any) -> ExpectedCost:
    pyro.clear_param_store()
    elbo = ExpectedCost(learner=CriticLearner(lr=1e-2), **options)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        NodeNormal.nodes = iter(torch.randn(20, generator=generator).tolist())
        elbo.loss_and_grads(None, policy)
    return elbo.eval()


def largest_error(elbo: Any, policy: Any, numbers: Sequence[int] = (4, 4)) -> float:
    found, truth = expected_gradient(elbo, None, policy, numbers), exact()
    assert min(float(g.abs()) for g in truth.values()) > 0.1
    return max(float((found[name] - truth[name]).abs()) for name in truth)


# Estimator, its critic, number of particles, and nodes of each draw. A perceptron enters by its expansion at the mean,
# which is linear in its own value and smooth in the one above.
EXACT: list[tuple[Any, Any, int, tuple[int, ...]]] = [
    *((LAXQ(scale=scale), MomentCritic(()), 1, (4, 4)) for scale in (1.0, 0.6, LAXQ().scale)),
    (LAXQ(), MomentCritic(()), 2, (3, 3, 3, 3)),
    *((estimator, MomentCritic(()), 1, (4, 4)) for estimator in (QProp(), ParentAdvantage(1.0))),
    (QProp(), ValueCritic((8,)), 1, (40, 4)),
    (ParentAdvantage(1.0), MomentCritic((4,)), 1, (40, 4)),
]


@pytest.mark.parametrize(("estimator", "critic", "particles", "numbers"), EXACT, ids=str)
def test_it_is_unbiased(estimator: Any, critic: Any, particles: int, numbers: tuple[int, ...]) -> None:
    policy = program(estimator, critic)
    assert largest_error(trained(policy, num_particles=particles), policy, numbers) < 1e-10


def test_laxq_is_unbiased_with_a_perceptron() -> None:
    # A perceptron is no polynomial: more nodes.
    policy = program(LAXQ(), ValueCritic((8,)), sites=1)
    elbo = trained(policy, 60)
    assert any("ValueCritic" in block.kind and bool(block.critic.net.weights[1].any()) for block in blocks(elbo))
    found = expected_gradient(elbo, None, policy, (90,))
    plain = program(ScoreFunction(), False, sites=1)
    for name, truth in expected_gradient(trained(plain, 1), None, plain, (4,)).items():
        assert float(truth.abs()) > 0.1
        torch.testing.assert_close(found[name], truth, rtol=0.0, atol=1e-10)


def blocks(elbo: Any) -> list[Any]:
    return list(elbo.critics.blocks.values())


def no_path(own: Any, context: SiteContext) -> SiteTerm:
    """Subtracts the critic and leaves its own gradient out."""
    still = {**context.signals, "moved_value": context.signals["moved_value"].detach()}
    return own(replace(context, signals=still))


def test_a_missing_path_is_seen() -> None:
    policy = program(faulty(LAXQ(), no_path), MomentCritic(()))
    assert largest_error(trained(policy), policy) > 1e-3


@pytest.mark.parametrize("estimator", [QPathwise(), QScoreFunction(), QAdvantage()], ids=repr)
def test_q_as_local_cost_is_the_gradient_of_the_critic(estimator: Any) -> None:
    """The gradient of ``E[Q(x)]``, ``Q`` the trained critic held fixed, and not that of the cost."""
    policy = program(estimator, MomentCritic(()), sites=1)
    assert not estimator.is_unbiased
    elbo = trained(policy)
    found = expected_gradient(elbo, None, policy, (4,))
    score = {name: torch.zeros(()) for name in ("l_a", "s_a")}
    for (e,), weight in grid((4,)):
        q = value_of(elbo, policy, e)
        score["l_a"] = score["l_a"] + weight * q * e / torch.tensor(PARAMS["s_a"]).exp()
        score["s_a"] = score["s_a"] + weight * q * (e * e - 1.0)
    for name, expected in score.items():
        assert float(expected.abs()) > 1e-2
        torch.testing.assert_close(found[name], expected, rtol=0.0, atol=1e-10)
    # Thirty steps do not make it that of the cost.
    plain = program(ScoreFunction(), False, sites=1)
    truth = expected_gradient(trained(plain, 1), None, plain, (4,))
    assert max(float((found[name] - truth[name]).abs()) for name in score) > 1e-3


def value_of(elbo: ExpectedCost, policy: Any, node: float) -> Tensor:
    NodeNormal.nodes = iter([node])
    seen = elbo.observe(Program(None, policy, (), {}))
    return seen.items[0].signals.critics[0].says.value.detach().reshape(())


def step_cost(x: Tensor) -> Tensor:
    return torch.floor(4.0 * (x.detach() - 1.0).square()) / 4.0


def steps_policy(estimator: Any, rows: int = 20, **more: Any) -> Any:
    def policy() -> None:
        loc, log_scale = pyro.param("loc", torch.tensor(-0.5)), pyro.param("log_scale", torch.tensor(-0.5))
        with pyro.plate("rows", rows):
            fn = dist.Normal(loc, log_scale.exp()).expand([rows])
            x = pyro.sample("x", fn, infer={"bpq": {"estimator": estimator, **more}})
            cost("steps", step_cost, x)

    return policy


def test_bootstrapped_loss_follows_the_slope_and_calls_no_cost() -> None:
    policy = program(QPathwise(), MomentCritic(()), sites=1)
    elbo = trained(policy)
    pyro.param("l_a").grad = None

    def gone(x: Tensor, y: Tensor) -> Tensor:
        raise AssertionError("called")

    def silent() -> None:
        cost("price", gone, draw("a", torch.zeros(()), QPathwise(), MomentCritic(())), torch.tensor(0.4))

    total = {"l_a": torch.zeros(()), "s_a": torch.zeros(())}
    for (e,), weight in grid((4,)):
        NodeNormal.nodes = iter([e])
        loss = elbo.bootstrapped_loss(None, silent, entropy=0.5)
        leaves = [pyro.get_param_store()._params[name] for name in total]
        for name, gradient in zip(total, torch.autograd.grad(loss, leaves), strict=True):
            total[name] = total[name] + weight * gradient
    expected = expected_gradient(elbo, None, policy, (4,))
    torch.testing.assert_close(total["l_a"], expected["l_a"], rtol=0.0, atol=1e-10)
    # The entropy of a normal distribution grows by one for each unit of log σ.
    torch.testing.assert_close(total["s_a"], expected["s_a"] - 0.5, rtol=0.0, atol=1e-10)


def test_context_takes_the_place_of_the_parameters() -> None:
    features = []
    for more in ({}, {"context": torch.zeros(20, 3)}):
        elbo = steps_of(ExpectedCost(), None, steps_policy(QPathwise(), **more), steps=1)
        features.append([block.context_mean.shape[-1] for block in blocks(elbo) if hasattr(block, "context_mean")])
    assert features == [[2], [3]]


def test_particles_that_know_the_row_leave_the_critic_its_differences() -> None:
    elbo = ExpectedCost(num_particles=2, learner=CriticLearner(lr=1e-2, optimizer=torch.optim.Adam))
    policy = steps_policy(LAXQ())
    repeat(80, elbo.loss_and_grads, None, policy)
    assert float(elbo.info["x"]["explained"]) > 0.3


def test_refusals_say_what_to_write() -> None:
    for estimator in (QPathwise(), LAXQ()):
        assert "ScoreFunction()" in (estimator.unsupported(SiteInfo("z", "Poisson", False, None, 1)) or "")
    with pytest.raises(UnsupportedSiteError, match=r"'x'.*no critic"):
        ExpectedCost(critic=None).loss_and_grads(None, steps_policy(QPathwise()))
    with pytest.raises(UnsupportedSiteError, match="LAXQ"):
        ExpectedCost().loss_and_grads(None, steps_policy(None))
    elbo, policy = ExpectedCost(critic=None), steps_policy(ScoreFunction(RunningBaseline()))
    with pytest.raises(UnsupportedSiteError, match="QPathwise"):
        stepped(1, elbo, None, policy).bootstrapped_loss(None, policy)


def test_the_advice_for_a_normal_site_serves_a_cost_without_a_gradient() -> None:
    with pytest.raises(UnsupportedSiteError, match=r"LAXQ\(\) or ScoreFunction\(\)"):
        ExpectedCost().loss_and_grads(None, steps_policy(QAllAction()))
    for estimator in (LAXQ(), ScoreFunction(LeaveOneOut())):
        steps_of(ExpectedCost(num_particles=2), None, steps_policy(estimator), steps=2)
        gradient = pyro.get_param_store()._params["loc"].grad
        assert gradient is not None and bool(gradient.isfinite()) and bool(gradient != 0)
