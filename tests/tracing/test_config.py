"""Options of sites: where they come from, and which one wins."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro_bpq.record.config import SiteOptions, site_options
from steps import trained

from pyro_bpq import (
    AllAction,
    LeaveOneOut,
    LinearCritic,
    MLPCritic,
    Pathwise,
    RunningBaseline,
    ScoreFunction,
    TabularCritic,
    TraceBackpropQ_ELBO,
    config_bpq,
)
from pyro_bpq.errors import OptionError


def model() -> None:
    z = pyro.sample("z", dist.Bernoulli(0.4))
    w = pyro.sample("w", dist.Bernoulli(0.3 + 0.2 * z))
    pyro.sample("x", dist.Normal(z + w, 1.0), obs=torch.tensor(0.7))


def make_guide(**infer: Any) -> Any:
    def guide() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))), infer=infer)
        pyro.sample("w", dist.Bernoulli(logits=z - 0.3))

    return guide


def specs(elbo: TraceBackpropQ_ELBO, guide: Any) -> dict[str, Any]:
    pyro.clear_param_store()
    elbo.loss_and_grads(model, guide)
    return dict(elbo.runner.plans.last.plan.layout.specs)


def test_precedence_is_site_then_config_then_elbo_then_default() -> None:
    site = {"bpq": {"estimator": ScoreFunction(RunningBaseline(0.5))}}
    config, argument = ScoreFunction(RunningBaseline(0.6)), ScoreFunction(RunningBaseline(0.7))
    elbo = TraceBackpropQ_ELBO(estimator=argument)
    guide = config_bpq(make_guide(**site), estimator=config)
    found = specs(elbo, guide)
    assert found["z"].estimator == site["bpq"]["estimator"] and found["w"].estimator == config
    assert specs(TraceBackpropQ_ELBO(estimator=argument), make_guide())["z"].estimator == argument
    assert specs(TraceBackpropQ_ELBO(), make_guide())["z"].estimator == ScoreFunction(LeaveOneOut())
    assert specs(TraceBackpropQ_ELBO(1), make_guide())["z"].estimator == AllAction()


def test_options_of_site_and_config_are_merged() -> None:
    guide = config_bpq(make_guide(bpq={"critic": LinearCritic()}), estimator=AllAction(exact=False))
    found = specs(TraceBackpropQ_ELBO(), guide)
    assert found["z"].critic == LinearCritic() and found["z"].estimator == AllAction(exact=False)
    assert found["w"].critic == MLPCritic()


@pytest.mark.filterwarnings("ignore:Nothing reads the options critic at z")
def test_config_does_not_change_the_guides_own_options() -> None:
    options = {"critic": LinearCritic()}
    specs(TraceBackpropQ_ELBO(), config_bpq(make_guide(bpq=options), estimator=ScoreFunction()))
    assert options == {"critic": LinearCritic()}


def test_inner_config_wins() -> None:
    inner, outer = AllAction(exact=False), AllAction(exact=True)
    found = specs(TraceBackpropQ_ELBO(), config_bpq(config_bpq(make_guide(), estimator=inner), estimator=outer))
    assert found["z"].estimator == inner


def test_config_bpq_is_a_decorator() -> None:
    found = specs(TraceBackpropQ_ELBO(), config_bpq(estimator=ScoreFunction())(make_guide()))
    assert found["w"].estimator == ScoreFunction()


def test_elbos_estimator_leaves_reparameterised_sites_to_pathwise() -> None:
    def normal_model() -> None:
        pyro.sample("z", dist.Normal(0.0, 1.0))

    def guide() -> None:
        pyro.sample("z", dist.Normal(pyro.param("q", torch.tensor(0.3)), 1.0))

    elbo = trained(TraceBackpropQ_ELBO(estimator=ScoreFunction()), normal_model, guide, steps=1)
    (plan,) = elbo.runner.plans.plans.values()
    assert plan.layout.specs["z"].estimator == Pathwise()


def test_critic_false_means_none() -> None:
    found = specs(TraceBackpropQ_ELBO(1), make_guide(bpq={"critic": False}))
    assert found["z"].critic is None and found["w"].critic is not None


def test_pyros_baseline_options_are_those_of_the_score_function() -> None:
    baseline = {"use_decaying_avg_baseline": True, "baseline_beta": 0.8}
    elbo = TraceBackpropQ_ELBO(estimator=ScoreFunction())
    found = specs(elbo, make_guide(baseline=baseline))
    assert found["z"].estimator == ScoreFunction(RunningBaseline(decay=0.8))
    assert found["w"].estimator == ScoreFunction()
    chosen = {"estimator": AllAction()}
    for bpq, other in ((chosen, TraceBackpropQ_ELBO(estimator=ScoreFunction())), ({}, TraceBackpropQ_ELBO(1))):
        found = specs(other, make_guide(baseline=baseline, bpq=bpq))
        assert found["z"].estimator == AllAction()


def test_unknown_baseline_options_raise() -> None:
    with pytest.raises(OptionError, match=r"'z'.*betta"):
        site_options("z", {"baseline": {"use_decaying_avg_baseline": True, "betta": 0.8}})


def test_site_options_of_nothing_are_the_default() -> None:
    assert site_options("z", {}) == SiteOptions() == site_options("z", {"bpq": {}})


def test_shared_critics_have_one_row() -> None:
    def chain(n: int) -> tuple[Any, Any]:
        def model() -> None:
            z = torch.tensor(0.0)
            for i in range(n):
                z = pyro.sample(f"z_{i}", dist.Bernoulli(logits=z - 0.3))
                pyro.sample(f"x_{i}", dist.Normal(z, 1.0), obs=torch.tensor(0.7))

        def guide() -> None:
            z = torch.tensor(0.0)
            for i in range(n):
                options = {"share": "z", "estimator": AllAction(exact=False)}
                fn = dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3)) * z)
                z = pyro.sample(f"z_{i}", fn, infer={"bpq": options})

        return model, guide

    elbo = trained(TraceBackpropQ_ELBO(critic=TabularCritic()), *chain(6), steps=5)
    keys = [block.keys for block in elbo.critics.blocks.values() if block.critic is not None]
    assert keys == [("z",)]


def test_context_reaches_the_critic() -> None:
    options = {"context": torch.tensor([0.3, -1.0, 2.0])}
    elbo = TraceBackpropQ_ELBO(critic=LinearCritic(), estimator=AllAction(exact=False))
    elbo.loss_and_grads(model, make_guide(bpq=options))
    widths = {
        block.keys: next(iter(block.weights().values())).shape[1]
        for block in elbo.critics.blocks.values()
        if block.critic
    }
    assert widths[("z",)] == 3


@pytest.mark.parametrize("given", [AllAction(), 3])
def test_what_is_no_dictionary_is_refused_under_config_bpq_too(given: Any) -> None:
    with pytest.raises(OptionError, match="'z'"):
        specs(TraceBackpropQ_ELBO(), config_bpq(make_guide(bpq=given), estimator=ScoreFunction()))


def test_no_options_under_config_bpq() -> None:
    found = specs(TraceBackpropQ_ELBO(), config_bpq(make_guide(bpq=None), estimator=ScoreFunction()))
    assert found["z"].estimator == ScoreFunction()


@pytest.mark.parametrize(
    ("options", "text"),
    [({"context": [1.0, 2.0]}, "context"), ({"context": torch.tensor(1.0)}, "context"), ({"share": 3}, "share=3")],
)
def test_values_of_the_wrong_kind_name_the_site(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=f"'z'.*{text}"):
        specs(TraceBackpropQ_ELBO(num_particles=1), make_guide(bpq=options))
