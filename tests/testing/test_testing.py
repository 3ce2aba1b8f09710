from __future__ import annotations

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, CASES, Case, each_case
from pyro import poutine
from pyro.infer import ELBO, RenyiELBO, Trace_ELBO, TraceGraph_ELBO
from pyro.nn import PyroModule, PyroParam
from steps import bias, coins_guide, stepped
from torch.distributions import constraints

from pyro_bpq import TraceBackpropQ_ELBO, TraceBackpropQ_IWAE
from pyro_bpq.errors import (
    OptionError,
    SiteNotFoundError,
    StructureChangedError,
    UnsupportedProgramError,
    UnsupportedSiteError,
)
from pyro_bpq.estimators import DebiasedStraightThrough, DisARM
from pyro_bpq.testing import (
    ChoiceNoise,
    TwoPoint,
    assert_unbiased,
    exact_gradient,
    exact_loss,
    expected_gradient,
    expected_moments,
    iter_outcomes,
    sample_gradients,
    z_scores,
)

# Numbers by hand


def coin_model() -> None:
    z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("b")))
    pyro.factor("cost", -(0.7 + 1.9 * z))


def coin_guide() -> None:
    pyro.sample("z", dist.Bernoulli(logits=pyro.param("a")))


def coin_params() -> tuple[float, float]:
    """Returns the probabilities of heads of guide and model."""
    a, b = (pyro.param(name, torch.tensor(value)).detach() for name, value in (("a", -0.6), ("b", 0.9)))
    return float(a.sigmoid()), float(b.sigmoid())


def test_exact_gradient_sums_terms_that_are_level_at_the_parameters() -> None:
    """At p = 0 the factor is the same at all values of the marked site, and its slope is not."""

    def model() -> None:
        n = pyro.sample("n", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])), infer={"enumerate": "parallel"})
        pyro.factor("x", n * pyro.param("p", torch.tensor(0.0)))

    found = exact_gradient(model, lambda: None)
    torch.testing.assert_close(found["p"], torch.tensor(-(0.3 + 2 * 0.5)))


def test_expected_moments_of_a_coin_by_hand() -> None:
    q, p = coin_params()
    costs = math.log(1 - q) - math.log(1 - p) + 0.7, math.log(q) - math.log(p) + 2.6
    g = [cost * (z - q) for z, cost in enumerate(costs)]  # cost · ∂ log q(z) / ∂a
    for elbo in (Trace_ELBO(), TraceGraph_ELBO()):
        moments = expected_moments(elbo, coin_model, coin_guide)
        assert float(moments.mean["a"]) == pytest.approx((1 - q) * g[0] + q * g[1], abs=1e-14)
        assert float(moments.variance["a"]) == pytest.approx(q * (1 - q) * (g[1] - g[0]) ** 2, abs=1e-13)
        assert float(moments.variance["b"]) == pytest.approx(q * (1 - q), abs=1e-13)
        assert moments.total_variance == pytest.approx(sum(float(v) for v in moments.variance.values()))


# Identities on the zoo


def test_cases_have_distinct_names() -> None:
    assert len(BY_NAME) == len(CASES)


@each_case()
def test_case_has_the_stated_number_of_states(case: Case) -> None:
    case.params()

    def program() -> None:
        guide_trace = poutine.trace(case.guide).get_trace(*case.args)
        poutine.replay(case.model, trace=guide_trace)(*case.args)

    assert len([*iter_outcomes(program)]) == case.num_states


@each_case()
def test_exact_gradient_reaches_every_parameter(case: Case) -> None:
    case.params()
    gradient = exact_gradient(case.model, case.guide, *case.args)
    assert set(gradient) == set(case.shapes)
    assert all(float(g.abs().max()) > 1e-3 for g in gradient.values())


@each_case()
def test_exact_gradient_is_the_slope_of_exact_loss(case: Case) -> None:
    # exact_loss sums probabilities, the gradient differentiates them: two paths, one truth. The
    # slope misses nothing but the noise's value, which moves with its parameters.
    case.params()
    gradient = exact_gradient(case.model, case.guide, *case.args)
    leaves = dict(pyro.get_param_store().named_parameters())
    directions = {name: torch.cos(torch.arange(g.numel()) + 1.0).reshape(g.shape) for name, g in gradient.items()}

    def loss_at(step: float) -> float:
        with torch.no_grad():
            for name, direction in directions.items():
                leaves[name].add_(step * direction)
            value = float(exact_loss(case.model, case.guide, *case.args))
            for name, direction in directions.items():
                leaves[name].sub_(step * direction)
        return value

    h = 1e-4
    slope = (8 * (loss_at(h) - loss_at(-h)) - (loss_at(2 * h) - loss_at(-2 * h))) / (12 * h)
    inner = sum(float((g * directions[name]).sum()) for name, g in gradient.items())
    assert slope == pytest.approx(inner, rel=1e-7, abs=1e-8)


@pytest.mark.parametrize("kind", [Trace_ELBO, TraceGraph_ELBO])
@each_case()
def test_elbos_of_pyro_are_biased_where_they_are_known_to_be_and_nowhere_else(case: Case, kind: Any) -> None:
    """``Trace_ELBO`` for sites of the guide alone, ``TraceGraph_ELBO`` where a value leaves torch."""
    if case.trace_is_unbiased if kind is Trace_ELBO else case.tracegraph_is_unbiased:
        case.params()
        assert_unbiased(kind(), *case.programs)
    else:
        assert bias(kind(), *case.programs, params=case.params, truth=case.exact()) > 1e-2


@pytest.mark.parametrize("is_vectorised", [False, True])
def test_expected_moments_of_two_particles_halve_the_variance(is_vectorised: bool) -> None:
    case = BY_NAME["chain"].params()
    one = expected_moments(Trace_ELBO(), case.model, case.guide)
    two = expected_moments(Trace_ELBO(num_particles=2, vectorize_particles=is_vectorised), case.model, case.guide)
    for name, variance in one.variance.items():
        torch.testing.assert_close(two.variance[name], variance / 2, rtol=1e-10, atol=1e-12)


# Planted faults


class HalvedScore(Trace_ELBO):
    """Loses half of the score term: invisible to training tests, the fixed point is the same."""

    def _differentiable_loss_particle(self, model_trace: Any, guide_trace: Any) -> Any:
        for site in guide_trace.nodes.values():
            if site["type"] == "sample":
                log_prob, score, entropy = site["score_parts"]
                site["score_parts"] = type(site["score_parts"])(log_prob, 0.5 * score, entropy)
        return super()._differentiable_loss_particle(model_trace, guide_trace)


class Wrong(Trace_ELBO):
    """Multiplies the gradient of one parameter of the guide."""

    factor = -1.0

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().loss_and_grads(model, guide, *args, **kwargs)
        pyro.param("qb").unconstrained().grad.mul_(self.factor)
        return loss


@pytest.mark.parametrize("name", ["chain", "plate", "discrete_above_reparam", "python_branch"])
def test_assert_unbiased_catches_a_halved_score(name: str) -> None:
    case = BY_NAME[name].params()
    with pytest.raises(AssertionError, match=r"HalvedScore is biased(?s:.)*parameter 'qz|parameter 'qa'"):
        assert_unbiased(HalvedScore(), case.model, case.guide, *case.args)


@pytest.mark.parametrize("factor", [-1.0, math.nan])
def test_assert_unbiased_names_the_wrong_parameter_alone(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrong, "factor", factor)
    case = BY_NAME["chain"].params()
    with pytest.raises(AssertionError, match=r"exact .*\n.*expected ") as caught:
        assert_unbiased(Wrong(), case.model, case.guide)
    assert str(caught.value).count("parameter ") == 1 and "'qb'" in str(caught.value)


def test_assert_unbiased_refuses_a_program_that_tests_nothing() -> None:
    coin_params()
    with pytest.raises(AssertionError, match="tests nothing"):
        assert_unbiased(Trace_ELBO(), lambda: None, lambda: None)


# What is left untouched


def test_gradients_and_generators_are_as_before() -> None:
    case = BY_NAME["global_local_subsample"].params()
    leaves = dict(pyro.get_param_store().named_parameters())
    for leaf in leaves.values():
        leaf.grad = torch.full_like(leaf, 3.0)
    state = torch.get_rng_state()
    assert_unbiased(Trace_ELBO(), case.model, case.guide, *case.args)
    assert torch.equal(state, torch.get_rng_state())
    assert all(bool((leaf.grad == 3.0).all()) for leaf in leaves.values())


def test_impossible_values_are_not_visited() -> None:
    def program() -> int:
        k = int(pyro.sample("k", dist.Categorical(torch.tensor([0.0, 0.3, 0.7, 0.0]))))
        if k not in (1, 2):
            raise RuntimeError("unreachable")
        return k

    assert [k for _, k in iter_outcomes(program)] == [1, 2]
    assert [p for p, _ in iter_outcomes(program)] == pytest.approx([0.3, 0.7])


def test_an_exception_of_the_program_is_passed_on() -> None:
    def program() -> None:
        if pyro.sample("z", dist.Bernoulli(0.5)):
            raise RuntimeError("reachable")

    with pytest.raises(RuntimeError, match="reachable"):
        list(iter_outcomes(program))


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (dist.Bernoulli(0.3).expand([2, 3]).to_event(2), 64),
        (dist.Bernoulli(torch.tensor([0.3, 0.6])).mask(torch.tensor([True, False])), 4),
        (dist.Categorical(torch.ones(2, 3)), 9),
        (dist.OneHotCategorical(torch.ones(2, 3)).to_event(1), 9),
        (dist.Binomial(2, torch.tensor([0.3, 0.6])), 9),
        (dist.Delta(torch.ones(2)), 1),
        (TwoPoint(torch.zeros(2, 1), torch.ones(2)).to_event(1), 16),
        (dist.Bernoulli(torch.empty(0)), 1),
    ],
)
def test_iter_outcomes_of_one_site(fn: Any, count: int) -> None:
    found = list(iter_outcomes(lambda: pyro.sample("z", fn)))
    assert all(value.shape == fn.shape() for _, value in found)
    assert len(found) == len({tuple(value.flatten().tolist()) for _, value in found}) == count
    # Of float32, made before the default was set.
    assert sum(probability for probability, _ in found) == pytest.approx(1.0, abs=1e-6)


# Modules and names


def test_parameters_of_modules_are_found() -> None:
    class Guide(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = PyroModule[torch.nn.Linear](1, 1)
            self.shift = PyroParam(torch.tensor(0.4), constraint=constraints.positive)

        def forward(self) -> None:
            pyro.sample("z", dist.Bernoulli(logits=self.net(torch.ones(1))[0] - self.shift))

    pyro.param("b", torch.tensor(0.9))
    guide = Guide()
    gradient = exact_gradient(coin_model, guide)
    assert set(gradient) == {"b", "net.weight", "net.bias", "shift"}
    torch.testing.assert_close(gradient["net.weight"][0], gradient["net.bias"])
    torch.testing.assert_close(gradient["shift"], -0.4 * gradient["net.bias"][0])
    assert_unbiased(Trace_ELBO(), coin_model, guide)


def test_parameters_of_plain_modules_are_found_and_keep_their_gradients() -> None:
    class Guide(torch.nn.Module):
        def __init__(self, name: str | None) -> None:
            super().__init__()
            self.name = name
            self.logit = torch.nn.Parameter(torch.tensor(0.3))

        def forward(self) -> None:
            if self.name:
                pyro.module(self.name, self)
            pyro.sample("z", dist.Bernoulli(logits=self.logit))

    pyro.param("b", torch.tensor(0.9))
    registered, plain = Guide("mine"), Guide(None)
    registered.logit.grad = torch.tensor(7.0)
    exact = exact_gradient(coin_model, registered)
    other = exact_gradient(coin_model, plain)
    assert set(exact) == {"b", "mine$$$logit"} and set(other) == {"b", "guide.logit"}
    torch.testing.assert_close(exact["mine$$$logit"], other["guide.logit"])
    assert_unbiased(Trace_ELBO(), coin_model, registered)
    assert_unbiased(Trace_ELBO(), coin_model, plain, use_differentiable_loss=True)
    assert float(registered.logit.grad) == 7.0 and plain.logit.grad is None


def test_parameters_can_be_chosen() -> None:
    coin_params()
    chosen = {"mine": pyro.param("a").unconstrained()}
    exact = exact_gradient(coin_model, coin_guide, parameters=chosen)
    assert list(exact) == ["mine"]
    assert_unbiased(Trace_ELBO(), coin_model, coin_guide, parameters=chosen)
    assert list(expected_gradient(Trace_ELBO(), coin_model, coin_guide, parameters=chosen)) == ["mine"]


def test_parameters_met_in_one_branch_only_are_found() -> None:
    pyro.param("a", torch.tensor(-0.6))

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(0.4))
        if z.item():
            pyro.factor("cost", -(pyro.param("late", torch.tensor(1.5)) ** 2))

    exact = exact_gradient(model, coin_guide)
    assert set(exact) == {"a", "late"}
    pyro.param("late").unconstrained().grad = torch.tensor(100.0)
    assert_unbiased(Trace_ELBO(), model, coin_guide)


# Noise of an estimator


class NoisyTrace(Trace_ELBO):
    """Multiplies every gradient by finite noise of a given mean."""

    def __init__(self, noise: ChoiceNoise, factors: list[float]) -> None:
        super().__init__()
        self.noise, self.factors = noise, torch.tensor(factors)

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().loss_and_grads(model, guide, *args, **kwargs)
        index = self.noise.draw_choice(torch.tensor([0.2, 0.3, 0.5]))
        for leaf in pyro.get_param_store().named_parameters():
            leaf[1].grad.mul_(self.factors[index])
        return loss


def test_expected_gradient_runs_through_noise_of_the_estimator() -> None:
    coin_params()
    noise = ChoiceNoise(seed=3)
    assert_unbiased(NoisyTrace(noise, [-1.0, 0.0, 2.4]), coin_model, coin_guide, noise=noise)
    with pytest.raises(AssertionError, match="biased"):
        assert_unbiased(NoisyTrace(noise, [-1.0, 0.0, 2.5]), coin_model, coin_guide, noise=noise)


# Errors


def coins(number: int = 1000) -> None:
    with pyro.plate("rows", number):
        pyro.sample("z", dist.Bernoulli(0.5))


@pytest.mark.parametrize(
    ("model", "guide", "error", "text"),
    [
        (coin_model, lambda: pyro.sample("x", dist.Normal(0, 1)), UnsupportedSiteError, r"'x' \(Normal\).*TwoPoint"),
        (coin_model, lambda: None, SiteNotFoundError, r"'z'.*guide lacks"),
        (coins, coins, OptionError, r"num_outcomes=200000.*'z'.*1000 elements of 2 values"),
        (coin_model, lambda: (coin_guide(), poutine.block(coins)()), UnsupportedProgramError, r"poutine\.block"),
    ],
    ids=["no finite support", "no site of the guide", "too many", "hidden"],
)
def test_programs_that_cannot_be_enumerated_are_refused(model: Any, guide: Any, error: Any, text: str) -> None:
    coin_params()
    with pytest.raises(error, match=text):
        exact_gradient(model, guide)


def test_too_many_outcomes_of_branches_are_refused() -> None:
    def program() -> None:
        for i in range(4):
            if not pyro.sample(f"z_{i}", dist.Bernoulli(0.5)):
                break

    assert len([*iter_outcomes(program)]) == 5
    with pytest.raises(OptionError, match="More than num_outcomes=4"):
        list(iter_outcomes(program, num_outcomes=4))


def test_a_program_with_memory_is_refused() -> None:
    runs = []

    def program() -> None:
        runs.append(None)
        pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample(f"w_{len(runs)}", dist.Bernoulli(0.5))

    with pytest.raises(StructureChangedError, match=r"'w_2'.*'w_1'"):
        list(iter_outcomes(program))


def test_a_step_that_changes_the_elbo_is_refused() -> None:
    coin_params()
    elbo = TraceBackpropQ_ELBO(num_particles=1)
    with pytest.raises(StructureChangedError, match=r"'critics\..*elbo.eval\(\)"):
        expected_gradient(elbo, coin_model, coin_guide)
    assert_unbiased(elbo.eval(), coin_model, coin_guide)


# Statistics


def test_z_scores_pass_an_unbiased_and_reject_a_biased_estimator() -> None:
    case = BY_NAME["fork"].params()
    exact = exact_gradient(case.model, case.guide)
    torch.manual_seed(0)
    largest = []
    for kind in (Trace_ELBO, HalvedScore):
        elbo = kind(2000, vectorize_particles=True, max_plate_nesting=0)
        found = z_scores(sample_gradients(elbo, case.model, case.guide, num_samples=30), exact)
        largest.append(max(float(z.abs().max()) for z in found.values()))
    assert largest[0] < 5 and largest[1] > 20


def test_z_scores_refuse_a_weak_test() -> None:
    samples = {"a": torch.tensor([1.0, 3.0, 2.5, 1.5])}
    with pytest.raises(AssertionError, match=r"'a'.*Use about \d+ samples instead of 4"):
        z_scores(samples, {"a": torch.tensor(2.0)})
    with pytest.raises(AssertionError, match="zero for all"):
        z_scores(samples, {"a": torch.tensor(0.0)})
    with pytest.raises(AssertionError, match="finite"):
        z_scores({"a": torch.tensor([1.0, math.nan])}, {"a": torch.tensor(1.0)})


def test_z_scores_by_hand() -> None:
    samples = {"a": torch.tensor([[1.0, 2.0], [3.0, 2.0], [1.0, 2.0], [3.0, 2.0]])}
    z = z_scores(samples, {"a": torch.tensor([1.0, 2.0])}, max_relative_error=1.0)["a"]
    assert z.tolist() == pytest.approx([1.0 / (math.sqrt(4 / 3) / 2), 0.0])
    z = z_scores(samples, {"a": torch.tensor([2.0, 2.5])}, max_relative_error=1.0)["a"]
    assert z.tolist() == [0.0, -math.inf]


# TwoPoint


def test_two_point_is_a_distribution() -> None:
    loc, scale = torch.tensor([[0.5], [-1.0]], requires_grad=True), torch.tensor([0.3, 2.0, 1.0])
    fn = TwoPoint(loc, scale).expand([4, 2, 3])
    value = fn.rsample(torch.Size([50]))
    assert value.shape == (50, 4, 2, 3) and fn.has_rsample and value.requires_grad
    torch.testing.assert_close(((value - loc) / scale).abs(), torch.ones(50, 4, 2, 3))
    torch.testing.assert_close(fn.log_prob(value), dist.Normal(loc, scale).expand([4, 2, 3]).log_prob(value))
    torch.testing.assert_close(fn.mean, loc.expand(4, 2, 3))
    torch.testing.assert_close(fn.variance, scale.expand(4, 2, 3) ** 2)
    with pytest.raises(ValueError, match="scale"):
        TwoPoint(torch.zeros(()), -torch.ones(()), validate_args=True)


def test_noise_of_its_own_is_noticed() -> None:
    # Its partner is noise, and what is drawn downstream follows it: a sum over outcomes would be off.
    case = BY_NAME["fork"].params()
    with pytest.raises(StructureChangedError, match="noise of its own"):
        expected_gradient(TraceBackpropQ_ELBO(estimator=DisARM()).eval(), *case.programs)


def test_noise_that_the_first_outcomes_do_not_show_is_no_bias() -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.full((4,), 0.4)).to_event(1))
        pyro.factor("f", z[0] * (2.0 * z[1:].sum()).sin())

    programs = model, lambda: coins_guide(4)
    elbo = stepped(1, TraceBackpropQ_ELBO(1, estimator=DebiasedStraightThrough()), *programs)
    with pytest.raises(StructureChangedError, match="noise of its own"):
        assert_unbiased(elbo.eval(), *programs)


def test_a_number_of_particles_that_was_left_open_is_not_summed_over_for_minutes() -> None:
    case = BY_NAME["fork"].params()
    elbo = stepped(20, TraceBackpropQ_ELBO(), *case.programs)
    with pytest.raises(OptionError, match="8 particles are too many to sum over: write num_particles=1"):
        assert_unbiased(elbo.eval(), *case.programs)


@pytest.mark.parametrize("elbo", [TraceBackpropQ_IWAE(2), RenyiELBO(0, 2)])
def test_a_bound_of_several_samples_is_not_compared_with_the_elbo(elbo: ELBO) -> None:
    with pytest.raises(OptionError, match="has a bound of 2 samples"):
        assert_unbiased(elbo, lambda: None, lambda: None)


def test_sites_that_depend_on_a_summed_value_are_refused() -> None:
    def model() -> None:
        k = pyro.sample("k", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
        if k.item():
            pyro.sample("x", dist.Normal(0.0, 1.0), obs=torch.tensor(0.3))

    with pytest.raises(UnsupportedProgramError, match="Which sites the model has depends on the values of"):
        exact_loss(model, lambda: None)
