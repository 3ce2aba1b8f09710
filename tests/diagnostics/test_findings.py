"""Findings for newcomers: each on a program that has the fault, and none on one that has not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions.testing.fakes import NonreparameterizedNormal
from pyro.distributions.testing.rejection_gamma import ShapeAugmentedGamma
from steps import CHAIN, settled, trained
from torch import Tensor, nn

from pyro_bpq import AllAction, CriticLearner, LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.diagnostics import Diagnosis, Finding, critic_fit, diagnose

Guide = Callable[..., Any]


def look(model: Guide, guide: Guide, *args: Any, steps: int = 4, samples: int = 8, **options: Any) -> Diagnosis:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    elbo = TraceBackpropQ_ELBO(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(steps):
            elbo.loss_and_grads(model, guide, *args)
        return diagnose(elbo, model, guide, *args, num_samples=samples, num_outcomes=1)


def of_kind(found: Diagnosis, kind: str) -> Finding | None:
    chosen = [finding for finding in found if finding.kind == kind]
    assert len(chosen) <= 1
    return chosen[0] if chosen else None


def coin_model() -> None:
    z = pyro.sample("z", dist.Bernoulli(0.4))
    y = pyro.sample("y", dist.Normal(z, 1.0))
    pyro.sample("x", dist.Normal(z + y, 1.0), obs=torch.tensor(1.0))


def coin_guide(cut: Callable[[Tensor], Tensor]) -> Guide:
    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=cut(pyro.param("q", torch.tensor(0.3)))))
        pyro.sample("y", dist.Normal(pyro.param("m", torch.tensor(0.2)), 1.0))

    return guide


def without_gradient(value: Tensor) -> Tensor:
    with torch.no_grad():
        return 2.0 * value


# Parameters without a gradient.


@pytest.mark.parametrize(
    "cut",
    [lambda q: q.detach(), lambda q: q.data, without_gradient, lambda q: torch.tensor(q.item()), lambda q: 0.1],
    ids=["detach", "data", "no_grad", "item", "unread"],
)
@pytest.mark.parametrize("particles", [1, 2])
def test_parameter_without_a_gradient_is_named(cut: Any, particles: int) -> None:
    found = of_kind(
        look(coin_model, coin_guide(lambda q: torch.as_tensor(cut(q))), num_particles=particles), "no gradient"
    )
    assert found is not None and found.severity == "warning" and found.sites == ("z",)
    assert "'q'" in found.message and "'m'" not in found.message
    assert all(text in found.advice for text in (".detach()", ".data", "torch.no_grad()", "no site reads"))


def test_parameters_with_a_gradient_are_not() -> None:
    found = look(coin_model, coin_guide(lambda q: q))
    assert not found.kinds() & {"no gradient", "zero gradient"}


def test_zero_gradient_of_a_parameter_that_is_read_is_told_apart() -> None:
    found = look(coin_model, coin_guide(lambda q: 0.3 + torch.relu(q - 5.0)))
    hint = of_kind(found, "zero gradient")
    assert hint is not None and "'q'" in hint.message and "'m'" not in hint.message and hint.severity == "hint"
    assert "relu" in hint.advice and "no gradient" not in found.kinds()
    few = look(coin_model, coin_guide(lambda q: 0.3 + torch.relu(q - 5.0)), samples=4)
    assert "zero gradient" not in few.kinds()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.has_gradient):
            hidden = self.unused(x)
        found: Tensor = self.used(hidden)
        return found

    has_gradient = False


@pytest.mark.parametrize("has_gradient", [False, True])
def test_parameters_of_a_module_are_named(has_gradient: bool) -> None:
    net = Net()
    net.has_gradient = has_gradient

    def guide() -> None:
        pyro.module("net", net)
        pyro.sample("z", dist.Bernoulli(logits=net(torch.ones(1))[0]))
        pyro.sample("y", dist.Normal(0.0, 1.0))

    found = of_kind(look(coin_model, guide), "no gradient")
    if has_gradient:
        assert found is None
        return
    assert found is not None and "net$$$unused.weight" in found.message and "net$$$used" not in found.message


class GuideModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.idle = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(0.3))

    def forward(self) -> None:
        pyro.sample("z", dist.Bernoulli(logits=self.q))
        pyro.sample("y", dist.Normal(0.0, 1.0))


def test_idle_parameter_of_a_guide_module_is_named() -> None:
    found = of_kind(look(coin_model, GuideModule()), "no gradient")
    assert found is not None and "'guide.idle'" in found.message and "'guide.q'" not in found.message


def test_parameters_of_the_model_are_left_alone() -> None:
    def model() -> None:
        pyro.param("idle", torch.tensor(1.0))
        coin_model()

    assert not look(model, coin_guide(lambda q: q)).kinds() & {"no gradient", "zero gradient"}


# Advice to run particles in one call.


def row_guide() -> None:
    with pyro.plate("rows", 3):
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor([0.3, -0.2, 0.5]))))
        pyro.sample("y", dist.Bernoulli(0.3 + 0.2 * z))


def row_model(total: Callable[[Tensor], Tensor]) -> Guide:
    def model() -> None:
        with pyro.plate("rows", 3):
            z = pyro.sample("z", dist.Bernoulli(torch.full((3,), 0.4)))
            y = pyro.sample("y", dist.Bernoulli(0.2 + 0.3 * z))
        pyro.sample("x", dist.Normal(total(z + y), 1.0), obs=torch.tensor(1.0))

    return model


VECTORISE = "vectorize_particles=True"


@pytest.mark.parametrize(
    ("total", "reason"),
    [
        (lambda z: z.sum(), "would see the others"),
        (lambda z: z[0] + z[2], "in one call"),
        (lambda z: z.reshape(3).sum(), "fails with several particles"),
        (lambda z: torch.tensor(1.0 if z[..., 0].sum() > 0 else 0.0), "decide in Python"),
        (lambda z: z.sum(-1, keepdim=True)[..., 0:1], ""),
    ],
    ids=["mixes", "indexes", "fails", "steered", "sound"],
)
def test_particles_in_one_call_are_advised_only_where_they_run(total: Any, reason: str) -> None:
    found = of_kind(look(row_model(total), row_guide, num_particles=1), "one particle")
    assert found is not None and "leave-one-out" in found.advice
    assert (VECTORISE in found.advice) == (reason == "")
    assert reason in found.advice


@pytest.mark.parametrize("is_known", [True, False])
def test_a_second_particle_is_not_advised_where_all_costs_are_summed(is_known: bool) -> None:
    def guide() -> None:
        with pyro.plate("rows", 3):
            y = pyro.sample("y", dist.Bernoulli(logits=pyro.param("q", torch.zeros(3))))
            if not is_known:
                pyro.sample("w", dist.Bernoulli(logits=pyro.param("r", torch.zeros(3)) + y))

    def model() -> None:
        with pyro.plate("rows", 3):
            y = pyro.sample("y", dist.Bernoulli(torch.tensor(0.4)))
            if not is_known:
                y = y + pyro.sample("w", dist.Bernoulli(torch.tensor(0.4)))
            pyro.sample("x", dist.Normal(y, 1.0), obs=torch.ones(3))

    found = of_kind(look(model, guide, num_particles=1), "one particle")
    assert (found is None) == is_known
    assert found is None or found.sites == ("y",)


def vector_guide() -> None:
    z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.zeros(30))).to_event(1))
    pyro.sample("y", dist.Bernoulli(logits=pyro.param("r", torch.zeros(30)) + z).to_event(1))


@pytest.mark.parametrize(("is_sound", "expected"), [(True, True), (False, False)])
def test_second_run_is_hinted_at_only_where_particles_run_in_one_call(is_sound: bool, expected: bool) -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.full((30,), 0.4)).to_event(1))
        y = pyro.sample("y", dist.Bernoulli(torch.full((30,), 0.4)).to_event(1))
        total = (z * y).sum(-1) if is_sound else (z * y).reshape(30).sum()
        pyro.sample("x", dist.Normal(total, 1.0), obs=torch.tensor(1.0))

    found = look(model, vector_guide, num_particles=1)
    assert ("second run" in found.kinds()) == expected


# Time.


def wide(rows: int, data: int = 3000) -> tuple[Guide, Guide]:
    """A model whose costs at other values take long, and its guide."""
    weight = torch.randn(rows, data, generator=torch.Generator().manual_seed(0))

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.full((rows,), 0.5)).to_event(1))
        with pyro.plate("data", data):
            pyro.sample("x", dist.Normal(torch.tanh(z.unsqueeze(-2) @ weight).squeeze(-2), 1.0), obs=torch.zeros(data))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.zeros(rows))).to_event(1))

    return model, guide


def test_extra_run_that_takes_most_of_a_step_is_timed() -> None:
    found = of_kind(look(*wide(200), num_particles=1, estimator=AllAction(exact=True)), "slow extra run")
    assert found is not None and found.severity == "hint" and found.sites == ("z",)
    assert "201 values at once" in found.message and " ms)" in found.message
    assert "AllAction(exact=False)" in found.advice and "ScoreFunction(LeaveOneOut())" in found.advice
    assert "num_particles=4" in found.advice


def test_extra_run_of_few_rows_is_not() -> None:
    assert "slow extra run" not in look(*wide(20, 40_000), num_particles=1).kinds()


def test_extra_run_that_is_quick_beside_the_rest_of_a_step_is_not() -> None:
    model, guide = wide(40)
    matrix = torch.randn(900, 900)

    def slow_guide() -> None:
        # Torch takes longer for this than for all rows of the model.
        guide()
        for _ in range(4):
            matrix @ matrix

    found = look(model, slow_guide, num_particles=1)
    assert "slow extra run" not in found.kinds()


def test_timing_leaves_the_elbo_as_it_is() -> None:
    model, guide = wide(200)
    elbo = trained(TraceBackpropQ_ELBO(num_particles=1, estimator=AllAction(exact=True)), model, guide, steps=3)
    ms, info, rng, noises = elbo.ms, elbo.info, torch.get_rng_state(), elbo.num_noises
    particles, nesting = elbo.particles.now, elbo.max_plate_nesting
    gradient = pyro.get_param_store()._params["q"].grad.clone()
    found = diagnose(elbo, model, guide, num_samples=4)
    assert "slow extra run" in found.kinds()
    assert elbo.ms is ms and elbo.info is info and elbo.num_noises == noises and elbo.training
    assert elbo.particles.now == particles and elbo.max_plate_nesting == nesting
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(pyro.get_param_store()._params["q"].grad, gradient)


# Distributions whose rsample is hidden.


def hidden(loc: Tensor) -> Any:
    fn = dist.Normal(loc, 1.0)
    fn.has_rsample = False
    return fn


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda m: NonreparameterizedNormal(m, 1.0), "NonreparameterizedNormal"),
        (hidden, "Normal"),
        (lambda m: NonreparameterizedNormal(m.expand(2), 1.0).to_event(1), "NonreparameterizedNormal"),
        (lambda m: dist.Normal(m, 1.0), None),
        (lambda m: dist.Poisson(m.exp()), None),
        # The score function serves only what rejection sampling leaves over.
        (lambda m: ShapeAugmentedGamma(m.exp(), torch.tensor(1.0)), None),
    ],
    ids=["fake", "attribute", "event", "plain", "poisson", "rejection"],
)
def test_hidden_rsample_is_found(make: Callable[[Tensor], Any], kind: str | None) -> None:
    def model() -> None:
        z = pyro.sample("z", make(torch.tensor(0.5)))
        pyro.sample("x", dist.Normal(z.sum(), 1.0), obs=torch.tensor(1.0))

    def guide() -> None:
        pyro.sample("z", make(pyro.param("m", torch.tensor(0.2))))

    found = of_kind(look(model, guide, num_particles=2), "rsample hidden")
    assert (found is not None) == (kind is not None)
    if found is not None:
        assert found.severity == "warning" and found.sites == ("z",)
        assert f": {kind} can be" in found.message and "pathwise" in found.message


def test_score_function_of_a_users_own_choice_hides_nothing() -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Normal(0.5, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(1.0))

    def guide() -> None:
        infer = {"bpq": {"estimator": ScoreFunction()}}
        pyro.sample("z", dist.Normal(pyro.param("m", torch.tensor(0.2)), 1.0), infer=infer)

    assert "rsample hidden" not in look(model, guide).kinds()


# Pyro's baseline options.


def leftover(make: Callable[[Tensor], Any], rows: int, baseline: Any) -> tuple[Guide, Guide]:
    def model() -> None:
        with pyro.plate("rows", rows):
            z = pyro.sample("z", make(torch.zeros(rows)))
            z = pyro.sample("y", make(torch.zeros(rows))) + z
            z = z if z.shape[-1:] == (rows,) else z.sum(-1)
            pyro.sample("x", dist.Normal(z.float(), 1.0), obs=torch.linspace(-3.0, 5.0, rows))

    def guide() -> None:
        infer = {"baseline": baseline} if baseline else {}
        with pyro.plate("rows", rows):
            pyro.sample("z", make(pyro.param("q", torch.zeros(rows))), infer=infer)
            pyro.sample("y", make(pyro.param("r", torch.zeros(rows))), infer=infer)

    return model, guide


def units(logits: Tensor) -> Any:
    return dist.Bernoulli(logits=logits.unsqueeze(-1).expand(-1, 40)).to_event(1)


AVERAGE = {"use_decaying_avg_baseline": True}


@pytest.mark.parametrize(
    ("make", "rows", "baseline", "particles", "expected"),
    [
        (lambda q: dist.Bernoulli(logits=q), 20, AVERAGE, None, "particles would run in one call"),
        (lambda q: dist.Bernoulli(logits=q), 20, None, None, None),
        (units, 4, AVERAGE, 1, "SecondRun() (many components, one particle: a second run on the same data)"),
        (units, 4, None, 1, None),
        (lambda q: dist.Poisson(q.exp()), 4, AVERAGE, 2, "LeaveOneOut()"),
        # A running mean either way, and options that have no effect.
        (lambda q: dist.Poisson(q.exp()), 4, AVERAGE, 1, None),
        (lambda q: dist.Bernoulli(logits=q), 4, AVERAGE, 1, None),
        (lambda q: dist.Bernoulli(logits=q), 4, AVERAGE, None, "particles would run in one call"),
        (lambda q: dist.Bernoulli(logits=q), 4, None, None, None),
    ],
    ids=["rows", "rows-none", "units", "units-none", "poisson-2", "poisson-1", "few-rows", "few-rows-open", "few-none"],
)
def test_baseline_options_that_stand_in_the_way_are_found(
    make: Any, rows: int, baseline: Any, particles: int | None, expected: str | None
) -> None:
    found = of_kind(look(*leftover(make, rows, baseline), num_particles=particles), "baseline options")
    assert (found is not None) == (expected is not None)
    if found is not None and expected is not None:
        assert found.severity == "hint" and set(found.sites) == {"z", "y"}
        assert expected in found.message and "Remove them" in found.advice


# Critics.


def test_good_critic_without_weight_is_explained() -> None:
    elbo = settled(CHAIN, 220, num_particles=2, estimator=AllAction(exact=False))
    for seen in (False, True):
        found = diagnose(elbo, CHAIN.model, CHAIN.guide, num_samples=60)
        hint = of_kind(found, "good critic unused")
        assert (hint is not None) == seen
        # From now on as if the weights had been found to be of no use.
        for site in ("b", "c"):
            elbo.info[site]["scales"][1:] = 0.0
    assert hint is not None and "b" in hint.sites and "scale at zero" not in found.kinds()
    assert "predicts well" in hint.message and "%)" in hint.message and "makes no use of it" in hint.message


def test_poor_critic_without_weight_is_another_finding() -> None:
    elbo = settled(CHAIN, 220, num_particles=2)
    with torch.no_grad():
        for weight in elbo.critics.weights().values():
            weight.zero_()
    elbo.info["b"]["scales"][1:] = 0.0
    found = diagnose(elbo, CHAIN.model, CHAIN.guide, num_samples=60)
    assert "good critic unused" not in found.kinds()
    warning = of_kind(found, "scale at zero")
    assert warning is not None and warning.sites == ("b",)


def test_shares_have_no_minus_zero() -> None:
    for kind, steps in (("critic untrained", 5), ("critic explains nothing", 220)):
        elbo = settled(CHAIN, steps, learner=CriticLearner(lr=1e-9))
        found = of_kind(diagnose(elbo, CHAIN.model, CHAIN.guide, num_samples=20), kind)
        assert found is not None and "'b' 0%" in found.message and "-0%" not in found.message


def test_fit_says_what_it_compares() -> None:
    CHAIN.params()
    elbo = TraceBackpropQ_ELBO(num_particles=2)
    elbo.loss_and_grads(CHAIN.model, CHAIN.guide)
    text = str(critic_fit(elbo, CHAIN.model, CHAIN.guide, num_samples=5))
    assert "compares the critic's predictions with the costs that then came" in text
    assert "compare the gradient that the critic alone would give with the site's true gradient" in text


def test_sound_program_has_none_of_these_findings() -> None:
    CHAIN.params()
    elbo = TraceBackpropQ_ELBO(num_particles=2, estimator=ScoreFunction(LeaveOneOut()))
    elbo.loss_and_grads(CHAIN.model, CHAIN.guide)
    found = diagnose(elbo, CHAIN.model, CHAIN.guide, num_samples=5).kinds()
    kinds = "no gradient,zero gradient,slow extra run,rsample hidden,baseline options,good critic unused,one particle"
    assert not found & set(kinds.split(","))
