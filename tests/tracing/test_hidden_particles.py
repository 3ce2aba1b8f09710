"""Further particles, computed from the recording of the first: they are what single runs would be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions.testing.fakes import NonreparameterizedNormal
from steps import repeat
from torch import Tensor
from torch.distributions.transforms import AffineTransform, ExpTransform

from pyro_bpq import LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.record import laws
from pyro_bpq.record.further import further_particles
from pyro_bpq.record.key import reach
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.record.tracer import trace_run
from pyro_bpq.record.watch import TraceOptions
from pyro_bpq.reruns.redraw import Hold
from pyro_bpq.testing import assert_unbiased

NUMBER = 3
OPTIONS_OF_RUN = TraceOptions(TraceBackpropQ_ELBO().planner.choose, num_particles=NUMBER, track=True)
Program = Callable[[], Any]


@pytest.fixture(autouse=True)
def seed() -> None:
    pyro.set_rng_seed(4)


def param(name: str, *shape: int) -> Tensor:
    return pyro.param(name, lambda: torch.linspace(-0.7, 0.9, torch.Size(shape).numel()).reshape(shape))


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


def programs_of(kind: str) -> tuple[Program, Program]:
    make = KINDS[kind]

    def guide() -> None:
        z = pyro.sample("z", NonreparameterizedNormal(param("loc"), 1.0))
        y = pyro.sample("y", make(z, param("w", 3)))
        with pyro.plate("rows", 4, subsample_size=2) as rows:
            pyro.sample("b", dist.Bernoulli(logits=param("v", 4)[rows] + y.reshape(-1)[0]))

    def model() -> None:
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 2.0))
        y = pyro.sample("y", make(0.5 * z, torch.zeros(3)))
        with pyro.plate("rows", 4, subsample_size=2) as rows, poutine.scale(scale=1.5 + z.sigmoid()):
            b = pyro.sample("b", dist.Bernoulli(logits=0.1 * rows.to(z)))
        # Rows, components and particles would mix here, if there were a dimension of particles.
        pyro.sample("x", dist.Normal(b.sum() + y.double().sum(), 1.0), obs=torch.tensor(0.3))

    return model, guide


def hidden(model: Program, guide: Program) -> list[TracedRun]:
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


@pytest.mark.parametrize("kind", KINDS)
def test_each_particle_has_the_record_of_a_single_run(kind: str) -> None:
    model, guide = programs_of(kind)
    guide()
    runs = hidden(model, guide)
    assert len({float(run.run.sites["z"].value) for run in runs}) == NUMBER
    for run in runs:
        single = alone(model, guide, run)
        assert run.key == single.key and run.run.costs.keys() == single.run.costs.keys()
        for name, cost in single.run.costs.items():
            torch.testing.assert_close(run.run.costs[name], cost, rtol=0, atol=1e-12)
        for name in ("z", "y"):
            record, found = single.run.sites[name], run.run.sites[name]
            torch.testing.assert_close(found.fn.log_prob(found.value), record.fn.log_prob(record.value))
            assert (found.score is None) == (record.score is None)
            for mine, theirs in zip(
                gradients(found.fn.log_prob(found.value.detach()).sum()),
                gradients(record.fn.log_prob(record.value.detach()).sum()),
                strict=True,
            ):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
        assert torch.equal(found.value, run.guide_trace.nodes[name]["value"])


def coins_model() -> None:
    z = pyro.sample("z", dist.Bernoulli(torch.tensor([0.1, 0.6])).to_event(1))
    y = pyro.sample("y", dist.Bernoulli(torch.tensor(0.4) + 0.2 * z[0]))
    pyro.sample("x", dist.Normal(z.sum() * (1.0 + y), 1.0), obs=torch.tensor(0.7))


def coins_guide_of_both() -> None:
    z = pyro.sample("z", dist.Bernoulli(logits=param("q", 2)).to_event(1))
    pyro.sample("y", dist.Bernoulli(logits=param("r") + z[1]))


def ready(number: int, **options: Any) -> TraceBackpropQ_ELBO:
    elbo = TraceBackpropQ_ELBO(num_particles=number, vectorize_particles=True, **options)
    with pytest.warns(BPQWarning, match="reads values of other particles"):
        repeat(9, elbo.loss_and_grads, coins_model, coins_guide_of_both)
    # Without recordings they run one after the other.
    assert elbo.particles.now.is_hidden == (options.get("structure") != "dense") and not elbo.particles.now.has_plate
    return elbo.eval()


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "score": {"estimator": ScoreFunction(LeaveOneOut())},
    "dense": {"structure": "dense"},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_of_hidden_particles_are_exact(options: str) -> None:
    assert_unbiased(ready(2, **OPTIONS[options]), coins_model, coins_guide_of_both)


def test_they_are_computed_where_every_step_is_recorded() -> None:
    ready(2, structure="dynamic")


def test_particles_that_share_their_draws_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: all further particles draw the same."""
    elbo, draw = TraceBackpropQ_ELBO(num_particles=3, **OPTIONS["score"]), laws.DrawRows.__call__
    elbo.particles.change(is_hidden=True)
    repeat(3, elbo.loss_and_grads, coins_model, coins_guide_of_both)
    assert_unbiased(elbo.eval(), coins_model, coins_guide_of_both)
    same = lambda rows, *tensors: draw(rows, *tensors)[:1].repeat_interleave(rows.number, 0)  # noqa: E731
    monkeypatch.setattr(laws.DrawRows, "__call__", same)
    with pytest.raises(AssertionError, match="is biased"):
        assert_unbiased(elbo, coins_model, coins_guide_of_both)
