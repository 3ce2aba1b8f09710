"""A second run as the baseline."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import trained

from pyro_bpq import RunningBaseline, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.estimators import Estimator, SecondRun
from pyro_bpq.testing import sample_gradients

DATA = torch.tensor([10.0, 0.0])


class Layers:
    """Two layers of coins; what a row costs depends on the row as much as ``spread`` says."""

    def __init__(self, spread: float) -> None:
        self.spread, self.runs = spread, 0

    def model(self) -> None:
        self.runs += 1
        with pyro.plate("rows", 2):
            y = pyro.sample("y", dist.Bernoulli(logits=torch.zeros(2)))
            z = pyro.sample("z", dist.Bernoulli(logits=y - 0.5))
            pyro.sample("x", dist.Normal(z + 0.5, 1.0), obs=0.5 + self.spread * DATA)

    def guide(self) -> None:
        with pyro.plate("rows", 2):
            z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("qz", torch.zeros(())).expand(2)))
            pyro.sample("y", dist.Bernoulli(logits=pyro.param("qy", torch.zeros(())) + z))

    def train(self, estimator: Estimator, steps: int = 150) -> TraceBackpropQ_ELBO:
        elbo = TraceBackpropQ_ELBO(estimator=estimator, critic=None)
        return trained(elbo, self.model, self.guide, steps=steps).eval()


def test_no_program_runs_a_second_time() -> None:
    layers = Layers(1.0)
    elbo = layers.train(SecondRun(), 20)
    layers.runs = 0
    elbo.loss_and_grads(layers.model, layers.guide)
    assert layers.runs == 1


@pytest.mark.parametrize(("spread", "low", "high"), [(0.0, -0.3, 0.3), (1.0, 0.9, 1.0)])
def test_the_scale_is_the_share_of_the_data(spread: float, low: float, high: float) -> None:
    state = Layers(spread).train(SecondRun()).state_dict()
    found = {name: next(v for k, v in state.items() if name in k) for name in ("mean", "square", "product")}
    variance, covariance = (found[name] - found["mean"].square() for name in ("square", "product"))
    # The site below reads the data, the one above only what is below it.
    share = float((covariance / variance).flatten()[0])
    assert low <= share <= high


def test_each_component_is_compared_with_its_own_costs_in_the_second_run() -> None:
    data = torch.tensor([[4.0, -3.0], [-4.0, 3.0]])

    def guide() -> None:
        with pyro.plate("rows", 2):
            logits = pyro.param("q", torch.tensor([0.3, -0.4])).expand(2, 2)
            pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))

    def model() -> None:
        with pyro.plate("rows", 2):
            z = pyro.sample("z", dist.Bernoulli(torch.full((2, 2), 0.4)).to_event(1))
            pyro.sample("x", dist.Normal(0.3 * z, 1.0).to_event(1), obs=data)

    def variance(estimator: Estimator) -> float:
        elbo = trained(TraceBackpropQ_ELBO(1, estimator=estimator), model, guide, steps=100).eval()
        return float(sample_gradients(elbo, model, guide, num_samples=400)["q"].var(0).sum())

    # 0.3 and 3.3; without its own costs 17.
    assert variance(SecondRun()) < 0.3 * variance(ScoreFunction(RunningBaseline()))
