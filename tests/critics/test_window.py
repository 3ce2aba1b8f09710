"""What critics see of their scopes: the latest members as they are, the others in one sum; tables see all of them."""

from __future__ import annotations

import itertools
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import trained

from pyro_bpq import ExpectedCost, MLPCritic, TabularCritic, TraceBackpropQ_ELBO, ValueCritic, config_bpq, cost
from pyro_bpq.critics.nets import Critic
from pyro_bpq.errors import OptionError
from pyro_bpq.estimators import LAXQ, Estimator, QProp
from pyro_bpq.graph.network import BackpropQNetwork
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
    # The costs of the last site are known at all its values: its critic would have nothing to learn.
    options = {"immediate": "learned", **options}
    return trained(TraceBackpropQ_ELBO(num_particles=1, **options), model, guide, steps=steps)


def reads(elbo: TraceBackpropQ_ELBO, site: str) -> tuple[tuple[str, ...], int]:
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


def printed(elbo: TraceBackpropQ_ELBO, site: str) -> str:
    """What the network prints of a site's critic, in one line."""
    title, *lines = str(elbo.network).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{site} "))
    own = [lines[start], *itertools.takewhile(lambda line: line.startswith(" "), lines[start + 1 :])]
    return " ".join(line[title.index("critic reads") :] for line in own).rstrip()


@pytest.mark.parametrize(
    ("critic", "window", "text"),
    [
        (MLPCritic(), 2, "z6's value; z4, z5, the sum of 4 more"),
        (MLPCritic(), 6, "z6's value; all 6 others"),
        (TabularCritic(), 2, "table of z6's value; all 6 others"),
    ],
    ids=repr,
)
def test_the_network_says_what_a_critic_reads(critic: Critic, window: int, text: str) -> None:
    elbo = train(2, critic=critic, window=window)
    assert ("reads up to 2 others, the sum of 4 more" in str(elbo.plan)) == ("the sum" in text)
    assert printed(elbo, "z6") == text
    assert printed(elbo, "z0").endswith("z0's value")


REAL = [(LAXQ(), ValueCritic(), "b's value as it is; a"), (QProp(), None, "b's value by its first two powers; a")]


@pytest.mark.parametrize(("estimator", "critic", "text"), REAL, ids=repr)
def test_the_network_says_how_a_continuous_value_is_read(estimator: Estimator, critic: Any, text: str) -> None:
    def policy() -> None:
        m = pyro.param("m", torch.tensor(0.1))
        a = pyro.sample("a", dist.Normal(m, 1.0))
        b = pyro.sample("b", dist.Normal(m + a, 1.0))
        cost("f", (3.0 * a.detach()).round() * b.detach().round())

    elbo = ExpectedCost() if critic is None else ExpectedCost(critic=critic)
    elbo.loss_and_grads(None, config_bpq(policy, estimator=estimator))
    assert printed(elbo, "b") == text


def test_context_and_distribution_are_named() -> None:
    def rows() -> None:
        q, features = pyro.param("q", torch.linspace(-1.0, 1.0, 3)), torch.ones(3, 2)
        with pyro.plate("rows", 3):
            a = pyro.sample("a", dist.Bernoulli(logits=q), infer={"bpq": {"context": features}})
            pyro.sample("b", dist.Bernoulli(logits=q * a), infer={"bpq": {"context": features}})

    def prior() -> None:
        with pyro.plate("rows", 3):
            a, b = (pyro.sample(name, dist.Bernoulli(torch.tensor(0.5))) for name in "ab")
            pyro.factor("f", a * b)

    elbo = trained(TraceBackpropQ_ELBO(immediate="learned"), prior, rows, steps=1)
    assert printed(elbo, "b") == "b's value; a; b's distribution; 2 features of context"


def test_networks_are_equal_whatever_their_critics_read() -> None:
    network = train(2).network
    again = BackpropQNetwork.build(network.graph, immediate=network.immediate)
    assert network.reads and not again.reads and network == again
    assert "critic reads" not in str(again)
