"""Programs that sampled values steer: critics by prefix, baselines across particles, shared critics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import SGD
from steps import coins, repeat, trained, unbiased

from pyro_bpq import (
    BackpropQNetwork,
    CriticLearner,
    LeaveOneOut,
    Replay,
    ScoreFunction,
    SlowTracking,
    StochasticComputationGraph,
    TabularCritic,
    TraceBackpropQ_ELBO,
    config_bpq,
)
from pyro_bpq.critics.bank import average_writes
from pyro_bpq.errors import OptionError
from pyro_bpq.graph.network import sequence_network
from pyro_bpq.step.critic_step import index_features
from pyro_bpq.testing import assert_unbiased

LENGTH = 3


def drawn(logits: torch.Tensor) -> float:
    """A weighted sum of coins, each of which reads the one before; from the second one on a zero is the last."""
    z, total = 0, 0.0
    for t in range(LENGTH):
        z = int(pyro.sample(f"z_{t}", dist.Bernoulli(logits=logits[t, z])))
        total += (t + 1) * z
        if t >= 1 and z == 0:
            break
    return total


def guide() -> None:
    drawn(pyro.param("q", torch.tensor([[0.3, -0.2], [0.5, -0.5], [0.1, 0.2]], dtype=torch.float64)))


def model() -> None:
    total = drawn(pyro.param("p", torch.tensor([0.2, -0.4], dtype=torch.float64)).expand(LENGTH, 2))
    mean = torch.tensor(total, dtype=torch.float64)
    pyro.sample("x", dist.Normal(mean, 1.0), obs=torch.tensor(4.0, dtype=torch.float64))


shared = config_bpq(guide, share="z")


def train(steps: int, program: Callable[..., Any] = guide, **options: Any) -> TraceBackpropQ_ELBO:
    """An ELBO whose critics saw the initial parameters only; with the default's structure there are none."""
    return trained(TraceBackpropQ_ELBO(structure="dynamic", **options), model, program, steps=steps).eval()


EVERYTHING = CriticLearner(
    lr=0.03, steps=2, replay=Replay(capacity=16, batch_size=2), slow=SlowTracking(0.1, guide=True)
)


@pytest.mark.parametrize("learner", [CriticLearner(), EVERYTHING], ids=["default", "everything"])
@pytest.mark.parametrize("program", [guide, shared], ids=["own", "shared"])
@pytest.mark.parametrize("particles", [1, 2])
def test_step_with_critics_is_unbiased(particles: int, program: Callable[..., Any], learner: CriticLearner) -> None:
    elbo = train(40, program, num_particles=particles, learner=learner)
    assert max(float(weight.detach().abs().max()) for weight in elbo.critics.weights().values()) > 0.1
    assert elbo.replay_buffer is None or (len(elbo.replay_buffer) == 16 and elbo.replay_buffer.num_dropped == 0)
    assert_unbiased(elbo, model, program)


def test_critics_persist_where_their_site_is_absent() -> None:
    elbo = train(20)
    keys = {key for block in elbo.critics.blocks.values() if block.critic is not None for key in block.keys}
    assert keys == {"z_0", "z_1", "z_2"}
    blocks = len(elbo.critics.blocks)
    elbo.train()
    svi = SVI(model, guide, SGD({"lr": 0.0}), elbo)
    repeat(20, svi.step)
    assert len(elbo.critics.blocks) == blocks


def test_a_family_shares_one_critic_that_sees_the_index() -> None:
    elbo = train(20, shared)
    # One for the first site, which has no past, and one for all others, however long their past is.
    assert [block.keys for block in elbo.critics.blocks.values() if block.critic is not None] == [("z",), ("z",)]
    assert index_features("z_12") == pytest.approx((2.5649493, 1.2)) and index_features("z") == (0.0, 0.0)


def test_no_table_is_shared_by_pasts_of_any_length() -> None:
    with pytest.raises(OptionError, match=r"Sites \['z'\]: TabularCritic cannot hold .* write critic=MLPCritic"):
        train(1, shared, critic=TabularCritic())


def test_sequence_network_settles_each_cost_at_its_last_variable() -> None:
    graph = StochasticComputationGraph.from_parents(
        {"x": [], "y": ["x"], "w": []}, {"f": ["x"], "g": ["x", "w"], "h": ["y"]}
    )
    network = sequence_network(graph, {"y": ("h",)})
    assert isinstance(network, BackpropQNetwork)
    assert network.rule_text(network.q_node("x")) == "f + Q_y"
    assert network.rule_text(network.q_node("y")) == "Q_w" and network.q_node("y").immediate == ("h",)
    assert network.rule_text(network.q_node("w")) == "g"
    assert network.q_node("w").scope == ("x", "y", "w")


def test_average_writes_takes_the_mean_of_each_row() -> None:
    rows = torch.tensor([0, 0, 2])
    writes = [("b", "mean", rows, torch.tensor([1.0, 3.0, 5.0])), ("b", "mean", None, torch.tensor([4.0, 7.0, 9.0]))]
    ((key, name, rows, value),) = average_writes(writes, {"b": SimpleNamespace(mean=torch.zeros(3))})
    assert (key, name, rows.tolist()) == ("b", "mean", [0, 0, 2, 0, 1, 2])
    torch.testing.assert_close(value, torch.tensor([8.0 / 3.0, 7.0, 7.0])[rows])


def opens_plate(a: Any, c: Any) -> None:
    """Opens a plate at one value of a site only."""
    if pyro.sample("a", dist.Bernoulli(logits=a)).item() > 0:
        with pyro.plate("rows", 2):
            pyro.sample("c", dist.Bernoulli(logits=c))


def drawn_guide() -> None:
    opens_plate(pyro.param("q", torch.tensor(0.3)), pyro.param("r", torch.tensor([0.4, -0.7])))


def drawn_model() -> None:
    opens_plate(torch.tensor(0.4), torch.tensor([-1.4, 0.8]))


def seen_model() -> None:
    """A plate of observations at one value of a site only."""
    is_plate = pyro.sample("a", dist.Bernoulli(0.6)).item() > 0
    with pyro.plate("rows", 2) if is_plate else contextlib.nullcontext():
        obs = torch.tensor([0.3, 0.9]) if is_plate else torch.tensor(2.2)
        pyro.sample("x", dist.Normal(0.5, 1.0), obs=obs)


SERVED = [{}, {"structure": "dynamic"}, {"structure": "dynamic", "estimator": ScoreFunction(LeaveOneOut())}]


@pytest.mark.parametrize("programs", [(drawn_model, drawn_guide), (seen_model, coins("a"))], ids=["drawn", "observed"])
@pytest.mark.parametrize("options", SERVED, ids=["default", "dynamic", "leave-one-out"])
def test_a_plate_in_one_branch_divides_no_particles(programs: tuple[Any, Any], options: dict[str, Any]) -> None:
    """The baseline must not come from those particles only whose later plates are alike."""
    unbiased(TraceBackpropQ_ELBO(num_particles=2, **options), *programs, steps=3)
