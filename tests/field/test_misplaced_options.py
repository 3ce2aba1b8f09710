"""Options at statements that do not read them: each is told where it belongs."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormalMessenger
from steps import stepped, warnings_of
from torch import Tensor

from pyro_bpq import ExpectedCost, ScoreFunction, TraceBackpropQ_ELBO, TraceBackpropQ_IWAE, config_bpq, cost
from pyro_bpq.errors import OptionError

OPTIONS = {"bpq": {"estimator": ScoreFunction()}}


def coin(**infer: Any) -> Tensor:
    return pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))), infer=infer)


def model(at_z: Any = None, at_x: Any = None) -> None:
    z = pyro.sample("z", dist.Bernoulli(0.4), infer=at_z or {})
    pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(0.7), infer=at_x or {})


PLACES: dict[str, Any] = {
    "latent": (lambda: model(at_z=OPTIONS), "z"),
    "observed": (lambda: model(at_x=OPTIONS), "x"),
    "configured": (config_bpq(model, estimator=ScoreFunction()), "z"),
}


@pytest.mark.parametrize("kind", [TraceBackpropQ_ELBO, TraceBackpropQ_IWAE])
@pytest.mark.parametrize(("program", "site"), PLACES.values(), ids=PLACES)
def test_an_option_in_the_model_is_sent_to_the_guide(kind: Any, program: Any, site: str) -> None:
    with pytest.raises(OptionError) as caught:
        kind().loss_and_grads(program, coin)
    text = str(caught.value)
    assert f"Site '{site}'" in text and "in the model" in text
    assert f'pyro.sample("{site}", ..., infer={{"bpq": ...}}) in the guide' in text and "config_bpq(guide, ...)" in text


def test_an_option_of_an_environment_is_sent_to_the_policy() -> None:
    def environment() -> None:
        cost("fee", pyro.sample("z", dist.Bernoulli(0.4), infer=OPTIONS))

    with pytest.raises(OptionError, match="in the environment, where nothing reads it"):
        ExpectedCost().loss_and_grads(environment, coin)


def test_an_option_of_what_only_the_environment_draws_is_read() -> None:
    def environment() -> None:
        coin_of_its_own = pyro.sample("w", dist.Bernoulli(0.4), infer=OPTIONS)
        cost("fee", pyro.sample("z", dist.Bernoulli(0.4)) + coin_of_its_own)

    elbo = stepped(1, ExpectedCost(), environment, coin)
    assert elbo.info["w"]["estimator"] == ScoreFunction()


def test_a_program_that_is_model_and_guide_in_one_keeps_its_options() -> None:
    def smooth() -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0), infer=OPTIONS)
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(0.7))

    elbo = stepped(1, TraceBackpropQ_ELBO(), smooth, AutoNormalMessenger(smooth))
    assert elbo.info["z"]["estimator"] == ScoreFunction()


@pytest.mark.parametrize("key", ["estimator", "critic", "share", "context"])
def test_an_option_beside_its_dictionary_is_told(key: str) -> None:
    value = {"estimator": ScoreFunction(), "critic": False, "share": "z", "context": torch.ones(2)}[key]
    (text,) = warnings_of(model, lambda: coin(**{key: value}), category=Warning)
    assert "Site 'z'" in text and f'infer={{"bpq": {{{key!r}: ...}}}}' in text


def test_keys_of_pyro_are_left_alone() -> None:
    assert not warnings_of(model, lambda: coin(is_auxiliary=False, num_samples=3, prior=None), category=Warning)
