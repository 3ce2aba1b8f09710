"""Particles of programs that cannot run in a plate: exact, independent, and without traces in the user's modules."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import repeat, stepped
from torch import Tensor, nn

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO, TraceBackpropQ_IWAE, cost
from pyro_bpq.rollout.runs import Particles
from pyro_bpq.testing import assert_unbiased, expected_moments

DATA = torch.tensor([[0.3, -1.2], [0.9, 0.4]], dtype=torch.float64)
NUMBER, DRAWS = 8, 500


def hidden(elbo: Any) -> Any:
    """The objective with its particles in a dimension that the program does not see."""
    elbo.particles.change(is_hidden=True)
    return elbo


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, z: Tensor) -> Tensor:
        self.calls += 1.0
        return z


class DeepMarkov:
    """States of two bits over time; ``torch.cat`` and ``z[0]`` take them for those of one particle."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.encoder, self.combiner = nn.RNN(2, 3).double(), nn.Linear(5, 2).double()
        self.transition, self.emitter = nn.Linear(2, 2).double(), nn.Linear(2, 2).double()
        self.counting = Counting()

    def model(self) -> None:
        z = torch.zeros(2)
        for t, own in enumerate(DATA):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=self.transition(z)).to_event(1))
            pyro.sample(f"x_{t}", dist.Normal(self.emitter(z) * (1.0 + z[0]), 1.0).to_event(1), obs=own)

    def guide(self) -> None:
        pyro.module("combiner", self.combiner)
        hidden, z = self.encoder(DATA.flip(0))[0].flip(0), torch.zeros(2)
        for t in range(len(DATA)):
            logits = self.combiner(torch.cat([hidden[t], self.counting(z)]))
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=logits).to_event(1))


def gradient(elbo: TraceBackpropQ_ELBO, programs: DeepMarkov) -> Tensor:
    programs.combiner.zero_grad()
    elbo.loss_and_grads(programs.model, programs.guide)
    return torch.cat([parameter.grad.flatten() for parameter in programs.combiner.parameters()])


def test_gradients_vary_as_the_mean_of_independent_runs() -> None:
    programs, options = DeepMarkov(), {"estimator": ScoreFunction()}
    one = expected_moments(TraceBackpropQ_ELBO(num_particles=1, **options), programs.model, programs.guide)
    mean, variance = (
        torch.cat([part[f"combiner$$${name}"].flatten() for name, _ in programs.combiner.named_parameters()])
        for part in (one.mean, one.variance)
    )
    elbo = hidden(TraceBackpropQ_ELBO(num_particles=NUMBER, **options))
    found = torch.stack(repeat(DRAWS, gradient, elbo, programs))
    deviations = found - mean
    for samples, expected in ((deviations, 0.0 * mean), (deviations**2, variance / NUMBER)):
        error = samples.std(0) / DRAWS**0.5
        assert ((samples.mean(0) - expected).abs() <= 5.0 * error + 1e-12).all()
    # A share of common draws would multiply the variance.
    assert ((deviations**2).mean(0).sum() / (variance / NUMBER).sum()) == pytest.approx(1.0, rel=0.15)


def test_buffers_are_left_as_after_one_run() -> None:
    programs, elbo = DeepMarkov(), hidden(TraceBackpropQ_ELBO(num_particles=NUMBER))
    repeat(3, elbo.loss_and_grads, programs.model, programs.guide)
    assert programs.counting.calls == 3 * len(DATA)


def normalised(is_training: bool) -> Callable[[Tensor], Tensor]:
    layer = nn.BatchNorm1d(1).double().train(is_training)
    return lambda z: layer(z.reshape(-1, 1))[0, 0]


def stated(z: Tensor) -> Tensor:
    cost("c", 0.7 * z[0] * z[1])
    return z[0]


# Programs that read from the left, and whether further particles are computed.
MIXED: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor]], bool]] = {
    "index": (lambda: lambda z: z[0] - z.sum() * z[1], True),
    "memory": (lambda: lambda z: torch.zeros(3).index_put_((torch.tensor(1),), z[0] * z[1]).sum(), True),
    "statistics that are fixed": (lambda: normalised(False), True),
    # What a run writes, draws itself, or hands to functions of the user, is left to runs.
    "statistics of the batch": (lambda: normalised(True), False),
    "cost statement": (lambda: stated, False),
}


def guide() -> None:
    z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor([0.3, -0.5]))).to_event(1))
    pyro.sample("y", dist.Bernoulli(logits=pyro.param("r", torch.tensor(0.2)) + z[1]))


@pytest.mark.parametrize("name", MIXED)
def test_particles_of_programs_that_mix_are_exact(name: str) -> None:
    make, is_hidden = MIXED[name]
    mean = make()

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor([0.1, 0.6])).to_event(1))
        y = pyro.sample("y", dist.Bernoulli(0.4 + 0.2 * z[0]))
        pyro.sample("x", dist.Normal(mean(z) * (1.0 + y), 1.0), obs=torch.tensor(0.7))

    elbo = stepped(3, hidden(TraceBackpropQ_ELBO(num_particles=2)), model, guide)
    assert elbo.particles.now.is_hidden == is_hidden
    assert_unbiased(elbo.eval(), model, guide)


def test_reparameterised_values_lead_on_to_their_laws() -> None:
    """Of ``x = w + b``: ``dL/dm = E[w + b - 0.7] + E[w]`` where the guide draws ``w`` about ``m``."""

    def guide() -> None:
        pyro.sample("b", dist.Bernoulli(0.3))
        pyro.sample("w", dist.Normal(pyro.param("m", torch.tensor(1.0)), 0.5))

    def model() -> None:
        both = torch.cat([pyro.sample("b", dist.Bernoulli(0.6)).reshape(1), torch.zeros(1)])
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(w + both[0], 1.0), obs=torch.tensor(0.7))

    elbo = hidden(TraceBackpropQ_ELBO(num_particles=NUMBER, estimator=ScoreFunction()))

    def slope() -> Tensor:
        elbo.loss_and_grads(model, guide)
        found = pyro.param("m").grad.clone()
        pyro.param("m").grad.zero_()
        return found

    found = torch.stack(repeat(DRAWS, slope))
    assert elbo.particles.now.is_hidden
    assert abs(float(found.mean()) - 1.6) <= 5.0 * float(found.std()) / DRAWS**0.5
    # Particles differ in what they draw.
    assert float(found.var()) == pytest.approx((4.0 * 0.25 + 0.21) / NUMBER, rel=0.3)


def test_a_program_that_begins_to_draw_noise_goes_on_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor([0.1, 0.6])).to_event(1))
        y = pyro.sample("y", dist.Bernoulli(0.4 + 0.2 * z[0]))
        kept = nn.functional.dropout(torch.ones(()), float(os.environ["PYRO_BPQ_TEST_DROPPED"]))
        pyro.factor("x", kept * (z[0] - z.sum() * y))

    monkeypatch.setenv("PYRO_BPQ_TEST_DROPPED", "0")
    elbo = stepped(3, hidden(TraceBackpropQ_ELBO(num_particles=2)), model, guide)
    assert elbo.particles.now.is_hidden
    monkeypatch.setenv("PYRO_BPQ_TEST_DROPPED", "0.5")
    repeat(3, elbo.loss_and_grads, model, guide)
    assert elbo.particles.now == Particles(2)


def test_settled_steps_are_not_recorded() -> None:
    programs, elbo = DeepMarkov(), hidden(TraceBackpropQ_ELBO(num_particles=NUMBER))
    repeat(20, elbo.loss_and_grads, programs.model, programs.guide)
    assert elbo.runner.recordings.num_recorded == 2  # the first one, and after 4 steps


@pytest.mark.parametrize("is_checked", [True, False], ids=["checked", "planted"])
def test_costs_that_change_unseen_are_those_of_the_step(is_checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that changes in many steps counts as a counter, which the key of a recording leaves out."""
    if not is_checked:
        monkeypatch.setattr("pyro_bpq.record.recordings.costs_agree", lambda *_: True)
    weight = [0]

    def model() -> None:
        weight[0] += 1
        z = pyro.sample("z", dist.Bernoulli(torch.full((2,), 0.5)).to_event(1))
        pyro.factor("f", -weight[0] * (1.0 + torch.cat([z, -z]).sum()))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.zeros(2))).to_event(1))

    elbo = hidden(TraceBackpropQ_ELBO(num_particles=NUMBER, estimator=ScoreFunction()))
    losses = {elbo.loss_and_grads(model, guide) - weight[0] for _ in range(30)}
    assert (max(map(abs, losses)) < 1e-9) is is_checked
    bound, runs = hidden(TraceBackpropQ_IWAE(num_particles=NUMBER)), weight[0]
    repeat(30, bound.loss_and_grads, model, guide)
    assert not is_checked or weight[0] - runs == 31  # one of them twice
