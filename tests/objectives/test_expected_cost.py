"""Costs of all kinds, alone and with an ELBO: the expected gradient is the exact one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from models import irregular, real
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.optim import Adam
from steps import coin_guide, expected_loss, from_seed, in_thread, repeat, seeing, stepped, trained, unbiased
from tabular import prob
from torch import Tensor

from pyro_bpq import (
    AllAction,
    CostCounter,
    ExpectedCost,
    LeaveOneOut,
    LinearCritic,
    RunningBaseline,
    ScoreFunction,
    TraceBackpropQ_ELBO,
    cost,
)
from pyro_bpq.errors import OptionError, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.testing import TwoPoint, assert_unbiased, exact_loss, expected_gradient, expected_moments

ATOL = 1e-10

pytestmark = pytest.mark.usefixtures("two_particles")


def param(name: str, *shape: int, start: int = 0) -> Tensor:
    return pyro.param(name, lambda: irregular(*shape, start=start))


def mismatch(found: Tensor, wanted: tuple[int, ...]) -> int:
    """A black box: Python numbers in, a Python number out."""
    return sum(a != b for a, b in zip(found.tolist(), wanted, strict=True)) ** 2


def tokens(wanted: tuple[int, ...] = (1, 0, 1)) -> Tensor:
    state, drawn = torch.zeros(2, dtype=torch.float64), []
    for t in range(3):
        logits = param("logits", 2, start=t) * state.sum() + param("slope", 2) + 0.3 * t
        token = pyro.sample(f"z_{t}", dist.Categorical(logits=logits))
        state = state + torch.stack((0.4 * token, token * 0.9 - 0.2))
        drawn.append(token)
    return torch.stack(drawn)


def late_function() -> None:
    cost("edit", mismatch, tokens(), (1, 0, 1))


def late_value() -> None:
    cost("edit", np.float64(mismatch(tokens(), (1, 0, 1))))


def early_and_late() -> None:
    a = pyro.sample("a", dist.Bernoulli(logits=param("qa")))
    cost("early", 3.0 - 1.7 * a.item())
    b = pyro.sample("b", dist.Bernoulli(logits=param("qb", 2)[a.long()]))
    cost("late", 2.0 * b * a)


def early_functions() -> None:
    a = pyro.sample("a", dist.Bernoulli(logits=param("qa")))
    cost("early", lambda x: 3.0 - 1.7 * x.item(), a)
    b = pyro.sample("b", dist.Bernoulli(logits=param("qb", 2)[a.long()]))
    cost("late", 2.0 * b * a)
    cost("own", lambda x: [0.5, -1.2][int(x)], b)


def rows() -> None:
    with pyro.plate("rows", 3, dim=-1):
        a = pyro.sample("a", dist.Bernoulli(logits=param("qa", 3)))
        cost("each", lambda x: np.exp(x.numpy()) * np.arange(3), a)
        b = pyro.sample("b", dist.Bernoulli(logits=param("qb", 3) * (1 + a)))
        cost("tensor", (a - 2 * b) * real(0.3, 1.0, -0.4))
    cost("all", lambda x: float(x.sum() > 1), b)


def scaled_rows() -> None:
    with pyro.plate("rows", 4, subsample_size=2, dim=-1) as rows, poutine.scale(scale=0.7):
        a = pyro.sample("a", dist.Bernoulli(logits=param("qa", 4)[rows]))
        with poutine.mask(mask=rows > 0):
            cost("each", a * (rows + 1.0))


def stateful() -> None:
    class Meter:
        total = 0.0

        def add(self, x: Tensor) -> float:
            self.total += float(x.item())
            return self.total**2

    meter = Meter()
    for t in range(3):
        cost(f"c_{t}", meter.add, pyro.sample(f"z_{t}", dist.Bernoulli(logits=param("q", 3)[t])))


def feedback() -> None:
    a = pyro.sample("a", dist.Bernoulli(logits=param("qa")))
    paid = cost("first", lambda x: 1.5 * x.item(), a)
    if paid.item() > 1.0:
        cost("second", 2.0)
    b = pyro.sample("b", dist.Bernoulli(logits=param("qb") + paid))
    cost("third", lambda x: 1.0 - x.item(), b)


def reparameterised() -> None:
    x = pyro.sample("x", TwoPoint(param("loc"), torch.tensor(0.8, dtype=torch.float64)))
    b = pyro.sample("b", dist.Bernoulli(logits=param("qb") + x.detach()))
    cost("smooth", (x - b) ** 2)
    cost("box", lambda y: 3.0 * y.item(), b)


def learned() -> None:
    b = pyro.sample("b", dist.Bernoulli(logits=param("qb")))
    cost("net", param("weight", 2)[b.long()] ** 2)


def exact_costs() -> None:
    with pyro.plate("rows", 2, dim=-1):
        a = pyro.sample("a", dist.Categorical(logits=param("qa", 2, 3)))
        cost("table", lambda x: irregular(2, 3, start=2)[torch.arange(2), x], a, exact=True)
        b = pyro.sample("b", dist.Bernoulli(logits=param("qb", 2) * a))
        cost("value", (b - 0.4 * a) ** 2, exact=True)


def exact_look() -> None:
    """A function whose cost is exact must not look at values: it is seen."""
    a = pyro.sample("a", dist.Bernoulli(logits=param("qa")))
    cost("c", lambda x: torch.tensor(2.0 * x.sum().item()), a, exact=True)


PROGRAMS: list[Callable[..., Any]] = [
    *(late_function, late_value, early_and_late, early_functions, rows, scaled_rows, stateful),
    *(feedback, reparameterised, learned, exact_costs, exact_look),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "dense": {"structure": "dense"},
    "dynamic": {"structure": "dynamic"},
    "linear": {"critic": LinearCritic(), "lam": 0.5},
    "score": {"estimator": ScoreFunction()},
    "no_learner": {"learner": None},
    "two": {"num_particles": 2},
    "two_loo": {"num_particles": 2, "estimator": ScoreFunction(LeaveOneOut())},
}
QUICK = ("default", "dense", "two")


def train(objective: Any, model: Any, guide: Any, *args: Any, steps: int = 20) -> Any:
    """Trains critics with a moving policy, freezes them, and starts the policy anew."""
    return trained(objective, model, guide, *args, steps=steps, lr=0.02).eval()


CASES = [pytest.param(own, id=n, marks=() if n in QUICK else (pytest.mark.slow,)) for n, own in OPTIONS.items()]


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_policy_is_unbiased(program: Callable[..., Any], options: dict[str, Any]) -> None:
    objective = train(ExpectedCost(**options), None, program)
    assert_unbiased(objective, None, program)


@pytest.mark.parametrize("program", [late_function, early_functions])
def test_first_step_is_unbiased(program: Callable[..., Any]) -> None:
    assert_unbiased(ExpectedCost().eval(), None, program)


# No tape sees what happens in a thread.
CHARGES: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "value": (lambda z: cost("c", z.sum(-1).cos()), 2),
    "function in torch": (lambda z: cost("c", lambda own: own.sum(-1).cos(), z), 2),
    "function that leaves torch": (lambda z: cost("c", lambda own: own.sum(-1).cos().item(), z), 1),
    "method of a tensor": (lambda z: cost("c", (z.sum(-1) > 1.5).item), 1),
    "function of torch": (lambda z: cost("c", functools.partial(torch.equal, torch.ones(3)), z), 1),
    "function in a thread": (lambda z: cost("c", lambda own: in_thread(own.sum), z), 1),
}


@pytest.mark.parametrize("kind", CHARGES)
def test_what_may_be_dear_runs_one_particle(kind: str) -> None:
    charge, number = CHARGES[kind]

    def coins() -> None:
        z = [pyro.sample(f"z_{t}", dist.Bernoulli(logits=param("w", 3)[t])) for t in range(3)]
        charge(torch.stack(z, -1))

    objective = unbiased(ExpectedCost(), None, coins, steps=2)
    assert objective.num_particles == number
    # Critics stay beside other particles.
    assert all(isinstance(known["estimator"], AllAction) for known in objective.info.values())


@pytest.mark.parametrize("writes", [False, True])
def test_black_boxes_read_all_components_of_a_site(writes: bool) -> None:
    def policy() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=param("w", 3)).to_event(1))
        paid = cost("box", lambda own: float(own.sum() ** 2), z)
        room = torch.zeros(2)
        if writes:
            room[0] = paid
        cost("later", room[0] + 0.3 * z[..., 1])

    assert_unbiased(ExpectedCost(num_particles=1).eval(), None, policy)


def environment() -> None:
    a = pyro.sample("a", dist.Bernoulli(torch.tensor(0.5)))
    weather = pyro.sample("weather", dist.Categorical(logits=param("weather_logits", 3) * (1 + a)))
    cost("bill", lambda x, y: abs(x.item() - y.item()), a, weather)


def agent() -> None:
    a = pyro.sample("a", dist.Bernoulli(logits=param("qa")))
    cost("effort", 0.3 * a)


def test_environment_with_sites_of_its_own() -> None:
    objective = train(ExpectedCost(), environment, agent)
    assert_unbiased(objective, environment, agent)
    # The environment's own sites are nodes too.
    assert [node.name for node in objective.graph.nodes] == ["a", "weather"]


# With an ELBO.


def mixed_model(reads_values: bool = False) -> None:
    a = pyro.sample("a", dist.Bernoulli(logits=param("pa"))).long()
    b = pyro.sample("b", dist.Categorical(logits=param("pb", 2, 3)[a]))
    pyro.sample("x", dist.Normal(1.0 * a + b, 0.8), obs=real(0.4)[0])
    if reads_values:
        cost("box", (b.item() - a.item()) ** 2)
    else:
        cost("box", lambda x: [0.0, 2.0, -1.0][int(x)], b)
        cost("tensor", 0.5 * a * b)


def mixed_guide() -> None:
    a = pyro.sample("a", dist.Bernoulli(logits=param("qa"))).long()
    cost("effort", 1.3 * a)
    pyro.sample("b", dist.Categorical(logits=param("qb", 2, 3)[a]))


@pytest.mark.parametrize("model", [mixed_model, functools.partial(mixed_model, reads_values=True)], ids=["all", "read"])
@pytest.mark.parametrize("options", [{}, {"num_particles": 2}, {"structure": "dense"}, {"estimator": ScoreFunction()}])
def test_mixes_with_an_elbo(model: Callable[..., Any], options: dict[str, Any]) -> None:
    elbo = train(TraceBackpropQ_ELBO(**options), model, mixed_guide)
    assert_unbiased(elbo, model, mixed_guide)


def test_loss_is_elbo_plus_costs() -> None:
    exact = float(exact_loss(mixed_model, mixed_guide))
    costs = float(exact_loss(mixed_model, mixed_guide, only_costs=True))
    without = poutine.block(mixed_model, hide=["box", "tensor"]), poutine.block(mixed_guide, hide=["effort"])
    assert exact == pytest.approx(float(exact_loss(*without)) + costs)
    unobserved = poutine.block(mixed_model, hide=["x"])
    for elbo, model, expected in ((TraceBackpropQ_ELBO(), mixed_model, exact), (ExpectedCost(), unobserved, costs)):
        assert abs(expected_loss(elbo, model, mixed_guide) - expected) < ATOL


@pytest.mark.parametrize("kind", [Trace_ELBO, TraceGraph_ELBO])
def test_pyros_elbos_count_costs(kind: Any) -> None:
    # In a guide too, with the right sign.
    for seed in range(8):
        elbos = kind(), TraceBackpropQ_ELBO(critic=None)
        losses = [from_seed(seed, elbo.loss_and_grads, mixed_model, mixed_guide) for elbo in elbos]
        assert losses[0] == pytest.approx(losses[1])


# Structure, and how often a cost is called.


def test_looks_inside_of_a_function_leave_critics_alone() -> None:
    objective = train(ExpectedCost(), None, early_functions)
    assert not objective.runner.recordings.escapes and objective.network is not None
    parents = {node.name: node.parents for node in objective.graph.costs}
    assert parents == {"cost(early)": ("a",), "cost(late)": ("a", "b"), "cost(own)": ("b",)}


@pytest.mark.parametrize("program", [early_and_late, exact_look])
def test_looks_outside_of_a_function_count(program: Any) -> None:
    objective = train(ExpectedCost(), None, program)
    assert objective.runner.recordings.escapes and objective.network is not None and objective.network.form == "history"


class Box:
    """A black box that counts its calls."""

    calls = 0

    def __call__(self, x: Tensor) -> float:
        self.calls += 1
        return float(x.item()) ** 2


@pytest.mark.parametrize("particles", [1, 3])
def test_a_function_is_called_once_per_particle(particles: int) -> None:
    box = Box()
    model = charged(lambda a: cost("box", functools.partial(box.__call__), a))
    elbo = TraceBackpropQ_ELBO(num_particles=particles, estimator=AllAction(exact=True))
    with CostCounter() as counter:
        repeat(7, elbo.loss_and_grads, model, coin_guide)
    assert box.calls == 7 * particles == counter.total == counter.calls["box"]
    # The extra run took place all the same.
    (plan,) = elbo.runner.plans.plans.values()
    assert plan.flips.sites


def charged(charge: Callable[[Tensor], Any]) -> Callable[[], None]:
    """A model of a coin that is charged for it."""

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.5)))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(0.3))
        charge(z)

    return model


def test_given_values_are_known_at_other_values_without_a_call() -> None:
    box = Box()
    model = charged(lambda a: cost("box", (a - 0.3) ** 2 + 0.0 * box(torch.zeros(()))))
    elbo = trained(TraceBackpropQ_ELBO(estimator=AllAction(exact=True)), model, coin_guide, steps=5).eval()
    assert box.calls == 5
    assert_unbiased(elbo, model, coin_guide)
    assert expected_moments(elbo, model, coin_guide).total_variance < ATOL


def test_exact_costs_are_evaluated_at_every_value() -> None:
    objective = train(ExpectedCost(num_particles=1), None, exact_costs, steps=2)
    (plan,) = objective.runner.plans.plans.values()
    assert plan.flips is not None and set(plan.flips.costs) == {"a", "b"}


def test_vectorised_particles_call_functions_once() -> None:
    calls = []

    def box(x: Tensor) -> Tensor:
        calls.append(x.shape)
        return (x - 0.3) ** 2

    def program() -> None:
        cost("c", box, pyro.sample("a", dist.Bernoulli(logits=param("qa"))))

    stepped(1, ExpectedCost(num_particles=5, vectorize_particles=True), None, program)
    assert calls == [(5,)]
    pyro.clear_param_store()
    two = ExpectedCost(num_particles=2, vectorize_particles=True, max_plate_nesting=1).eval()
    assert_unbiased(two, None, program)


# Forms of use, and errors.


def test_outside_of_inference_a_cost_is_its_value() -> None:
    assert float(cost("a", 2)) == 2.0
    assert cost("a", [torch.tensor(1.0), 2.0]).tolist() == [1.0, 2.0]
    assert cost("a", np.ones(2, dtype=np.int64)).dtype == torch.get_default_dtype()


def normal() -> None:
    x = pyro.sample("x", dist.Normal(param("loc"), torch.tensor(1.0, dtype=torch.float64)))
    cost("box", lambda y: y.detach().item() ** 2, x)


@pytest.mark.parametrize(
    ("run", "kind", "text"),
    [
        (lambda: ExpectedCost().loss(None, seeing(lambda z: z)), UnsupportedProgramError, "'x' is observed"),
        (lambda: TraceBackpropQ_ELBO().loss(agent, agent), OptionError, "both have a cost 'effort'"),
        (lambda: cost("c", "text"), OptionError, "'c': 'text' is no number"),
        (lambda: cost("c", 1.0, 2.0), OptionError, "without a function"),
        (lambda: cost("c", lambda: None), OptionError, "is no number"),
        (lambda: cost("c", 1.0, exact=True), OptionError, "needs a tensor"),
        (lambda: cost("c", torch.ones(2, dtype=torch.complex64)), OptionError, "complex"),
        (lambda: ExpectedCost().loss_and_grads(None, normal), UnsupportedSiteError, "'x' is reparameterised"),
    ],
)
def test_errors(run: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        run()


# The paper's first way to a latent model: sampling p(z) and maximising p(x)


def likelihoods(z: tuple[Tensor, Tensor]) -> Tensor:
    """``p(x | z)`` of a few rows."""
    means = param("mean", 2)[z[1].long()] + 0.7 * z[0]
    return torch.distributions.Normal(means, 0.8).log_prob(real(0.4)).exp()


def generative() -> None:
    a = pyro.sample("a", dist.Bernoulli(logits=param("pa")))
    b = pyro.sample("b", dist.Bernoulli(logits=param("pb", 2, start=1)[a.long()]))
    cost("likelihood", -likelihoods((a, b)).sum())


@pytest.mark.parametrize("options", [{}, {"estimator": ScoreFunction(RunningBaseline())}], ids=str)
def test_likelihood_by_sampling_the_prior(options: dict[str, Any]) -> None:
    """The expected gradient is that of minus the likelihood, by hand, for latent and decoder parameters."""
    objective = ExpectedCost(**options)
    svi = SVI(None, generative, Adam({"lr": 0.02}), objective)
    repeat(10, svi.step)
    leaves = {name: pyro.param(name) for name in ("pa", "pb", "mean")}
    total = torch.zeros((), dtype=torch.float64)
    for a, b in itertools.product((0, 1), repeat=2):
        weight = prob(leaves["pa"], a) * prob(leaves["pb"][a], b)
        total = total - weight * likelihoods((torch.tensor(a), torch.tensor(b))).sum()
    hand = torch.autograd.grad(total, list(leaves.values()))
    found = expected_gradient(objective.eval(), None, generative)
    for name, gradient in zip(leaves, hand, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("reduce", [lambda z: float(z.sum()), lambda z: z.sum()])
def test_a_function_that_gives_one_number_for_all_particles_is_refused(reduce: Callable[[Tensor], Any]) -> None:
    """``z.sum(-1, keepdim=True)`` keeps the dimension of the particles."""
    kept = charged(lambda a: cost("c", lambda z: z.sum(-1, keepdim=True), a))
    elbo = stepped(1, TraceBackpropQ_ELBO(3, vectorize_particles=True, max_plate_nesting=1), kept, coin_guide)
    with pytest.raises(OptionError, match=r"Cost 'c': .* 3 particles at once .* shape \(\).* Keep dimension -2"):
        elbo.loss_and_grads(charged(lambda a: cost("c", reduce, a)), coin_guide)
