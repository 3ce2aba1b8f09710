"""The loss summed over all values: equal to the enumerated loss, and so is its gradient; nothing is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME
from pyro import poutine
from steps import no_gradients, trained
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.plan import plan as particles
from pyro_bpq.testing import TwoPoint, assert_unbiased, exact_gradient, exact_loss

Programs = tuple[Callable[[], Any], Callable[[], Any]]
ROWS = 2


def table(name: str, *shape: int) -> Tensor:
    """A parameter of regular numbers, none of which are alike."""
    number = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return pyro.param(f"w_{name}", (number + sum(map(ord, name))).sin().mul(0.8).reshape(shape))


def seen(name: str, mean: Tensor, value: float = 0.3) -> None:
    pyro.sample(name, dist.Normal(mean, 0.9), obs=torch.full(mean.shape, value, dtype=torch.float64))


def chain() -> Programs:
    """A Markov chain in rows of data, masked and scaled, with another cost at every step."""
    mask = torch.tensor([True, False])

    def states(part: str) -> list[Tensor]:
        law, found, z = table(part, 2, 4, 3), [], None
        for t in range(2):
            with poutine.scale(scale=0.7 + t), poutine.mask(mask=mask if t == 1 else torch.ones(ROWS).bool()):
                z = pyro.sample(f"z_{t}", dist.Categorical(logits=law[t, 3 if z is None else z]))
            found.append(z)
        return found

    def guide() -> None:
        with pyro.plate("rows", ROWS):
            states("q")

    def model() -> None:
        with pyro.plate("rows", ROWS):
            for t, z in enumerate(states("p")):
                with poutine.mask(mask=mask if t == 1 else torch.ones(ROWS).bool()):
                    seen(f"x_{t}", table("mean", 3)[z])

    return model, guide


def kinds() -> Programs:
    """A tree of sites of several kinds and numbers of values, and a factor in the guide."""

    def sites(part: str) -> tuple[Tensor, ...]:
        a = pyro.sample("a", dist.OneHotCategorical(logits=table(f"{part}a", 4)))
        b = pyro.sample("b", dist.Bernoulli(logits=(a * table(f"{part}b", 4)).sum(-1)))
        c = pyro.sample("c", dist.Binomial(2, logits=table(f"{part}c", 2)[b.long()]))
        d = pyro.sample("d", dist.Bernoulli(logits=table(f"{part}d", 2)[b.long()].unsqueeze(-1)).to_event(1))
        return a, b, c, d

    def guide() -> None:
        _, b, *_ = sites("q")
        pyro.factor("fee", 0.4 * b * table("fee", 1)[0], has_rsample=False)

    def model() -> None:
        a, _, c, d = sites("p")
        seen("x", (a * table("mean", 4)).sum(-1))
        seen("y", c * 0.5 + table("shift", 1)[0])
        seen("w", d[..., 0] * 0.7)

    return model, guide


def impossible() -> Programs:
    """Values of no probability: there a cost is infinite, and does not count."""
    never = torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64)

    def last(part: str) -> Tensor:
        z = pyro.sample("z_0", dist.Categorical(logits=table(f"{part}0", 3) + never))
        return pyro.sample("z_1", dist.Categorical(logits=table(f"{part}1", 3, 3)[z] + never))

    return lambda: seen("x", table("mean", 3)[last("p")]), lambda: last("q")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are summed from the second one on."""
    monkeypatch.setattr(particles, "DRAWN_STEPS", (1, 1))


def summing(*programs: Any, params: Any = pyro.clear_param_store) -> TraceBackpropQ_ELBO:
    """An objective after some steps, which sums."""
    elbo = trained(TraceBackpropQ_ELBO(), *programs, params=params, steps=3)
    assert elbo.particles.now.sums, str(elbo)
    return elbo


def test_the_gradient_is_exact_where_rows_are_drawn() -> None:
    case = BY_NAME["plate_subsample"]
    assert_unbiased(summing(*case.programs, params=case.params), *case.programs)


def test_two_precisions_are_summed_together() -> None:
    def guide() -> None:
        with pyro.plate("rows", 3):
            y = pyro.sample("y", dist.Bernoulli(logits=pyro.param("q", torch.zeros(3, dtype=torch.float32))))
            pyro.sample("z", dist.Bernoulli(logits=pyro.param("r", torch.zeros(3).double()) + y))

    def model() -> None:
        with pyro.plate("rows", 3):
            y = pyro.sample("y", dist.Bernoulli(logits=torch.zeros(3, dtype=torch.float32)))
            z = pyro.sample("z", dist.Bernoulli(logits=0.3 * y))
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor([0.3, -0.2, 1.1]))

    elbo = summing(model, guide)
    assert elbo.loss_and_grads(model, guide) == pytest.approx(float(exact_loss(model, guide)), rel=1e-6)


@pytest.mark.parametrize("programs", [chain, kinds, impossible])
def test_the_loss_and_its_gradient_are_exact_and_nothing_is_drawn(programs: Callable[[], Programs]) -> None:
    model, guide = programs()
    elbo = summing(model, guide)
    before = torch.get_rng_state()
    no_gradients()
    loss = elbo.loss_and_grads(model, guide)
    assert torch.equal(before, torch.get_rng_state())
    assert loss == pytest.approx(float(exact_loss(model, guide)), abs=1e-10)
    for name, gradient in exact_gradient(model, guide).items():
        torch.testing.assert_close(pyro.get_param_store()._params[name].grad, gradient, rtol=0.0, atol=1e-10)


def test_a_reparameterised_site_has_one_value_in_all_rows() -> None:
    """All finite sites read it, and a point estimate. The check draws it in place of the generator."""

    def guide() -> None:
        w = pyro.sample("w", TwoPoint(table("w", 1)[0], table("s", 1)[0].exp()))
        v = pyro.sample("v", dist.Delta(table("v", 1)[0]))
        with pyro.plate("rows", ROWS):
            z = pyro.sample("z_0", dist.Bernoulli(logits=table("q0", ROWS) + w))
            pyro.sample("z_1", dist.Categorical(logits=table("q1", 2, 3)[z.long()] * v.unsqueeze(-1)))

    def model() -> None:
        w, v = (pyro.sample(name, dist.Normal(torch.tensor(0.2, dtype=torch.float64), 1.0)) for name in "wv")
        with pyro.plate("rows", ROWS):
            z = pyro.sample("z_0", dist.Bernoulli(logits=w * v))
            z = pyro.sample("z_1", dist.Categorical(logits=table("p1", 2, 3)[z.long()]))
            seen("x", table("mean", 3)[z] * w)

    assert_unbiased(summing(model, guide), model, guide)
