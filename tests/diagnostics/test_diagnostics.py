"""Diagnostics: figures that are exact where they can be, and planted faults that must be found."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, CASES, Case
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from steps import CHAIN, assert_equal, settled, state_of, trained

import pyro_bpq
from pyro_bpq import AllAction, CriticLearner, LeaveOneOut, Pathwise, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.diagnostics import compare_estimators, critic_fit, diagnose, gradient_moments
from pyro_bpq.diagnostics.compare import GraphELBO, default_rivals, in_turn, written
from pyro_bpq.diagnostics.comparison import Row, recommend
from pyro_bpq.diagnostics.moments import COSTS
from pyro_bpq.diagnostics.sampling import num_outcomes_of
from pyro_bpq.errors import BPQWarning, OptionError
from pyro_bpq.estimators import DisARM, StraightThrough
from pyro_bpq.estimators.base import SiteContext, SiteTerm
from pyro_bpq.plan import revisions
from pyro_bpq.plan.rules import MOST_PARTICLES
from pyro_bpq.rollout.runs import Program
from pyro_bpq.testing import exact_gradient, expected_moments


@dataclass(frozen=True)
class Declared(ScoreFunction):
    """A score function with the wrong weight that calls itself unbiased, or not."""

    weight: float = 0.8
    is_unbiased: ClassVar[bool] = True

    def __call__(self, context: SiteContext) -> SiteTerm:
        return SiteTerm(self.weight * context.cost * context.score)


@dataclass(frozen=True)
class Admitted(Declared):
    is_unbiased: ClassVar[bool] = False


@dataclass(frozen=True)
class Noisy(ScoreFunction):
    """Adds a constant to the cost: noise and no bias."""

    def __call__(self, context: SiteContext) -> SiteTerm:
        return SiteTerm((context.cost + 1.0) * context.score)


# Moments.


@pytest.mark.parametrize("name", ["chain", "plate_subsample", "discrete_above_reparam", "python_branch", "vector"])
def test_moments_are_those_of_the_step(name: str) -> None:
    case = BY_NAME[name]
    elbo = settled(case, 20, num_particles=1)
    found = gradient_moments(elbo, case.model, case.guide, *case.args)
    assert found.is_exact and found.total_variance_error == 0.0 and elbo.training
    truth = expected_moments(elbo.eval(), case.model, case.guide, *case.args)
    for part in (0, 1):
        for key, value in truth[part].items():
            torch.testing.assert_close((found.mean, found.variance)[part][key], value, rtol=1e-9, atol=1e-10)


def test_summands_of_the_sites_add_up_to_the_gradient() -> None:
    elbo = settled(CHAIN, 20, num_particles=2)
    found = gradient_moments(elbo, CHAIN.model, CHAIN.guide)
    assert set(found.sites) == {"a", "b", "c", COSTS}
    for name, mean in found.mean.items():
        torch.testing.assert_close(sum(part.mean[name] for part in found.sites.values()), mean, rtol=0, atol=1e-12)
    assert sum(found.site_shares().values()) == pytest.approx(1.0)
    # Each site of the chain has a parameter of its own, which no other site's term moves.
    assert found.sites["a"].total_variance == pytest.approx(float(found.variance["qa"].sum()), rel=1e-9)


def test_sampled_moments_agree_with_exact_ones() -> None:
    elbo = settled(CHAIN, 20, num_particles=1)
    exact = gradient_moments(elbo, CHAIN.model, CHAIN.guide)
    sampled = gradient_moments(elbo, CHAIN.model, CHAIN.guide, exact=False, num_samples=200)
    assert sampled.num_samples == 200 and not sampled.is_exact
    assert abs(sampled.total_variance - exact.total_variance) < 4 * sampled.total_variance_error < exact.total_variance
    for name, mean in exact.mean.items():
        assert bool(((sampled.mean[name] - mean).abs() <= 5 * sampled.standard_error[name] + 1e-12).all())
    again = gradient_moments(elbo, CHAIN.model, CHAIN.guide, exact=False, num_samples=200)
    assert_equal(sampled.mean, again.mean)


def test_nothing_changes() -> None:
    elbo = trained(TraceBackpropQ_ELBO(num_particles=2), *CHAIN.programs, params=CHAIN.params, steps=30)
    before = state_of(elbo)
    parameters = {name: value.detach().clone() for name, value in pyro.get_param_store().items()}
    grads = {name: p.unconstrained().grad.clone() for name, p in pyro.get_param_store().items()}
    rng, info = torch.get_rng_state(), elbo.info
    gradient_moments(elbo, CHAIN.model, CHAIN.guide, exact=False, num_samples=5)
    diagnose(elbo, CHAIN.model, CHAIN.guide, num_samples=5, num_outcomes=1)
    compare_estimators(
        *(CHAIN.model, CHAIN.guide),
        estimators={"own": elbo, "disarm": ScoreFunction()},
        **{"num_samples": 4, "num_warmup": 3, "num_rounds": 1, "progress": False, "exact": False},
    )
    assert_equal(state_of(elbo), before)
    assert elbo.training and elbo.info is info and elbo.num_steps == 30
    assert torch.equal(rng, torch.get_rng_state())
    for name, p in pyro.get_param_store().items():
        assert torch.equal(p, parameters[name]) and torch.equal(p.unconstrained().grad, grads[name])


def test_critics_in_the_param_store_stay_what_they_are() -> None:
    elbo = trained(TraceBackpropQ_ELBO(learner=None), *CHAIN.programs, params=CHAIN.params, steps=3)
    before = dict(pyro.get_param_store().named_parameters())
    assert any(name.startswith("bpq_critics") for name in before)
    options = {"num_warmup": 2, "num_rounds": 1, "progress": False}
    found = compare_estimators(CHAIN.model, CHAIN.guide, estimators={"own": elbo}, **options)
    assert found["own"].num_warmup == 0
    after = dict(pyro.get_param_store().named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


def test_moments_of_pyros_elbos_have_no_sites() -> None:
    CHAIN.params()
    found = gradient_moments(TraceGraph_ELBO(), CHAIN.model, CHAIN.guide)
    assert found.is_exact and not found.sites and found.total_variance > 0
    truth = exact_gradient(CHAIN.model, CHAIN.guide)
    for name, value in truth.items():
        torch.testing.assert_close(found.mean[name], value, rtol=0, atol=1e-10)


def test_noise_of_an_estimators_own_is_sampled() -> None:
    case = BY_NAME["fork"]
    case.params()
    elbo = TraceBackpropQ_ELBO(estimator=DisARM())
    assert not gradient_moments(elbo, case.model, case.guide, num_samples=4).is_exact
    with pytest.raises(OptionError, match="noise of its own"):
        gradient_moments(elbo, case.model, case.guide, exact=True)


@pytest.mark.parametrize("options", [{"exact": "no"}, {"num_samples": 1, "exact": False}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    CHAIN.params()
    with pytest.raises(OptionError, match=next(iter(options))):
        gradient_moments(TraceBackpropQ_ELBO(), CHAIN.model, CHAIN.guide, **options)


# Comparison.

QUICK: dict[str, Any] = {"num_warmup": 20, "num_rounds": 2, "progress": False}


def test_comparison_measures_every_estimator(capsys: pytest.CaptureFixture[str]) -> None:
    case = BY_NAME["fork"]
    case.params()
    found = compare_estimators(
        *(case.model, case.guide),
        estimators={
            "default": TraceBackpropQ_ELBO(1),
            "score": ScoreFunction(),
            "graph": TraceGraph_ELBO(),
            "pathwise": Pathwise(),
            "wrong": Declared(),
            "admitted": Admitted(),
        },
        **{**QUICK, "num_particles": 1, "progress": True},
    )
    text = capsys.readouterr()
    assert "Use '" in str(found) and "variance by site" in str(found) and "compare_estimators" in text.err
    names = [row.name for row in found.rows]
    assert set(names) == {"default", "score", "graph", "pathwise", "wrong", "admitted"} and names[-1] == "pathwise"
    times = [row.variance_time for row in found.rows[:-1]]
    assert times == sorted(times)
    # The score function of this package is the one of TraceGraph_ELBO.
    assert found["score"].variance == pytest.approx(found["graph"].variance, rel=1e-9)
    assert found["default"].variance < found["score"].variance
    assert not found["pathwise"].ran and "rsample" in found["pathwise"].note
    for name in ("default", "score", "graph"):
        assert found[name].is_exact and found[name].bias < 1e-10 and not found[name].is_biased
        assert found[name].ms > 0 and found[name].variance_time == found[name].variance * found[name].ms
    assert (found["default"].num_warmup, found["graph"].num_warmup) == (20, 0)
    # A biased estimator that calls itself unbiased is told on.
    assert found["wrong"].is_biased and found["wrong"].claims_unbiased and found["wrong"].relative_bias > 0.01
    assert "'wrong' is biased" in found.reason and "although it is declared unbiased" in found.reason
    assert "BIASED" in str(found) and "none" in str(found)
    assert found["admitted"].is_biased and found.recommended in ("default", "score", "graph")


OURS = ["default", "default, 4 particles", "default, no critic", "leave-one-out"]
ALL = [*OURS, "Trace_ELBO", "Trace_ELBO, 4 particles", "TraceGraph_ELBO", "TraceGraph_ELBO, baselines"]


@pytest.mark.parametrize(("name", "is_few"), [("chain", True), ("vector", True), ("chain", False)])
def test_rivals_are_pyros_own_and_none_is_there_twice(name: str, is_few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME[name]
    case.params()
    if not is_few:
        # As a program of many sites, which keep critics.
        monkeypatch.setattr(revisions, "MANY_SITES", 1)
    before = list(pyro.get_param_store().keys())
    found = compare_estimators(case.model, case.guide, *case.args, **{**QUICK, "num_samples": 60})
    assert list(pyro.get_param_store().keys()) == before
    # Few sites have no critics.
    same = {"default, no critic": "default", "leave-one-out": "default, 4 particles"} if is_few else {}
    assert found.same == same and {row.name for row in found.rows} == set(ALL) - set(same)
    assert list(found) == list(found.rows)
    assert all(found[left_out] == found[kept] for left_out, kept in same.items())
    with pytest.raises(OptionError, match="no estimator 'none such'"):
        found["none such"]
    assert all(row.ran and not row.is_biased for row in found.rows), str(found)
    assert found["leave-one-out"].num_particles == 4 and found["default"].num_particles == MOST_PARTICLES
    assert found["Trace_ELBO"].variance > found["TraceGraph_ELBO, baselines"].variance
    # It is Pyro's own.
    theirs = gradient_moments(TraceGraph_ELBO(), case.model, case.guide, *case.args)
    assert found["TraceGraph_ELBO"].variance == pytest.approx(theirs.total_variance, rel=1e-12)
    text = str(found)
    assert found["default, 4 particles"].num_particles == 4
    write = found["leave-one-out"].write
    assert write.startswith(f"TraceBackpropQ_ELBO(num_particles=4, vectorize_particles=True{'' if is_few else ', est'}")
    # What it names can be written as it stands.
    assert (
        found.recommended is None
        or f" Write {found[found.recommended].write}." in text
        or found.recommended == "default"
    )
    assert "not detected" in text
    assert ("'default' took AllAction() with MLPCritic() at a, b" in text) == (not is_few)
    assert ("'default' took ScoreFunction(baseline=LeaveOneOut()) at" in text) == is_few
    assert ("'default, no critic' is the same as 'default'" in text) == is_few


def test_what_a_comparison_tells_to_write_is_the_rival() -> None:
    for rival in default_rivals(4).values():
        for one in filter(None, (rival, in_turn(rival))):
            elbo, text = one(), written(one)
            again = eval(text, vars(pyro_bpq) | vars(pyro.infer)) if text else elbo
            assert type(again) is type(elbo) and again.num_particles == elbo.num_particles
            if isinstance(elbo, TraceBackpropQ_ELBO):
                assert repr(again) == repr(elbo) and again.vectorize_particles is elbo.vectorize_particles
                assert elbo.vectorize_particles == (in_turn(one) is not None)


def test_an_elbo_that_has_learned_nothing_is_told() -> None:
    case = BY_NAME["chain"]
    case.params()
    elbo = TraceBackpropQ_ELBO()
    assert "untrained" in diagnose(elbo, case.model, case.guide, num_samples=4).kinds()
    elbo.loss_and_grads(case.model, case.guide)
    assert "untrained" not in diagnose(elbo, case.model, case.guide, num_samples=4).kinds()


def test_baselines_of_pyros_are_those_of_the_guide_or_averages() -> None:
    seen, own = [], dict[str, Any]()

    def guide() -> None:
        logits = pyro.param("q", torch.tensor(0.3))
        pyro.sample("z", dist.Bernoulli(logits=logits), infer={"baseline": own})

    def model() -> None:
        pyro.sample("x", dist.Normal(pyro.sample("z", dist.Bernoulli(0.3)), 1.0), obs=torch.tensor(3.0))

    for given in ({}, {"baseline_value": torch.tensor(-5.0)}):
        own.update(given)
        for has in (False, True):
            trained(GraphELBO(has), model, guide, steps=3)
            seen.append(float(pyro.get_param_store()._params["q"].grad))
            assert list(pyro.get_param_store().keys()) == ["q"]
    without, averaged, still_without, valued = seen
    assert without == still_without and len({without, averaged, valued}) == 3


def test_comparison_is_data() -> None:
    CHAIN.params()
    found = compare_estimators(CHAIN.model, CHAIN.guide, **{**QUICK, "estimators": {"default": TraceBackpropQ_ELBO()}})
    assert found.to_dict()["recommended"] == found.recommended
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["name"] for row in rows] == [row.name for row in found.rows]
    assert float(rows[0]["variance of sites a"]) == found.rows[0].sites["a"]


def test_bias_is_found_by_sampling_too() -> None:
    case = BY_NAME["fork"]
    case.params()
    found = compare_estimators(
        *(case.model, case.guide),
        estimators={"score": ScoreFunction(LeaveOneOut()), "wrong": Declared(weight=-1.0)},
        **{**QUICK, "num_outcomes": 1, "num_samples": 60},
    )
    assert "a run of 240 steps" in found.reference
    assert not found["score"].is_exact and found["score"].bias_error > 0 and not found["score"].is_biased
    assert found["wrong"].is_biased and found["wrong"].bias_z > 4


def test_recommendation_weighs_variance_and_time() -> None:
    row = Row("a", variance=2.0, variance_error=0.0, ms=3.0, claims_unbiased=True)
    calm = replace(row, name="b", variance=1.0, ms=30.0)
    wrong = replace(row, name="c", variance=0.1, is_biased=True, relative_bias=0.3)
    straight = replace(row, name="d", variance=0.1, claims_unbiased=False)
    name, reason = recommend((calm, row, wrong, straight))
    assert name == "a" and "5.00 times less than 'b'" in reason and "'b' has less variance" in reason
    assert "'c' is biased by 30.0%" in reason and "'d' is declared biased" in reason
    blind = replace(row, name="e", variance=0.1, claims_unbiased=None, is_blind=True)
    name, reason = recommend((row, blind))
    assert name == "a" and "'e' is left out: Python decides by sampled values" in reason
    tie = replace(row, name="t", ms=3.1, ms_spread=0.5)
    assert "a tie" in recommend((row, tie))[1]
    assert recommend((wrong,))[0] is None


@pytest.mark.parametrize("reads", [True, False])
def test_pyros_graph_elbo_is_not_recommended_where_python_decides(reads: bool) -> None:
    # Too few samples to show its bias.
    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))))

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
        loc = torch.tensor(1.0 if z.item() > 0 else 0.0) if reads else z
        pyro.sample("x", dist.Normal(loc, 1.0), obs=torch.tensor(0.6))

    rivals = {"pyro": TraceGraph_ELBO(), "ours": ScoreFunction(), "plain": Trace_ELBO()}
    options = {**QUICK, "num_warmup": 1, "num_samples": 2, "exact": False}
    found = compare_estimators(model, guide, estimators=rivals, **options)
    assert [row.name for row in found.rows if row.is_blind] == (["pyro"] if reads else [])
    assert not reads or found.recommended != "pyro"


def test_things_that_are_no_estimators_are_refused() -> None:
    for given in ({"x": 3}, {"x": ScoreFunction}, {}):
        with pytest.raises(OptionError):
            compare_estimators(CHAIN.model, CHAIN.guide, estimators=given)


# Diagnosis: a sound training, and one planted fault after the other.

STEPS = 220


def kinds_of(elbo: TraceBackpropQ_ELBO, case: Case, **options: Any) -> frozenset[str]:
    return diagnose(elbo, case.model, case.guide, *case.args, **{"num_samples": 60, **options}).kinds()


def test_sound_training_has_no_warnings() -> None:
    elbo = settled(CHAIN, STEPS, num_particles=2, estimator=AllAction(exact=False))
    found = diagnose(elbo, CHAIN.model, CHAIN.guide, num_samples=60)
    assert not [finding for finding in found if finding.severity in ("error", "warning")], str(found)
    assert f"after {STEPS} steps" in str(found)
    fits = critic_fit(elbo, CHAIN.model, CHAIN.guide, num_samples=60).sites
    # What the critic of the first site has to give is small, and takes longer.
    assert all(fits[site].difference < 0.5 and fits[site].explained > 0.8 for site in "bc")
    assert all(fit.difference < 1.0 and fit.cosine > 0.9 for fit in fits.values())


def test_useless_critic_is_found() -> None:
    elbo = settled(CHAIN, STEPS, learner=CriticLearner(lr=1e-9), estimator=AllAction(exact=False))
    found = diagnose(elbo, CHAIN.model, CHAIN.guide, num_samples=60)
    assert "critic explains nothing" in found.kinds()
    (finding,) = [finding for finding in found if finding.kind == "critic explains nothing"]
    assert set(finding.sites) == {"a", "b", "c"} and finding.severity == "warning"
    assert "CriticLearner(lr=...)" in str(found)
    fit = critic_fit(elbo, CHAIN.model, CHAIN.guide, num_samples=60).sites["b"]
    assert fit.explained == pytest.approx(0.0, abs=1e-3) and fit.difference == pytest.approx(1.0, abs=1e-3)


def test_fit_is_within_a_data_point_where_rows_are_drawn() -> None:
    case = BY_NAME["global_local_subsample"]
    one, two = (settled(case, 20, num_particles=n) for n in (1, 2))
    case.params()
    options = {"num_samples": 20, "exact": False}
    assert critic_fit(one, case.model, case.guide, *case.args, **options).sites["g"].explained is None
    assert critic_fit(two, case.model, case.guide, *case.args, **options).sites["g"].explained is not None


def test_young_critic_is_only_hinted_at() -> None:
    elbo = settled(CHAIN, 5, learner=CriticLearner(lr=1e-9))
    assert "critic untrained" in kinds_of(elbo, CHAIN) and "critic explains nothing" not in kinds_of(elbo, CHAIN)


def test_critic_with_a_wrong_gradient_is_found() -> None:
    elbo = settled(CHAIN, STEPS, num_particles=1)
    assert "critic gradient" not in kinds_of(elbo, CHAIN)
    with torch.no_grad():
        for weight in elbo.critics.weights().values():
            weight.mul_(-2.0)
    found = diagnose(elbo, CHAIN.model, CHAIN.guide, num_samples=60)
    assert found.kinds() & {"critic gradient", "critic explains nothing"}
    fits = critic_fit(elbo, CHAIN.model, CHAIN.guide, num_samples=60).sites
    assert max(fit.difference for fit in fits.values()) > 1.0


def test_value_that_leaves_torch_is_named() -> None:
    case = BY_NAME["python_branch"]
    found = diagnose(settled(case, 5), case.model, case.guide, num_samples=10)
    (finding,) = [finding for finding in found if finding.kind == "structure not cached"]
    assert finding.sites == ("z",) and finding.severity == "hint" and "torch.where" in finding.advice
    assert "structure not cached" not in kinds_of(settled(CHAIN, 5), CHAIN)


def test_large_support_is_found() -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Categorical(logits=torch.zeros(1000)))
        pyro.sample("x", dist.Normal(z * 0.01, 1.0), obs=torch.tensor(3.0))

    def guide() -> None:
        pyro.sample("z", dist.Categorical(logits=pyro.param("q", torch.linspace(0.0, 1.0, 1000))))

    elbo = TraceBackpropQ_ELBO(num_particles=2)
    elbo.loss_and_grads(model, guide)
    found = diagnose(elbo, model, guide, num_samples=10)
    (finding,) = [finding for finding in found if finding.kind == "support too large"]
    assert finding.sites == ("z",) and "1000 values" in finding.message and "ScoreFunction" in finding.message


def test_model_that_cannot_be_rerun_is_found() -> None:
    runs = []

    def model() -> None:
        runs.append(1)
        z = pyro.sample("z", dist.Bernoulli(0.4))
        # Costs something else in each run.
        pyro.sample("x", dist.Normal(z + len(runs), 1.0), obs=torch.tensor(1.0))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))))

    elbo = TraceBackpropQ_ELBO(1)
    for _ in range(3):
        elbo.loss_and_grads(model, guide)
    assert not elbo.runner.plans.works("flips", elbo.runner.plans.last.key)
    assert "extra run impossible" in diagnose(elbo, model, guide, num_samples=5).kinds()


def test_dominating_site_is_named() -> None:
    def model() -> None:
        for i in range(3):
            z = pyro.sample(f"z{i}", dist.Bernoulli(0.5))
            pyro.sample(f"x{i}", dist.Normal((30.0 if i == 1 else 1.0) * z, 1.0), obs=torch.tensor(1.0))

    def guide() -> None:
        for i in range(3):
            pyro.sample(f"z{i}", dist.Bernoulli(logits=pyro.param(f"q{i}", torch.tensor(0.3))))

    elbo = TraceBackpropQ_ELBO(estimator=ScoreFunction(), critic=None)
    elbo.loss_and_grads(model, guide)
    (finding,) = [f for f in diagnose(elbo, model, guide, num_samples=10) if f.kind == "dominating site"]
    assert finding.sites == ("z1",) and "another estimator" in finding.advice


def test_noise_of_a_site_that_is_summed_is_laid_to_the_sites_before_it() -> None:
    def model() -> None:
        with pyro.plate("rows", 20):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            y = pyro.sample("y", dist.Bernoulli(0.3 + 0.4 * z))
            pyro.sample("x", dist.Normal(z + y, 1.0), obs=torch.ones(20))

    def guide() -> None:
        logits = pyro.param("q", torch.zeros(20))
        with pyro.plate("rows", 20):
            z = pyro.sample("z", dist.Bernoulli(logits=logits))
            pyro.sample("y", dist.Bernoulli(logits=logits + z))

    elbo = TraceBackpropQ_ELBO(num_particles=1)
    for _ in range(40):
        elbo.loss_and_grads(model, guide)
    found = {f.sites: f for f in diagnose(elbo, model, guide, num_samples=30) if f.kind == "dominating site"}
    assert set(found) == {("y",)} and "All that it costs is summed" in found["y",].advice


def test_biased_and_broken_programs_are_found() -> None:
    case = BY_NAME["fork"]
    case.params()
    elbo = TraceBackpropQ_ELBO(estimator=StraightThrough())
    elbo.loss_and_grads(case.model, case.guide)
    assert "biased estimator" in kinds_of(elbo, case, num_samples=5)

    def model() -> None:
        pyro.sample("z", dist.Bernoulli(0.5))
        pyro.factor("f", torch.tensor(float("nan")))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))))

    with pyro.validation_enabled(False), pytest.warns(BPQWarning, match="factor of site 'f' is NaN"):
        found = diagnose(TraceBackpropQ_ELBO(), model, guide, num_samples=5)
    assert next(iter(found)).kind == "not finite" and next(iter(found)).severity == "error"


def test_gradient_without_a_signal_is_found() -> None:
    def model() -> None:
        pyro.sample("z", dist.Bernoulli(0.4))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(pyro.param("q", torch.tensor(0.4 + shift))))

    found = {}
    for shift in (0.0, 0.3):
        pyro.clear_param_store()
        elbo = TraceBackpropQ_ELBO(estimator=Noisy(), critic=None)
        found[shift] = "noise" in diagnose(elbo, model, guide, num_samples=60, num_outcomes=1).kinds()
    assert found == {0.0: True, 0.3: False}


@pytest.mark.parametrize("case", [c for c in CASES if c.name != "dynamic_sites"], ids=lambda case: case.name)
def test_outcomes_are_counted(case: Case) -> None:
    case.params()
    program = Program(case.model, case.guide, case.args, {})
    count = num_outcomes_of(program, 1)
    # What the model alone draws, and branches that one run does not take, it cannot see.
    unseen = {"model_subsample": 2, "python_branch": 2}
    assert count == unseen.get(case.name, case.num_states)
    assert num_outcomes_of(program, 2) == count**2


def test_diagnose_refuses_other_elbos() -> None:
    with pytest.raises(OptionError, match="Trace_ELBO"):
        diagnose(Trace_ELBO(), CHAIN.model, CHAIN.guide)


@pytest.mark.parametrize(("number", "expected"), [(1, {"second run"}), (2, set())])
def test_a_second_run_is_hinted_at(number: int, expected: set[str]) -> None:
    case = BY_NAME["vector_layers"]
    elbo = settled(case, 3, num_particles=number)
    found = {f.kind for f in diagnose(elbo, case.model, case.guide, *case.args, num_samples=5).findings}
    assert found & {"second run", "one particle"} == expected
