"""What critics see of their scopes: the latest members as they are, the others in one sum; tables see all of them."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import trained

from pyro_bpq import TabularCritic, TraceBackpropQ_ELBO
from pyro_bpq.errors import OptionError
from pyro_bpq.testing import assert_unbiased

SITES = 7


def guide() -> None:
    q, total = pyro.param("q", torch.linspace(-0.5, 0.5, SITES)), torch.zeros(())
    for t in range(SITES):
        total = total + pyro.sample(f"z{t}", dist.Bernoulli(logits=q[t] - 0.3 * total))


def model() -> None:
    total = torch.zeros(())
    for t in range(SITES):
        total = total + (t + 1) * pyro.sample(f"z{t}", dist.Bernoulli(torch.tensor(0.4)))
    pyro.sample("x", dist.Normal(total, 1.0), obs=torch.tensor(9.0))


def train(steps: int = 3, **options: Any) -> TraceBackpropQ_ELBO:
    return trained(TraceBackpropQ_ELBO(num_particles=1, **options), model, guide, steps=steps)


def reads(elbo: TraceBackpropQ_ELBO, site: str) -> tuple[tuple[str, ...], int]:
    assert elbo.plan is not None and elbo.network is not None
    (node,) = elbo.network.q_nodes(site)
    return elbo.plan.layout.members(node)


@pytest.mark.parametrize(("window", "seen", "summed"), [(1, 1, 5), (4, 4, 2), (6, 6, 0), (20, 6, 0)])
def test_a_critic_sees_as_many_as_the_window_holds(window: int, seen: int, summed: int) -> None:
    elbo = train(window=window)
    assert reads(elbo, "z6") == (tuple(f"z{t}" for t in range(6 - seen, 6)), summed)
    assert_unbiased(elbo.eval(), model, guide)


def test_a_table_sees_its_whole_scope() -> None:
    elbo = train(critic=TabularCritic())
    assert reads(elbo, "z6") == (tuple(f"z{t}" for t in range(6)), 0)
    assert 2**6 in {weight.shape[1] for weight in elbo.critics.weights().values()}
    assert_unbiased(elbo.eval(), model, guide)


def test_too_many_joint_states_are_refused() -> None:
    with pytest.raises(OptionError, match=r"64 joint states \(max_cells=32\)"):
        train(critic=TabularCritic(max_cells=32))


@pytest.mark.parametrize("window", [0, -1, 2.0, True, None])
def test_a_window_is_a_positive_integer(window: Any) -> None:
    with pytest.raises(OptionError, match="write a positive integer"):
        TraceBackpropQ_ELBO(window=window)


def test_the_plan_says_what_a_critic_reads() -> None:
    assert "reads z2, z3, z4, z5, the sum of 2 more" in str(train(2).plan)
