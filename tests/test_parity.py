"""Parity with Pyro's own ELBOs, sample by sample under the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, CASES, Case, each_case
from pyro.infer import ELBO, Trace_ELBO, TraceGraph_ELBO
from torch import Tensor

from pyro_bpq import LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO

# TraceGraph_ELBO scores a factor of the guide as if it were drawn from (no gradient of the factor itself).
NOT_TRACEGRAPHS = frozenset({"guide_factor"})


def can_compare(case: Case) -> bool:
    return case.is_static and case.name not in NOT_TRACEGRAPHS


def gradients(elbo: ELBO, case: Case, seed: int) -> tuple[float, dict[str, Tensor], Tensor]:
    """Loss, gradients and state of the global generator after one step."""
    case.params()
    pyro.set_rng_seed(seed)
    loss = elbo.loss_and_grads(case.model, case.guide, *case.args)
    store = pyro.get_param_store()
    grads = {name: leaf.grad for name, leaf in store.named_parameters()}
    found = {name: torch.zeros_like(store._params[name]) if g is None else g.clone() for name, g in grads.items()}
    return loss, found, torch.get_rng_state()


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


PARTICLES: list[dict[str, Any]] = [
    {"num_particles": 1},
    {"num_particles": 3},
    {"num_particles": 3, "vectorize_particles": True, "max_plate_nesting": 2},
]
IDS = ["one", "sequential", "vectorised"]


@pytest.mark.parametrize("options", PARTICLES, ids=IDS)
@each_case(can_compare)
def test_plain_score_function_equals_tracegraph(case: Case, options: dict[str, Any]) -> None:
    if options.get("vectorize_particles") and not case.is_vectorisable:
        pytest.skip("does not vectorise")
    # Its sites are another set in every run, and a set that was never tracked gets the dense graph. Pyro does not
    # charge single components either, and nothing that is always tracked does.
    structure = "dynamic" if case.name == "sequential_subsample" or "component" in case.name else "auto"
    ours = TraceBackpropQ_ELBO(estimator=ScoreFunction(), critic=None, structure=structure, **options)
    theirs = TraceGraph_ELBO(**options)
    total = 0.0
    for seed in range(4):
        loss, found, state = gradients(ours, case, seed)
        expected_loss, expected, expected_state = gradients(theirs, case, seed)
        assert loss == pytest.approx(expected_loss, rel=1e-10)
        assert_same(found, expected)
        assert torch.equal(state, expected_state)
        total += sum(float(g.abs().sum()) for g in found.values())
    assert total > 0.1


@pytest.mark.parametrize("name", ["python_branch", "dynamic_sites", "python_table", "inplace_buffer", "auxiliary"])
def test_loss_equals_trace_elbo_where_gradients_cannot(name: str) -> None:
    case = BY_NAME[name]
    for seed in range(3):
        ours, _, state = gradients(TraceBackpropQ_ELBO(1), case, seed)
        theirs, _, expected_state = gradients(Trace_ELBO(), case, seed)
        assert ours == pytest.approx(theirs, rel=1e-10)
        assert torch.equal(state, expected_state)


@pytest.mark.parametrize("options", PARTICLES, ids=IDS)
@each_case(lambda case: case.num_states <= 24)
def test_default_draws_nothing_more_than_pyro(case: Case, options: dict[str, Any]) -> None:
    if options.get("vectorize_particles") and not case.is_vectorisable:
        pytest.skip("does not vectorise")
    ours, theirs = TraceBackpropQ_ELBO(**options), Trace_ELBO(**options)
    # Several steps: critics are built, trained and flipped on the way.
    states = []
    for elbo in (ours, theirs):
        case.params()
        pyro.set_rng_seed(7)
        losses = [elbo.loss_and_grads(case.model, case.guide, *case.args) for _ in range(5)]
        states.append((torch.get_rng_state(), losses))
    assert torch.equal(states[0][0], states[1][0])
    assert states[0][1] == pytest.approx(states[1][1], rel=1e-10)


@pytest.mark.parametrize("options", PARTICLES, ids=IDS)
def test_loss_and_evaluate_equal_pyros(options: dict[str, Any]) -> None:
    case = BY_NAME["global_local"]
    for method in ("loss", "loss_and_grads"):
        values = []
        for elbo in (TraceBackpropQ_ELBO(**options), TraceGraph_ELBO(**options)):
            case.params()
            pyro.set_rng_seed(3)
            values.append(getattr(elbo, method)(case.model, case.guide, *case.args))
        assert values[0] == pytest.approx(values[1], rel=1e-12)


def test_guess_of_plate_nesting_equals_pyros() -> None:
    options = {"num_particles": 2, "vectorize_particles": True}
    case = BY_NAME["global_local_subsample"]
    ours, theirs = TraceBackpropQ_ELBO(estimator=ScoreFunction(), **options), TraceGraph_ELBO(**options)
    loss, found, state = gradients(ours, case, 0)
    expected_loss, expected, expected_state = gradients(theirs, case, 0)
    assert loss == pytest.approx(expected_loss, rel=1e-10)
    assert ours.max_plate_nesting == theirs.max_plate_nesting == 2
    assert torch.equal(state, expected_state)
    assert_same(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sites_of_infinite_support_equal_tracegraph(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)

    def model() -> None:
        rate = pyro.sample("rate", dist.Poisson(2.0))
        pyro.sample("x", dist.Normal(rate, 1.0), obs=torch.tensor(3.0))

    def guide() -> None:
        k = pyro.sample("k", dist.Poisson(pyro.param("m", torch.tensor(1.3)).exp()), infer={"is_auxiliary": True})
        pyro.sample("rate", dist.Poisson(pyro.param("q", torch.tensor(0.4)).exp() * (1 + k)))

    case = Case("poisson", model, guide, {}, 0)
    for seed in range(3):
        ours = gradients(TraceBackpropQ_ELBO(estimator=ScoreFunction()), case, seed)
        theirs = gradients(TraceGraph_ELBO(), case, seed)
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
        for name, gradient in theirs[1].items():
            torch.testing.assert_close(ours[1][name], gradient)


def pathwise_case() -> tuple[Callable[..., Any], Callable[..., Any]]:
    def model(data: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        w = pyro.sample("w", dist.Gamma(z.exp().sum(), 1.0))
        with pyro.plate("rows", len(data)):
            pyro.sample("x", dist.Normal(z.sum() * w, 1.0), obs=data)

    def guide(data: Tensor) -> None:
        loc = pyro.param("loc", torch.tensor([0.3, -0.2, 0.5]))
        z = pyro.sample("z", dist.Normal(loc, pyro.param("scale", torch.ones(3)).exp()).to_event(1))
        pyro.sample("w", dist.Gamma(pyro.param("a", torch.tensor(0.2)).exp(), z.square().sum() + 1.0))

    return model, guide


def test_reparameterised_programs_equal_trace_elbo() -> None:
    model, guide = pathwise_case()
    found = []
    for elbo in (TraceBackpropQ_ELBO(), Trace_ELBO()):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        loss = elbo.loss_and_grads(model, guide, torch.tensor([0.4, 1.2]))
        found.append((loss, {n: p.grad for n, p in pyro.get_param_store().named_parameters()}))
    assert found[0][0] == pytest.approx(found[1][0])
    assert_same(found[0][1], found[1][1])


def test_score_function_on_a_reparameterised_site_is_what_trace_elbo_gives_without_rsample() -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 0.5), obs=torch.tensor(0.8))

    def make(fn: Any, **infer: Any) -> Callable[[], None]:
        def guide() -> None:
            pyro.sample("z", fn(pyro.param("m", torch.tensor(0.3)), pyro.param("s", torch.tensor(0.7))), infer=infer)

        return guide

    found = []
    for elbo, guide in (
        (TraceBackpropQ_ELBO(), make(dist.Normal, bpq={"estimator": ScoreFunction()})),
        (TraceGraph_ELBO(), make(dist.testing.fakes.NonreparameterizedNormal)),
    ):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        elbo.loss_and_grads(model, guide)
        found.append({n: p.grad for n, p in pyro.get_param_store().named_parameters()})
    assert_same(found[0], found[1])


def test_leave_one_out_is_the_mean_over_the_others() -> None:
    # By hand: the score of a coin times the difference of the two particles' costs.
    case = BY_NAME["constrained"]
    elbo = TraceBackpropQ_ELBO(num_particles=2, estimator=ScoreFunction(LeaveOneOut()))
    plain = [TraceGraph_ELBO(), TraceGraph_ELBO()]
    found = gradients(elbo, case, 2)[1]["qk"]
    case.params()
    pyro.set_rng_seed(2)
    costs, scores = [], []
    for one in plain:
        traces = one._get_trace(case.model, case.guide, (), {})
        model_trace, guide_trace = traces
        costs.append((guide_trace.log_prob_sum() - model_trace.log_prob_sum()).item())
        leaf = pyro.param("qk").unconstrained()
        scores.append(torch.autograd.grad(guide_trace.nodes["k"]["log_prob"], leaf)[0])
    assert costs[0] != costs[1]
    expected = (scores[0] * (costs[0] - costs[1]) + scores[1] * (costs[1] - costs[0])) / 2
    torch.testing.assert_close(found, expected)


def test_all_cases_are_compared() -> None:
    assert sum(can_compare(case) for case in CASES) >= 20
