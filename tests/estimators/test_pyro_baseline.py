"""Pyro's baseline options against ``TraceGraph_ELBO``, which they come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceGraph_ELBO
from steps import no_gradients, seeing, trained
from torch import Tensor, nn

from pyro_bpq import AllAction, LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning, OptionError

DATA = torch.tensor([0.3, -0.8, 1.4], dtype=torch.float64)


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(-1)).squeeze(-1)


def make(kind: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """A model and guide whose site ``z`` has a baseline; the parameters are put into a cleared store."""
    pyro.clear_param_store()
    torch.manual_seed(0)
    net = Net()
    shift = pyro.param("shift", torch.tensor(0.4))

    def baseline() -> dict[str, Any]:
        given: dict[str, Any] = {}
        if "net" in kind:
            # A value that needs a gradient itself: the input must be cut off.
            given = {"nn_baseline": net, "nn_baseline_input": shift * DATA}
        if "value" in kind:
            given = {"baseline_value": net(DATA)}
        if "average" in kind:
            given |= {"use_decaying_avg_baseline": True, "baseline_beta": 0.8}
        return given

    def model() -> None:
        g = pyro.sample("g", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 3):
            z = pyro.sample("z", dist.Poisson(pyro.param("rate", torch.tensor(1.2)).abs()))
            pyro.sample("x", dist.Normal(z + g, 0.9), obs=DATA)

    def guide() -> None:
        pyro.module("net", net)
        loc = pyro.param("loc", torch.tensor(0.2))
        # A site that is not reparameterised above the plate: its costs are sums over the rows.
        pyro.sample("g", dist.Normal(loc, 1.0).has_rsample_(False))
        rate = (pyro.param("shift", shift) * DATA + 1.5).abs()
        with pyro.plate("rows", 3):
            pyro.sample("z", dist.Poisson(rate), infer={"baseline": baseline()})

    return model, guide


def gradients(elbo: Any, kind: str, steps: int = 1, seed: int = 3) -> dict[str, Tensor]:
    model, guide = make(kind)
    pyro.set_rng_seed(seed)
    for _ in range(steps):
        no_gradients()
        elbo.loss_and_grads(model, guide)
    leaves = dict(pyro.get_param_store().named_parameters())
    return {name: leaf.grad for name, leaf in leaves.items() if not name.startswith("__baseline")}


@pytest.mark.parametrize("kind", ["", "net", "value"])
@pytest.mark.parametrize("particles", [1, 3])
def test_gradients_are_those_of_tracegraph(kind: str, particles: int) -> None:
    ours = TraceBackpropQ_ELBO(particles, estimator=ScoreFunction())
    for seed in range(4):
        found, expected = gradients(ours, kind, seed=seed), gradients(TraceGraph_ELBO(particles), kind, seed=seed)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["average", "average net", "average value"])
def test_first_step_of_the_average_is_that_of_tracegraph(kind: str) -> None:
    ours = TraceBackpropQ_ELBO(estimator=ScoreFunction())
    torch.testing.assert_close(gradients(ours, kind), gradients(TraceGraph_ELBO(), kind))
    again, new = (gradients(elbo, kind, seed=4) for elbo in (ours, TraceBackpropQ_ELBO(estimator=ScoreFunction())))
    assert not torch.equal(again["shift"], new["shift"])


@pytest.mark.parametrize("kind", ["net", "value", "average", "average net"])
def test_default_estimator_honours_the_options(kind: str) -> None:
    found = gradients(TraceBackpropQ_ELBO(critic=None), kind, steps=9)
    plain = gradients(TraceBackpropQ_ELBO(critic=None), "", steps=9)
    assert not torch.equal(found["shift"], plain["shift"])
    assert ("net" in kind or kind == "value") == (found["net$$$weight"] is not None)


def test_evaluation_does_not_ask_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Net, "forward")
    monkeypatch.setattr(nn.Linear, "forward", lambda *_: pytest.fail("asked"))
    elbo = TraceBackpropQ_ELBO()
    elbo.loss(*make("net"))
    with pytest.raises(pytest.fail.Exception):
        elbo.loss_and_grads(*make("net"))


MODEL = seeing(lambda z: z)


def guide_with(**options: Any) -> Callable[[], None]:
    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(pyro.param("q", torch.tensor(0.4))), **options)

    return guide


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nn_baseline": Net()}, "'z'.*nn_baseline_input"),
        ({"nn_baseline": Net(), "nn_baseline_input": DATA, "baseline_value": DATA}, "'z'.*not both"),
        ({"use_decaying_avg_baseline": True, "baseline_beta": 1.0}, "'z'.*baseline_beta"),
        (True, "'z'.*dictionary"),
    ],
)
def test_wrong_options_raise(options: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        TraceBackpropQ_ELBO().loss_and_grads(MODEL, guide_with(infer={"baseline": options}))


@pytest.mark.filterwarnings("ignore:Nothing reads the option baseline")
def test_what_the_site_chooses_itself_comes_first() -> None:
    """Another estimator ignores the baseline, with a warning; a baseline of the site's own estimator stays."""
    value = {"baseline_value": torch.full((), 50.0)}

    def gradient(particles: int = 1, **infer: Any) -> Tensor:
        trained(TraceBackpropQ_ELBO(particles), MODEL, guide_with(infer=infer), steps=1)
        return dict(pyro.get_param_store().named_parameters())["q"].grad

    assert not torch.equal(gradient(baseline=value), gradient())  # a sum over its values without it
    own = {"bpq": {"estimator": AllAction()}}
    with pytest.warns(BPQWarning, match="Nothing reads the option baseline at z: leave it out"):
        gradient(baseline=value, **own)
    assert torch.equal(gradient(baseline=value, **own), gradient(**own))
    own = {"bpq": {"estimator": ScoreFunction(LeaveOneOut())}}
    assert torch.equal(gradient(2, baseline=value, **own), gradient(2, **own))
    own = {"bpq": {"estimator": ScoreFunction()}}
    assert not torch.equal(gradient(baseline=value, **own), gradient(**own))


def test_one_elbo_may_serve_a_site_with_and_without_a_baseline() -> None:
    elbo = TraceBackpropQ_ELBO(estimator=ScoreFunction())
    for kind in ("net", "", "value", "average", "average net", ""):
        found = gradients(elbo, kind)
        assert ("net" in kind or "value" in kind) == (found["net$$$weight"] is not None)
