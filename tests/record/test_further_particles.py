"""Further particles, computed from the recording of the first: they are what single runs would be.

They serve programs that cannot run in a plate, in a dimension that the program does not see.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions.testing.fakes import NonreparameterizedNormal
from steps import WAYS, hidden, repeat, stepped, unbiased
from torch import Tensor, nn
from torch.distributions.transforms import AffineTransform, ExpTransform

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO, TraceBackpropQ_IWAE, cost
from pyro_bpq.errors import BPQWarning
from pyro_bpq.estimators import StraightThrough
from pyro_bpq.record.further import Draws, Hold, LentBuffers, further_particles
from pyro_bpq.record.key import reach
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.record.tracer import trace_run
from pyro_bpq.record.watch import TraceOptions
from pyro_bpq.rollout.runs import Particles
from pyro_bpq.testing import assert_unbiased

NUMBER = 3
OPTIONS_OF_RUN = TraceOptions(TraceBackpropQ_ELBO().planner.choose, num_particles=NUMBER, track=True)
Program = Callable[[], Any]


def param(name: str, *shape: int) -> Tensor:
    return pyro.param(name, lambda: torch.linspace(-0.7, 0.9, torch.Size(shape).numel()).reshape(shape))


# Their records.


def runs_of(model: Program, guide: Program) -> list[TracedRun]:
    call = reach({"model": model, "guide": guide})
    first = trace_run(model, guide, (), {}, replace(OPTIONS_OF_RUN, call=call))
    return [first, *further_particles(first, first.recorded and first.bound(first.recorded, call), NUMBER - 1)]


def alone(model: Program, guide: Program, run: TracedRun) -> TracedRun:
    """The same values in a run of one particle."""
    values = {name: record.value.detach() for name, record in run.run.sites.items()}
    put = Hold({**values, **run.subsamples})
    return trace_run(put(model), put(guide), (), {}, OPTIONS_OF_RUN)


def gradients(total: Tensor) -> list[Tensor | None]:
    leaves = [value for _, value in sorted(pyro.get_param_store().named_parameters())]
    if not total.requires_grad:
        return [None] * len(leaves)
    return list(torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True))


# From what was sampled before, a scalar, and a parameter of three: the distribution of the next site.
KINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "normal": lambda z, w: dist.Normal(z + w, 1.0).to_event(1),
    "gamma": lambda z, w: dist.Gamma(1.5 + z.sigmoid(), w.exp()).to_event(1),
    "categorical": lambda z, w: dist.Categorical(logits=w * z),
    "one_hot": lambda z, w: dist.OneHotCategorical(logits=w * z),
    "poisson": lambda z, w: dist.Poisson((w + 0.1 * z).exp()).to_event(1),
    "moved": lambda z, w: dist.TransformedDistribution(
        dist.Normal(w, 1.0), [AffineTransform(z, 2.0), ExpTransform()]
    ).to_event(1),
    "masked": lambda z, w: dist.Bernoulli(logits=w + z).mask(z > 0.0).to_event(1),
    "mixture": lambda z, w: dist.MixtureSameFamily(dist.Categorical(logits=w), dist.Normal(w * z, 1.0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_particle_has_the_record_of_a_single_run(kind: str) -> None:
    def guide() -> None:
        z = pyro.sample("z", NonreparameterizedNormal(param("loc"), 1.0))
        y = pyro.sample("y", KINDS[kind](z, param("w", 3)))
        with pyro.plate("rows", 4, subsample_size=2) as rows:
            pyro.sample("b", dist.Bernoulli(logits=param("v", 4)[rows] + y.reshape(-1)[0]))

    def model() -> None:
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 2.0))
        y = pyro.sample("y", KINDS[kind](0.5 * z, torch.zeros(3)))
        with pyro.plate("rows", 4, subsample_size=2) as rows, poutine.scale(scale=1.5 + z.sigmoid()):
            b = pyro.sample("b", dist.Bernoulli(logits=0.1 * rows.to(z)))
        # Rows, components and particles would mix here, if there were a dimension of particles.
        pyro.sample("x", dist.Normal(b.sum() + y.double().sum(), 1.0), obs=torch.tensor(0.3))

    pyro.set_rng_seed(4)
    guide()
    runs = runs_of(model, guide)
    assert len({float(run.run.sites["z"].value) for run in runs}) == NUMBER
    for run in runs:
        single = alone(model, guide, run)
        assert run.key == single.key and run.run.costs.keys() == single.run.costs.keys()
        for name, own in single.run.costs.items():
            torch.testing.assert_close(run.run.costs[name], own, rtol=0, atol=1e-12)
        for name in ("z", "y"):
            record, found = single.run.sites[name], run.run.sites[name]
            torch.testing.assert_close(found.fn.log_prob(found.value), record.fn.log_prob(record.value))
            assert (found.score is None) == (record.score is None)
            assert torch.equal(found.value, run.guide_trace.nodes[name]["value"])
            mine, theirs = (gradients(own.fn.log_prob(own.value.detach()).sum()) for own in (found, record))
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_reparameterised_values_have_their_slopes() -> None:
    """Of ``x = w + b`` where the guide draws ``w`` about ``m``, ``dL/dm = w + (w + b - 0.7)``."""

    def guide() -> None:
        pyro.sample("b", dist.Bernoulli(0.3))
        pyro.sample("w", dist.Normal(param("m"), 0.5))

    def model() -> None:
        both = torch.cat([pyro.sample("b", dist.Bernoulli(0.6)).reshape(1), torch.zeros(1)])
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(w + both[0], 1.0), obs=torch.tensor(0.7))

    guide()
    for run in runs_of(model, guide):
        b, w = (run.run.sites[name].value for name in "bw")
        (slope,) = gradients(torch.stack([*run.run.costs.values()]).sum())
        torch.testing.assert_close(slope, (w + (w + b - 0.7)).detach())


# Gradients.


def model_of(mean: Callable[[Tensor], Tensor]) -> Program:
    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor([0.1, 0.6])).to_event(1))
        y = pyro.sample("y", dist.Bernoulli(0.4 + 0.2 * z[0]))
        pyro.sample("x", dist.Normal(mean(z) * (1.0 + y), 1.0), obs=torch.tensor(0.7))

    return model


def guide() -> None:
    z = pyro.sample("z", dist.Bernoulli(logits=param("q", 2)).to_event(1))
    pyro.sample("y", dist.Bernoulli(logits=param("r") + z[1]))


@pytest.mark.parametrize("options", ["default", "leave_one_out", "dynamic", "dense"])
def test_programs_that_cannot_run_in_a_plate_get_them(options: str) -> None:
    model = model_of(torch.sum)
    elbo = TraceBackpropQ_ELBO(**{"num_particles": 2, "vectorize_particles": True, **WAYS[options]})
    with pytest.warns(BPQWarning, match="reads values of other particles"):
        stepped(9, elbo, model, guide)
    # Without recordings they run one after the other.
    assert elbo.particles.now.is_hidden == (options != "dense") and not elbo.particles.now.has_plate
    if options != "dynamic":
        assert_unbiased(elbo.eval(), model, guide)


def normalised(is_training: bool) -> Callable[[Tensor], Tensor]:
    layer = nn.BatchNorm1d(1).double().train(is_training)
    return lambda z: layer(z.reshape(-1, 1))[0, 0]


def stated(z: Tensor) -> Tensor:
    cost("c", 0.7 * z[0] * z[1])
    return z[0]


def called(z: Tensor) -> Tensor:
    cost("c", lambda z: 0.7 * z.prod().item(), z)
    return z[0]


# Programs that read from the left, and whether further particles are computed.
MIXED: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor]], bool]] = {
    "index": (lambda: lambda z: z[0] - z.sum() * z[1], True),
    "memory": (lambda: lambda z: torch.zeros(3).index_put_((torch.tensor(1),), z[0] * z[1]).sum(), True),
    "statistics that are fixed": (lambda: normalised(False), True),
    # What a run writes, draws itself, or hands to functions of the user, is left to runs.
    "statistics of the batch": (lambda: normalised(True), False),
    "cost statement": (lambda: stated, True),
    "function of a cost": (lambda: called, False),
}


@pytest.mark.parametrize("name", MIXED)
def test_particles_of_programs_that_mix_are_exact(name: str) -> None:
    make, is_hidden = MIXED[name]
    model = model_of(make())
    elbo = unbiased(hidden(TraceBackpropQ_ELBO(num_particles=2)), model, guide, steps=3)
    assert elbo.particles.now.is_hidden == is_hidden


# Steps.


def test_buffers_are_left_as_after_one_run_and_settled_steps_are_not_recorded() -> None:
    calls = torch.zeros(())

    def counted(z: Tensor) -> Tensor:
        calls.add_(1.0)
        return z.sum()

    elbo = stepped(20, hidden(TraceBackpropQ_ELBO(num_particles=NUMBER)), model_of(counted), guide)
    assert elbo.particles.now.is_hidden and calls == 20
    assert elbo.runner.recordings.num_recorded == 2  # the first one, and after 4 steps


def test_a_program_that_begins_to_draw_noise_goes_on_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(lambda z: nn.functional.dropout(z, float(os.environ["PYRO_BPQ_TEST_DROPPED"])).sum())
    monkeypatch.setenv("PYRO_BPQ_TEST_DROPPED", "0")
    elbo = stepped(3, hidden(TraceBackpropQ_ELBO(num_particles=2)), model, guide)
    assert elbo.particles.now.is_hidden
    monkeypatch.setenv("PYRO_BPQ_TEST_DROPPED", "0.5")
    repeat(3, elbo.loss_and_grads, model, guide)
    assert elbo.particles.now == Particles(2)


def test_an_estimator_that_attaches_gradients_is_named_where_one_particle_runs() -> None:
    def guide() -> None:
        infer = {"bpq": {"estimator": StraightThrough()}}
        pyro.sample("z", dist.Bernoulli(logits=param("q", 3)).to_event(1), infer=infer)
        pyro.sample("w", dist.Bernoulli(logits=param("r", 20)).to_event(1))

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.full((3,), 0.4)).to_event(1))
        w = pyro.sample("w", dist.Bernoulli(torch.full((20,), 0.4)).to_event(1))
        pyro.factor("f", -((z.sum() - w.sum()) ** 2))

    elbo = stepped(1, TraceBackpropQ_ELBO(), model, guide)
    assert "in one call: StraightThrough() attaches a gradient to the value of 'z'." in str(elbo)


def test_an_operator_that_torch_runs_row_by_row_writes_no_line(capfd: pytest.CaptureFixture[str]) -> None:
    model = model_of(lambda z: nn.functional.multi_margin_loss(z[None], torch.tensor([1])))
    elbo = stepped(2, hidden(TraceBackpropQ_ELBO(num_particles=2)), model, guide)
    assert elbo.particles.now.is_hidden and "batching rule" not in capfd.readouterr().err


def test_costs_that_change_unseen_are_those_of_the_step() -> None:
    """A number that changes in many steps counts as a counter, which the key of a recording leaves out."""
    weight = [0]

    def model() -> None:
        weight[0] += 1
        z = pyro.sample("z", dist.Bernoulli(torch.full((2,), 0.5)).to_event(1))
        pyro.factor("f", -weight[0] * (1.0 + torch.cat([z, -z]).sum()))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.zeros(2))).to_event(1))

    elbo = hidden(TraceBackpropQ_ELBO(num_particles=NUMBER, estimator=ScoreFunction()))
    for _ in range(30):
        assert elbo.loss_and_grads(model, guide) == pytest.approx(weight[0], abs=1e-9)
    bound, runs = hidden(TraceBackpropQ_IWAE(num_particles=NUMBER)), weight[0]
    stepped(30, bound, model, guide)
    assert weight[0] - runs == 31  # one of them twice


def test_buffers_are_put_back_as_the_very_tensors() -> None:
    layer = nn.BatchNorm1d(2)
    own, before = layer.running_mean, layer.running_mean.clone()
    with LentBuffers():
        layer(torch.randn(3, 2))
    draws = Draws([layer])
    layer(torch.randn(3, 2))
    layer.running_mean = torch.ones(2)
    draws.again()
    assert layer.running_mean is own and torch.equal(own, before)
