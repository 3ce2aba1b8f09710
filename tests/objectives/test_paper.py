"""The paper's algorithm on Pyro programs: its updates are those of Algorithm 1, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from algorithm1 import backpropq_algorithm1
from models import BY_NAME
from steps import bias, fresh, settled, stepped, trained
from tabular import WORKED
from torch import Tensor, nn

from pyro_bpq import (
    BackpropQNetwork,
    CriticLearner,
    ExpectedCost,
    LambdaReturn,
    MomentCritic,
    ScoreFunction,
    TraceBackpropQ_ELBO,
    cost,
    estimators,
    paper_settings,
)
from pyro_bpq.critics.learner import BackwardSweep
from pyro_bpq.errors import OptionError
from pyro_bpq.estimators import QRELAX, Estimator, QAdvantage, QAllAction, QPathwise, QScoreFunction
from pyro_bpq.graph.scg import cost_of_guide, cost_of_model
from pyro_bpq.testing import assert_unbiased, expected_gradient

CASES = {
    **WORKED,
    "layers": (
        {f"{a}{t}": [f"{b}{t - 1}" for b in "xy"] if t > 1 else [] for t in (1, 2, 3) for a in "xy"},
        {f"f_{a}{t}": [f"{a}{t}"] for t in (1, 2, 3) for a in "xy"},
    ),
}


class Program:
    """Binary sites with logits that are sums over their parents, and costs that are tables."""

    def __init__(self, case: str) -> None:
        self.parents, self.reads = CASES[case]
        noise = torch.Generator().manual_seed(7)
        size = max(len(p) for p in self.parents.values()) + 1
        self.start = torch.randn(len(self.parents), size, generator=noise)
        self.tables = {f: torch.randn((2,) * len(r), generator=noise) for f, r in self.reads.items()}

    def law(self, theta: Tensor, name: str, values: dict[str, Tensor]) -> dist.Bernoulli:
        row = theta[list(self.parents).index(name)]
        parts = [row[1 + k] * values[parent] for k, parent in enumerate(self.parents[name])]
        return dist.Bernoulli(logits=row[0] + sum(parts, torch.zeros(())))

    def price(self, name: str, values: dict[str, Tensor]) -> Tensor:
        # Multilinear in the values, so that dependence shows; no gradient, as the values have none.
        table = self.tables[name]
        for read in self.reads[name]:
            table = (1 - values[read]) * table[0] + values[read] * table[1]
        return table

    def drawn(self) -> dict[str, Tensor]:
        theta = pyro.param("theta", self.start.clone())
        values: dict[str, Tensor] = {}
        for name in self.parents:
            values[name] = pyro.sample(name, self.law(theta, name, values))
        return values

    def policy(self) -> None:
        values = self.drawn()
        for name in self.reads:
            cost(name, self.price(name, values))


class Table(nn.Module):
    """A table over the joint states of a scope."""

    def __init__(self, sites: tuple[str, ...]) -> None:
        super().__init__()
        self.sites = sites
        self.table = nn.Parameter(torch.zeros((2,) * len(sites)))

    def forward(self, values: dict[str, Tensor]) -> Tensor:
        return self.table[tuple(values[site].long() for site in self.sites)]


def of_algorithm1(program: Program, network: Any, options: Any, steps: int, prior: Any = None) -> list[Tensor]:
    """Parameters and tables after each step of the reference, from the same draws. With a prior, of minus the ELBO."""
    pyro.set_rng_seed(1)
    theta = program.start.clone().requires_grad_()
    optimizer = torch.optim.SGD([theta], lr=0.5)
    critics: dict[str, nn.Module] = {node.name: Table(tuple(node.scope)) for node in network.learned}
    laws, costs = dict[str, Any](), dict[str, Callable[[dict[str, Tensor]], Tensor]]()
    for name in program.reads:
        key = f"cost({name})" if prior is None else cost_of_model(name)
        costs[key] = lambda values, name=name: program.price(name, values)
    for name in program.parents:
        laws[name] = lambda values, name=name: program.law(theta, name, values)
        if prior is not None:
            # The gradient of log q as a cost has mean zero, and is left out.
            costs[cost_of_guide(name)] = lambda values, name=name: laws[name](values).log_prob(values[name]).detach()
            costs[cost_of_model(name)] = lambda values, name=name: -prior.log_prob(values[name])
    found = []
    for _ in range(steps):
        backpropq_algorithm1(network, laws, costs, critics, optimizer, critic_lr=0.3, **options)
        tables = [critic.table.detach().clone().flatten() for critic in critics.values()]  # type: ignore[union-attr]
        found.append(torch.cat((theta.detach().flatten(), *tables)))
    return found


def of_program(elbo: TraceBackpropQ_ELBO, *programs: Any, steps: int) -> tuple[BackpropQNetwork, list[Tensor]]:
    """The network, and the same numbers of an objective."""
    fresh(1)
    found: list[Tensor] = []
    for _ in range(steps):
        elbo.loss_and_grads(*programs)
        theta, network = pyro.get_param_store()._params["theta"], elbo.network
        with torch.no_grad():
            theta -= 0.5 * theta.grad
        theta.grad = None
        found.append(torch.cat((theta.detach().flatten(), *(values_of(elbo, node) for node in network.learned))))
    return network, found


def values_of(elbo: TraceBackpropQ_ELBO, node: Any) -> Tensor:
    """The table of a Q-node, over the joint states of its scope in program order."""
    block = next(block for block in elbo.critics.blocks.values() if node.name in block.keys)
    table = block.critic.table[block.keys.index(node.name)].detach()
    width = len(table).bit_length() - 1
    entries = []
    for state in itertools.product((0, 1), repeat=len(node.scope)):
        at = dict(zip(node.scope, state, strict=True))
        own = at.pop(node.site)
        # The latest site leads; scopes that are smaller than others of the batch leave the last digits at zero.
        cell = sum(value << (width - 1 - k) for k, value in enumerate(reversed(at.values())))
        entries.append(table[cell, own])
    return torch.stack(entries)


MODES: list[tuple[str, dict[str, float]]] = [
    *((reduction, {"lam": 0.0}) for reduction in ("per_cost", "merged", "tree", "chain", "single")),
    ("merged", {"lam": 0.6}),
    ("per_cost", {"lam": 1.0}),
    ("per_cost", {"lam": 0.4, "gamma": 0.8}),
    ("tree", {"lam": 0.0, "gamma": 0.8}),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("reduction", "options"), MODES)
def test_updates_are_those_of_algorithm_1(case: str, reduction: str, options: dict[str, float]) -> None:
    program = Program(case)
    elbo = ExpectedCost(**paper_settings(reduction, **options, rate=0.3))
    network, found = of_program(elbo, None, program.policy, steps=4)
    is_discounted = options.get("gamma", 1.0) != 1.0
    assert network == BackpropQNetwork.build(
        network.graph, network.reduction, immediate=frozenset(), discounted=is_discounted
    )
    expected = of_algorithm1(program, network, options, 4)
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=1e-12, msg=lambda text, n=step: f"step {n}: {text}")
    # Something was learned, of the program and of the critics.
    size = program.start.numel()
    assert not torch.equal(found[-1][:size], program.start.flatten())
    assert int((found[-1][size:] != 0).sum()) > 3


def test_updates_of_an_elbo_are_those_of_algorithm_1() -> None:
    # Minus the ELBO: log q and -log p of every site are costs as well.
    program, prior = Program("bypass"), dist.Bernoulli(0.3 * torch.ones(()))

    def model() -> None:
        values = {name: pyro.sample(name, prior) for name in program.parents}
        pyro.factor("f", -program.price("f", values))

    elbo = TraceBackpropQ_ELBO(**paper_settings("chain", rate=0.3))
    network, found = of_program(elbo, model, program.drawn, steps=5)
    torch.testing.assert_close(found, of_algorithm1(program, network, {}, 5, prior), rtol=0.0, atol=1e-12)


def test_a_sweep_biases_the_gradient_and_the_default_does_not() -> None:
    for options, is_biased in ((paper_settings(), True), ({"num_particles": 1}, False)):
        elbo = settled(BY_NAME["chain"], 20, **options).eval()
        worst = bias(elbo, *BY_NAME["chain"].programs, params=BY_NAME["chain"].params)
        assert (worst > 1e-2) if is_biased else (worst < 1e-10)


@pytest.mark.parametrize("form", ["ancestor", "history"])
@pytest.mark.parametrize("immediate", ["exact", "learned"])
@pytest.mark.parametrize("name", ["chain", "fork", "diamond"])
def test_forms_and_learned_costs_are_unbiased(name: str, form: Any, immediate: Any) -> None:
    case = BY_NAME[name]
    elbo = trained(TraceBackpropQ_ELBO(1, form=form, immediate=immediate), *case.programs, params=case.params, steps=5)
    network = elbo.network
    assert network is not None and network.form == form
    assert all(bool(node.immediate) == (immediate == "exact") for node in network.nodes if node.rule == ())
    assert all(not costs for costs in elbo.plan.layout.tabled.values()) == (immediate == "learned")  # type: ignore[union-attr]
    assert_unbiased(elbo.eval(), case.model, case.guide, *case.args)


def two_sites(q: Tensor) -> tuple[Tensor, Tensor]:
    """y is x."""
    x = pyro.sample("x", dist.Bernoulli(logits=q))
    return x, pyro.sample("y", dist.Bernoulli(logits=200.0 * x - 100.0))


def policy() -> tuple[Tensor, Tensor]:
    return two_sites(pyro.param("t", torch.tensor(0.4)))


def priced() -> None:
    """The cost f is one edge from x and one level above y, g two edges from x."""
    x, y = policy()
    cost("f", 3.0 * x, exact=True)
    cost("g", 8.0 * y * x, exact=True)


def model() -> None:
    """log q and -log p of x are known at both of its values; those of y cancel."""
    x, y = two_sites(torch.tensor(-0.7))
    pyro.factor("f", -3.0 * x)
    pyro.factor("g", -8.0 * y * x)


def slope(make: Any, immediate: Any, options: dict[str, Any], *programs: Any) -> tuple[Tensor, str]:
    """``Q(1) - Q(0)``: the expected gradient over ``p (1 - p)``; and the plan."""
    elbo = stepped(12, make(**{**options, "immediate": immediate}), *programs)
    p = torch.tensor(0.4).sigmoid()
    return expected_gradient(elbo.eval(), *programs)["t"] / (p * (1 - p)), str(elbo.plan)


@pytest.mark.parametrize("estimator", [QAllAction(), LambdaReturn(0.3)], ids=repr)
@pytest.mark.parametrize("reduction", ["per_cost", "tree", "chain"])
@pytest.mark.parametrize("immediate", ["exact", "learned"])
def test_a_discount_means_the_same_whatever_is_exact(immediate: Any, reduction: Any, estimator: Any) -> None:
    options = paper_settings(reduction, 0.0, 0.5, estimator=estimator, rate=1.0)
    found, _ = slope(ExpectedCost, immediate, options, None, priced)
    torch.testing.assert_close(found, torch.tensor(0.5 * 3.0 + 0.5**2 * 8.0), rtol=0.0, atol=1e-10)


FOLLOWERS = [QAllAction(), QScoreFunction(), QAdvantage(), LambdaReturn(0.3), QRELAX(scale=0.0)]


@pytest.mark.parametrize("estimator", FOLLOWERS, ids=repr)
@pytest.mark.parametrize("immediate", ["exact", "learned"])
def test_costs_that_are_added_to_a_critic_are_discounted_like_it(immediate: Any, estimator: Any) -> None:
    # By hand: log q(1) - log q(0) = 0.4, log p(1) - log p(0) = -0.7, and f: one edge; g: two.
    options = paper_settings("chain", 0.0, 0.5, estimator=estimator, rate=1.0)
    found, plan = slope(TraceBackpropQ_ELBO, immediate, options, model, policy)
    assert ("-log p" in plan) == (immediate == "exact")
    torch.testing.assert_close(found, torch.tensor(0.5 * (0.4 + 0.7 + 3.0) + 0.25 * 8.0), rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("gamma", [0.5, 1.0])
@pytest.mark.parametrize("immediate", ["exact", "learned"])
def test_a_discount_of_a_critic_that_is_followed_by_its_slope(immediate: Any, gamma: float) -> None:
    """Both costs are linear in x, so that a critic can fit them exactly; f is one edge from x, g two, by way of y."""

    def policy() -> None:
        m = pyro.param("m", torch.tensor(0.3))
        x = pyro.sample("x", dist.Normal(m, 0.8), infer={"bpq": {"estimator": QPathwise()}})
        y = pyro.sample("y", dist.Normal(x, 1.0), infer={"bpq": {"estimator": ScoreFunction()}})
        cost("f", 3.0 * x)
        cost("g", 8.0 * x + 0.0 * y)

    # By hand: Q(x) = γ 3 x + γ² 8 x, so dQ/dx = 1.5 + 2 at γ = 0.5 and 11 at 1, wherever x falls; dx/dm = 1.
    learner = CriticLearner(sweep=BackwardSweep(0.5))
    options: dict[str, Any] = {"critic": MomentCritic(()), "learner": learner, "lam": 1.0, "gamma": gamma}
    options |= {"vectorize_particles": True, "max_plate_nesting": 0, "immediate": immediate}
    elbo = stepped(60, ExpectedCost(100, **options), None, policy)
    pyro.get_param_store()._params["m"].grad = None
    elbo.eval().loss_and_grads(None, policy)
    gradient = pyro.get_param_store()._params["m"].grad
    torch.testing.assert_close(gradient, torch.tensor(3.0 * gamma + 8.0 * gamma**2), rtol=0.0, atol=1e-6)


def test_whatever_puts_q_in_the_place_of_costs_says_so() -> None:
    # These take Q for the cost, so the costs that they add to it have to be discounted as Q is, or gamma is refused.
    kinds = [getattr(estimators, name) for name in estimators.__all__ if name.startswith("Q")]
    followers = [kind for kind in kinds if issubclass(kind, Estimator) and not kind.is_unbiased]
    assert followers and all(kind.replaces_costs for kind in followers)
    assert not estimators.ParentAdvantage.takes_discount


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(OptionError, match="does not use lr, steps"):
        CriticLearner(sweep=BackwardSweep(), lr=0.1, steps=2)
    with pytest.raises(OptionError, match="reduction='chain'"):
        TraceBackpropQ_ELBO(reduction="single", gamma=0.9)
