"""Large Bernoulli values are drawn by their law."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from pyro_bpq.record.watch import draw_bits
from torch.distributions import Distribution

from pyro_bpq import TraceBackpropQ_ELBO

LARGE = 1 << 14


class Counted(dist.Bernoulli):
    """A user's own distribution, whose log-probability torch does not know."""

    def log_prob(self, value):
        return super().log_prob(value)

    def sample(self, sample_shape=()):
        return super().sample(sample_shape)


def statement(fn: Distribution, *args):
    return {"fn": fn, "args": args, "kwargs": {}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_are_drawn_by_their_law(dtype):
    torch.manual_seed(0)
    levels = torch.tensor([0.0, 1e-4, 0.3, 0.5, 0.999, 1.0], dtype=dtype)
    fn = dist.Bernoulli(levels).expand([LARGE, 6]).to_event(2)
    number = 40
    drawn = [draw_bits(statement(fn)) for _ in range(number)]
    assert drawn[0].dtype == dtype
    assert drawn[0].shape == (LARGE, 6)
    mean, count = torch.stack(drawn).mean((0, 1)), number * LARGE
    assert mean[0] == 0.0
    assert mean[-1] == 1.0
    error = (levels * (1.0 - levels) / count).sqrt()[1:-1]
    assert ((mean - levels)[1:-1].abs() < 4.0 * error).all()
    # The same test sees a probability that is off by a hundredth.
    assert not ((mean + 0.01 - levels)[2:-2].abs() < 4.0 * error[1:-1]).all()


def test_impossible_and_rare_bits_are_not_drawn():
    torch.manual_seed(0)
    rare = dist.Bernoulli(logits=torch.tensor([-40.0, 40.0])).expand([1 << 22, 2])
    drawn = draw_bits(statement(rare))
    assert drawn.sum(0).tolist() == [0.0, 1 << 22]


def test_other_draws_are_left_to_torch():
    fair = torch.full((LARGE,), 0.5)
    for fn in (dist.Bernoulli(fair[:9]), Counted(fair), dist.Poisson(fair), dist.Bernoulli(fair).mask(False)):
        assert draw_bits(statement(fn)) is None
    assert draw_bits(statement(dist.Bernoulli(fair.bfloat16()))) is None
    assert draw_bits(statement(dist.Bernoulli(fair), (2,))) is None


def coins(seen):
    """Model and guide of many coins; the model keeps their values."""

    def model():
        seen.append(pyro.sample("z", dist.Bernoulli(torch.full((LARGE,), 0.5)).to_event(1)))

    def guide():
        odds = pyro.param("odds", torch.full((LARGE,), 0.2))
        pyro.sample("z", dist.Bernoulli(logits=odds).to_event(1))

    pyro.clear_param_store()
    return model, guide


def test_a_step_draws_them_from_the_global_generator():
    seen = []
    model, guide = coins(seen)
    elbo = TraceBackpropQ_ELBO(num_particles=1)
    for _ in range(2):
        torch.manual_seed(3)
        elbo.loss(model, guide)
    assert seen[-1].any()
    assert torch.equal(*seen[-2:])
    torch.manual_seed(3)
    SVI(model, guide, Adam({"lr": 1e-3}), elbo).evaluate_loss()
    assert torch.equal(*seen[-2:])
    torch.manual_seed(3)
    assert torch.equal(seen[-1], (torch.rand(LARGE) < torch.full((LARGE,), 0.2).sigmoid()).float())
