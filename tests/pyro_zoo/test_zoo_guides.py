"""Guides that Pyro makes, and programs that are modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.easyguide import EasyGuide
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoGuideList,
    AutoHierarchicalNormalMessenger,
    AutoIAFNormal,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalMessenger,
    AutoRegressiveMessenger,
    AutoStructured,
)
from pyro.infer.autoguide.initialization import init_to_mean
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.optim import Adam, ClippedAdam, ExponentialLR
from torch import Tensor, nn
from zoo import DATA, Tower, coin, see

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO


def continuous(data: Tensor) -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 2.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("rows", len(data)):
        each = pyro.sample("each", dist.Normal(loc, scale))
        see("x", each, data)


GUIDES: dict[str, Callable[[Any], Any]] = {
    "AutoDelta": AutoDelta,
    "AutoHierarchicalNormalMessenger": AutoHierarchicalNormalMessenger,
    "AutoIAFNormal": lambda model: AutoIAFNormal(model, hidden_dim=[16]),
    "AutoLaplaceApproximation": AutoLaplaceApproximation,
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoNormal": AutoNormal,
    "AutoNormal.init_to_mean": lambda model: AutoNormal(model, init_loc_fn=init_to_mean),
    "AutoNormalMessenger": AutoNormalMessenger,
    "AutoRegressiveMessenger": AutoRegressiveMessenger,
    "AutoStructured": AutoStructured,
}


@pytest.mark.parametrize("make", GUIDES.values(), ids=GUIDES)
@pytest.mark.parametrize("particles", [1, 2])
@pytest.mark.parametrize("mode", ["auto", "dense"])
def test_autoguides_train_as_with_trace_elbo(make: Callable[[Any], Any], particles: int, mode: str) -> None:
    losses, params = [], []
    for elbo in (Trace_ELBO(particles), TraceBackpropQ_ELBO(particles, structure=mode)):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        svi = SVI(continuous, make(continuous), Adam({"lr": 0.01}), elbo)
        losses.append([svi.step(DATA) for _ in range(6)])
        params.append({name: value.detach().clone() for name, value in pyro.get_param_store().items()})
    # All sites are reparameterised: the same numbers, step for step.
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    torch.testing.assert_close(params[1], params[0])


def part_discrete(data: Tensor) -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(data)):
        see("x", loc * coin("z", 0.0), data)


def test_list_of_autoguide_and_discrete_guide() -> None:
    def discrete(data: Tensor) -> None:
        with guide.plates["rows"]:
            coin("z", pyro.param("qz", torch.zeros(5)))

    guide = AutoGuideList(part_discrete)
    guide.append(AutoNormal(poutine.block(part_discrete, expose=["loc"])))
    guide.append(discrete)
    svi = SVI(part_discrete, guide, Adam({"lr": 0.05}), TraceBackpropQ_ELBO(num_particles=2))
    losses = [svi.step(DATA) for _ in range(20)]
    assert all(loss == loss for loss in losses)
    assert pyro.param("qz").abs().min() > 0


def test_messenger_with_a_discrete_posterior() -> None:
    class Messenger(AutoNormalMessenger):
        def get_posterior(self, name: str, prior: Any) -> Any:
            if name == "loc":
                return super().get_posterior(name, prior)
            logits = pyro.param("q" + name, torch.zeros(5))
            return dist.Bernoulli(logits=logits + 0.1 * self.upstream_value("loc"))

    elbo = TraceBackpropQ_ELBO()
    svi = SVI(part_discrete, Messenger(part_discrete), Adam({"lr": 0.05}), elbo)
    for _ in range(8):
        svi.step(DATA)
    assert pyro.param("qz").abs().min() > 0
    # The prior's logits are constant, the posterior's read "loc".
    assert elbo.graph.node("z").parents == ("loc",)
    assert set(elbo.graph.cost("-log p(x)").parents) == {"loc", "z"}


def test_easy_guide() -> None:
    class Guide(EasyGuide):
        def guide(self, data: Tensor) -> None:
            self.map_estimate("loc")
            with self.plate("rows", len(data)):
                coin("z", pyro.param("qz", torch.zeros(5)))

    svi = SVI(part_discrete, Guide(part_discrete), Adam({"lr": 0.05}), TraceBackpropQ_ELBO())
    for _ in range(4):
        svi.step(DATA)
    assert pyro.param("qz").abs().min() > 0


class Model(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.noise = PyroParam(torch.tensor(0.8), dist.constraints.positive)
        self.weight = PyroSample(dist.Normal(0.0, 1.0))

    def forward(self, data: Tensor) -> None:
        weight = self.weight
        with pyro.plate("rows", len(data)):
            z = coin("z", 0.2)
            see("x", weight * z + self.tower(data), data, self.noise)


class Guide(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.loc = nn.Parameter(torch.tensor(0.1))

    def forward(self, data: Tensor) -> None:
        pyro.sample("weight", dist.Normal(self.loc, 0.5))
        with pyro.plate("rows", len(data)):
            coin("z", self.tower(data))


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("options", [{}, {"estimator": ScoreFunction()}, {"num_particles": 3}])
def test_modules_with_buffers(is_local: bool, options: dict[str, Any]) -> None:
    with pyro.settings.context(module_local_params=is_local):
        model, guide = Model(), Guide()
        fit = TraceBackpropQ_ELBO(**options)(model, guide)
        fit(DATA)
        optimiser = torch.optim.SGD(fit.parameters(), lr=0.01, momentum=0.5)
        before = {name: value.clone() for name, value in fit.named_parameters()}
        for _ in range(4):
            optimiser.zero_grad()
            fit(DATA).backward()
            nn.utils.clip_grad_norm_(fit.parameters(), 1.0)
            optimiser.step()
        idle = [name for name, value in fit.named_parameters() if torch.equal(value, before[name])]
        assert all("norm" in name or "first" in name for name in idle), idle
        # The extra run of the model that evaluates costs at other values is none of the module's business.
        runs = 5 * options.get("num_particles", 1)
        assert model.tower.norm.num_batches_tracked == runs == guide.tower.norm.num_batches_tracked
        assert bool(pyro.get_param_store().keys()) != is_local


@pytest.mark.parametrize("optimiser", ["per_param", "clipped", "scheduled", "clip_args"])
def test_optimisers_of_pyro(optimiser: str) -> None:
    made = {
        "per_param": lambda: Adam(lambda name: {"lr": 0.1 if "tower" in name else 0.01}),
        "clipped": lambda: ClippedAdam({"lr": 0.01, "clip_norm": 1.0, "lrd": 0.99}),
        "scheduled": lambda: ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.01}, "gamma": 0.9}),
        "clip_args": lambda: Adam({"lr": 0.01}, {"clip_norm": 1.0}),
    }[optimiser]()
    svi = SVI(Model(), Guide(), made, TraceBackpropQ_ELBO())
    first = svi.step(DATA)
    names = set(made.get_state())
    for _ in range(3):
        svi.step(DATA)
        if optimiser == "scheduled":
            made.step()
    assert first == first and set(made.get_state()) == names
    assert not any("critic" in name for name in names)


def test_subprogram_with_hidden_parameters() -> None:
    """Blocked parameters are not stepped."""

    def model() -> None:
        with poutine.block(hide=["kept"]):
            kept = pyro.param("kept", torch.tensor(0.3))
        see("x", coin("z", kept) * pyro.param("mean", torch.tensor(0.5)), 0.7)

    def guide() -> None:
        coin("z", pyro.param("qz", torch.tensor(0.2)))

    svi = SVI(model, guide, Adam({"lr": 0.1}), TraceBackpropQ_ELBO())
    for _ in range(5):
        svi.step()
    assert pyro.param("kept").item() == pytest.approx(0.3)
    assert pyro.param("qz").item() != 0.2
