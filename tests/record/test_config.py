"""Options of sites: where they come from, and which one wins."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import trained

from pyro_bpq import (
    AllAction,
    LeaveOneOut,
    LinearCritic,
    MLPCritic,
    RunningBaseline,
    ScoreFunction,
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
    return dict(trained(elbo, model, guide, steps=1).runner.plans.last.layout.specs)


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
    # Of two configurations the inner one wins; and it is a decorator.
    guide = config_bpq(estimator=AllAction())(config_bpq(make_guide(), estimator=config))
    assert specs(elbo, guide)["z"].estimator == config


@pytest.mark.filterwarnings("ignore:Nothing reads the options critic at z")
def test_options_of_site_and_config_are_merged_and_stay_as_they_were() -> None:
    options = {"critic": LinearCritic()}
    found = specs(TraceBackpropQ_ELBO(), config_bpq(make_guide(bpq=options), estimator=AllAction(exact=False)))
    assert found["z"].critic == LinearCritic() and found["z"].estimator == AllAction(exact=False)
    assert found["w"].critic == MLPCritic() and options == {"critic": LinearCritic()}
    found = specs(TraceBackpropQ_ELBO(), config_bpq(make_guide(bpq=None), estimator=ScoreFunction()))
    assert found["z"].estimator == ScoreFunction()


def test_critic_false_means_none() -> None:
    found = specs(TraceBackpropQ_ELBO(1), make_guide(bpq={"critic": False}))
    assert found["z"].critic is None and found["w"].critic is not None


def test_pyros_baseline_options_are_those_of_the_score_function() -> None:
    baseline = {"use_decaying_avg_baseline": True, "baseline_beta": 0.8}
    elbo = TraceBackpropQ_ELBO(estimator=ScoreFunction())
    found = specs(elbo, make_guide(baseline=baseline))
    assert found["z"].estimator == ScoreFunction(RunningBaseline(decay=0.8))
    assert found["w"].estimator == ScoreFunction()
    assert specs(TraceBackpropQ_ELBO(1), make_guide(baseline=baseline))["z"].estimator == found["z"].estimator
    bpq = {"estimator": AllAction()}
    assert specs(elbo, make_guide(baseline=baseline, bpq=bpq))["z"].estimator == AllAction()


@pytest.mark.parametrize("given", [AllAction(), 3])
def test_what_is_no_dictionary_is_refused_under_config_bpq_too(given: Any) -> None:
    with pytest.raises(OptionError, match="'z'"):
        specs(TraceBackpropQ_ELBO(), config_bpq(make_guide(bpq=given), estimator=ScoreFunction()))


@pytest.mark.parametrize("options", [{"context": [1.0, 2.0]}, {"context": torch.tensor(1.0)}, {"share": 3}])
def test_values_of_the_wrong_kind_name_the_site(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"'z'.*{next(iter(options))}"):
        specs(TraceBackpropQ_ELBO(num_particles=1), make_guide(bpq=options))
