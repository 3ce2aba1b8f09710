"""Values that carry more than the model shows: what a guide made of them by the way, or their relaxed value."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from enumerable import enumerable_noise
from models import real
from pyro.infer import Trace_ELBO
from steps import WAYS, bias, from_seed, repeat, stepped, trained
from torch import Tensor, tensor

from pyro_bpq import AllAction, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.estimators import Hindsight
from pyro_bpq.testing import ChoiceNoise


def logits(*values: float) -> Tensor:
    return pyro.param("q", real(*values))


def observed(mean: Tensor, *data: float) -> None:
    pyro.sample("x", dist.Normal(mean, 1.0), obs=real(*data) if len(data) > 1 else tensor(*data))


class Whole:
    """The model reads what the guide made of its only site."""

    hidden: Tensor

    def guide(self) -> None:
        self.hidden = 2.0 * pyro.sample("z", dist.Bernoulli(logits=logits(0.3)[0]))

    def model(self) -> None:
        pyro.sample("z", dist.Bernoulli(0.4))
        observed(self.hidden, 1.3)


class Both(Whole):
    """The model reads its own value, too."""

    def model(self) -> None:
        z = pyro.sample("z", dist.Bernoulli(0.4))
        observed(self.hidden + 0.5 * z, 1.3)
        pyro.sample("y", dist.Normal(z, 1.0), obs=tensor(0.2))


class Two(Whole):
    """Another site is drawn in between."""

    def guide(self) -> None:
        super().guide()
        pyro.sample("b", dist.Bernoulli(logits=pyro.param("r", tensor(0.4)) * self.hidden - 0.2))

    def model(self) -> None:
        z = pyro.sample("z", dist.Bernoulli(0.4))
        observed(self.hidden + pyro.sample("b", dist.Bernoulli(0.2 + 0.5 * z)), 1.3)


class Rows(Whole):
    """In a plate, by a table."""

    def guide(self) -> None:
        with pyro.plate("rows", 2):
            z = pyro.sample("z", dist.Categorical(logits=logits(0.3, 0.1, -0.5)))
        self.hidden = real(0.5, 2.0, -1.0)[z]

    def model(self) -> None:
        with pyro.plate("rows", 2):
            pyro.sample("z", dist.Categorical(real(0.4, 0.3, 0.3)))
            observed(self.hidden, 1.3, -0.3)


class Bits(Whole):
    """A site of many components."""

    def guide(self) -> None:
        self.hidden = 2.0 * pyro.sample("z", dist.Bernoulli(logits=logits(0.3, 0.1, -0.4)).to_event(1)).sum(-1)

    def model(self) -> None:
        pyro.sample("z", dist.Bernoulli(real(0.4, 0.4, 0.4)).to_event(1))
        observed(self.hidden, 1.3)


class Prior(Whole):
    """The model's own distribution of a site reads it."""

    def model(self) -> None:
        pyro.sample("z", dist.Bernoulli(0.2 + 0.3 * self.hidden))
        observed(self.hidden, 1.3)


CASES = [
    *((kind, options) for kind in (Whole, Both, Two, Prior) for options in ("default", "exact", "dense", "MuProp")),
    *((Rows, options) for options in ("default", "exact", "dense")),
    *((Bits, options) for options in ("default", "exact", "MuProp", "slopes")),
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_gradients_are_exact_with_trained_critics(kind: type[Whole], options: str) -> None:
    programs, noise = kind(), ChoiceNoise()
    with enumerable_noise(noise):
        elbo = trained(TraceBackpropQ_ELBO(1, **WAYS[options]), programs.model, programs.guide).eval()
        assert bias(elbo, programs.model, programs.guide, noise=noise) < 1e-10


# Straight-through distributions: the log-probability of a value reads its relaxed one.


def relaxed(logits: Tensor, kind: str) -> Any:
    if kind == "bit":
        return dist.RelaxedBernoulliStraightThrough(tensor(0.5), logits=logits)
    one_hot = dist.RelaxedOneHotCategoricalStraightThrough
    return one_hot(tensor(0.5), logits=torch.stack([logits, -logits, 0.3 * logits], -1))


class Relaxed:
    """The law of a relaxed site reads a binary one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def number(self, z: Tensor) -> Tensor:
        return z if self.kind == "bit" else z[..., 0] - z[..., 1]

    def model(self) -> None:
        a = pyro.sample("a", dist.Bernoulli(tensor(0.4)))
        z = pyro.sample("z", relaxed(2.0 * a - 1.0 + pyro.param("b", tensor(0.3)), self.kind))
        observed(self.number(z) + 0.5 * a, 1.3)

    def guide(self) -> None:
        pyro.sample("z", relaxed(pyro.param("m", tensor(0.5)), self.kind))
        pyro.sample("a", dist.Bernoulli(logits=pyro.param("l", tensor(0.2))))


kinds = pytest.mark.parametrize("kind", ["bit", "one-hot"])


@kinds
def test_programs_of_such_laws_are_not_summed(kind: str) -> None:
    program = Relaxed(kind)
    elbo = stepped(60, TraceBackpropQ_ELBO(), program.model, program.guide)
    assert elbo.plan is not None and not elbo.plan.sums and not elbo.particles.now.sums


@kinds
def test_a_law_at_other_values_reads_what_its_value_carries(kind: str) -> None:
    """The gradient of the logits of ``a`` is exact given ``z``: that of a sum over both values of ``a``, by hand."""
    program, elbo = Relaxed(kind), TraceBackpropQ_ELBO(num_particles=1, estimator=AllAction(exact=True))
    elbo.loss_and_grads(program.model, program.guide)
    kept, logit, loss = elbo.traces[1].nodes["z"]["value"], tensor(0.2, requires_grad=True), torch.zeros(())
    for a in (tensor(0.0), tensor(1.0)):
        log_p = relaxed(2.0 * a - 1.0 + 0.3, kind).log_prob(kept).detach() + dist.Bernoulli(0.4).log_prob(a)
        log_p = log_p + dist.Normal(program.number(kept.detach()) + 0.5 * a, 1.0).log_prob(tensor(1.3))
        log_q = dist.Bernoulli(logits=logit).log_prob(a)
        loss = loss + log_q.exp() * (log_q - log_p)
    loss.backward()
    torch.testing.assert_close(pyro.param("l").grad, logit.grad)


@kinds
@pytest.mark.parametrize("estimator", [None, ScoreFunction()])
def test_losses_are_those_of_pyro(kind: str, estimator: Any) -> None:
    program, elbos = Relaxed(kind), (TraceBackpropQ_ELBO(num_particles=1, estimator=estimator), Trace_ELBO())
    ours, theirs = (from_seed(3, repeat, 6, elbo.loss_and_grads, program.model, program.guide) for elbo in elbos)
    assert ours == pytest.approx(theirs, abs=1e-12)


def test_hindsight_does_not_read_the_law_of_such_a_value() -> None:
    def guide() -> None:
        a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("l", tensor(0.2))))
        pyro.sample("z", relaxed(a + pyro.param("m", tensor(0.5)), "bit"))

    elbo = TraceBackpropQ_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=0, estimator=Hindsight())
    with pytest.warns(BPQWarning, match="the law of 'z', which reads it, is not known"):
        elbo.loss_and_grads(Relaxed("bit").model, guide)
    assert elbo.plan is not None and (elbo.plan.held is None or "a" not in elbo.plan.held.sites)
