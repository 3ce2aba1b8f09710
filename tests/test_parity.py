"""Parity with Pyro's own ELBOs, sample by sample under the same seed."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, CASES, Case, each_case
from pyro.infer import ELBO, Trace_ELBO, TraceGraph_ELBO
from steps import repeat
from torch import Tensor

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO

# TraceGraph_ELBO scores a factor of the guide as if it were drawn from (no gradient of the factor itself).
NOT_TRACEGRAPHS = frozenset({"guide_factor"})


def can_compare(case: Case) -> bool:
    return case.is_static and case.name not in NOT_TRACEGRAPHS


Found = tuple[float, dict[str, Tensor], Tensor]


def gradients(elbo: ELBO, case: Case, seed: int) -> Found:
    """Loss, gradients and state of the global generator after one step."""
    case.params()
    pyro.set_rng_seed(seed)
    loss = elbo.loss_and_grads(*case.programs)
    store = pyro.get_param_store()
    grads = {name: leaf.grad for name, leaf in store.named_parameters()}
    found = {name: torch.zeros_like(store._params[name]) if g is None else g.clone() for name, g in grads.items()}
    return loss, found, torch.get_rng_state()


def assert_same(ours: Found, theirs: Found, rel: float = 1e-10) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=rel)
    torch.testing.assert_close(ours[1], theirs[1], rtol=10.0 * rel, atol=0.1 * rel)
    assert torch.equal(ours[2], theirs[2])


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
        found = gradients(ours, case, seed)
        assert_same(found, gradients(theirs, case, seed))
        total += sum(float(g.abs().sum()) for g in found[1].values())
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
        losses = repeat(5, elbo.loss_and_grads, *case.programs)
        states.append((torch.get_rng_state(), losses))
    assert torch.equal(states[0][0], states[1][0])
    assert states[0][1] == pytest.approx(states[1][1], rel=1e-10)


@pytest.mark.parametrize("options", PARTICLES, ids=IDS)
def test_loss_equals_pyros(options: dict[str, Any]) -> None:
    case, values = BY_NAME["global_local"], []
    for elbo in (TraceBackpropQ_ELBO(**options), TraceGraph_ELBO(**options)):
        case.params()
        pyro.set_rng_seed(3)
        values.append(elbo.loss(*case.programs))
    assert values[0] == pytest.approx(values[1], rel=1e-12)


def test_guess_of_plate_nesting_equals_pyros() -> None:
    options, case = {"num_particles": 2, "vectorize_particles": True}, BY_NAME["global_local_subsample"]
    ours, theirs = TraceBackpropQ_ELBO(estimator=ScoreFunction(), **options), TraceGraph_ELBO(**options)
    assert_same(gradients(ours, case, 0), gradients(theirs, case, 0))
    assert ours.max_plate_nesting == theirs.max_plate_nesting == 2


# Sites without finite support.


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_sites_of_infinite_support_equal_tracegraph(dtype: torch.dtype, rel: float) -> None:
    torch.set_default_dtype(dtype)

    def model() -> None:
        rate = pyro.sample("rate", dist.Poisson(2.0))
        pyro.sample("x", dist.Normal(rate, 1.0), obs=torch.tensor(3.0))

    def guide() -> None:
        k = pyro.sample("k", dist.Poisson(pyro.param("m", torch.tensor(1.3)).exp()), infer={"is_auxiliary": True})
        pyro.sample("rate", dist.Poisson(pyro.param("q", torch.tensor(0.4)).exp() * (1 + k)))

    case = Case("poisson", model, guide, {})
    for seed in range(3):
        ours = TraceBackpropQ_ELBO(estimator=ScoreFunction())
        assert_same(gradients(ours, case, seed), gradients(TraceGraph_ELBO(), case, seed), rel)


def test_reparameterised_programs_equal_trace_elbo() -> None:
    data = torch.tensor([0.4, 1.2])

    def model() -> None:
        z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        w = pyro.sample("w", dist.Gamma(z.exp().sum(), 1.0))
        with pyro.plate("rows", len(data)):
            pyro.sample("x", dist.Normal(z.sum() * w, 1.0), obs=data)

    def guide() -> None:
        loc = pyro.param("loc", torch.tensor([0.3, -0.2, 0.5]))
        z = pyro.sample("z", dist.Normal(loc, pyro.param("scale", torch.ones(3)).exp()).to_event(1))
        pyro.sample("w", dist.Gamma(pyro.param("a", torch.tensor(0.2)).exp(), z.square().sum() + 1.0))

    case = Case("pathwise", model, guide, {})
    assert_same(gradients(TraceBackpropQ_ELBO(), case, 1), gradients(Trace_ELBO(), case, 1))


def test_score_function_on_a_reparameterised_site_is_what_trace_elbo_gives_without_rsample() -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 0.5), obs=torch.tensor(0.8))

    def case(fn: Any, **infer: Any) -> Case:
        def guide() -> None:
            pyro.sample("z", fn(pyro.param("m", torch.tensor(0.3)), pyro.param("s", torch.tensor(0.7))), infer=infer)

        return Case("normal", model, guide, {})

    ours = gradients(TraceBackpropQ_ELBO(), case(dist.Normal, bpq={"estimator": ScoreFunction()}), 1)
    assert_same(ours, gradients(TraceGraph_ELBO(), case(dist.testing.fakes.NonreparameterizedNormal), 1))


def test_all_cases_are_compared() -> None:
    assert sum(can_compare(case) for case in CASES) >= 20
