"""Replay: worked case 7 by hand numbers after a change of policy, what a buffer keeps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, bit, irregular, real, sizes
from steps import assert_equal, critic_targets, fresh, is_equal, run, state_of, stepped
from tabular import WORKED, graph_of, set_policy
from torch import Tensor

from pyro_bpq import AllAction, CriticLearner, Replay, TabularCritic, TraceBackpropQ_ELBO
from pyro_bpq.critics.replay_buffer import ReplayBuffer, StoredRollout, held_sites, trainable
from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.objectives.observation import Staged
from pyro_bpq.step.learning import Learning

# Worked case 7: A -> X, A -> Y2; X, B1 -> Y1 -> f1; X, A, B2 -> Y2 -> f2.
F1, F2 = real(1.0, -2.0), real(0.5, 3.0)
Y1, Y2 = real(0.7, -1.1), real(2.0, 0.25)  # Q-values that critics are made equal to
SHAPES = sizes("qa:1 qx:2 qb1:1 qb2:1 qy1:2,2 qy2:2,2,2")
OLD, NEW = (
    {name: irregular(*shape, start=start + i) for i, (name, shape) in enumerate(SHAPES.items())} for start in (0, 20)
)


def program(p: Any) -> dict[str, Tensor]:
    a = bit("a", p("qa").squeeze())
    x = bit("x", p("qx")[a])
    b1, b2 = bit("b1", p("qb1").squeeze()), bit("b2", p("qb2").squeeze())
    return {"y1": bit("y1", p("qy1")[x, b1]), "y2": bit("y2", p("qy2")[x, a, b2])}


def guide() -> None:
    program(lambda name: pyro.param(name))


def model() -> None:
    # The guide's first policy is the prior: under it the divergences are zero.
    values = program(lambda name: OLD[name])
    pyro.factor("f1", -F1[values["y1"]])
    pyro.factor("f2", -F2[values["y2"]])


def case_7(coparents: str = "redrawn", draws: int = 1) -> TraceBackpropQ_ELBO:
    """An ELBO whose critics learn all that lies downstream, as in the paper: only ``log q`` and priors are exact.

    Its rollouts are those of an old policy; the critics of ``y1`` and ``y2`` are known.
    """
    fresh()
    set_policy(OLD)
    replay = Replay(capacity=8, batch_size=1, updates_per_step=0, coparents=coparents, draws=draws)
    learner = CriticLearner(lr=0.3, optimizer=torch.optim.SGD, replay=replay)
    options = {"estimator": AllAction(exact=False), "critic": TabularCritic(), "lam": 0.0, "learner": learner}
    elbo = stepped(40, TraceBackpropQ_ELBO(1, **options), model, guide)
    write(elbo, "y1", Y1)
    write(elbo, "y2", Y2)
    set_policy(NEW)
    return elbo


def write(elbo: TraceBackpropQ_ELBO, name: str, values: Tensor) -> None:
    """Makes a tabular critic equal to given Q-values ``(cells, K)``, by hand."""
    block = next(own for own in elbo.critics.blocks.values() if own.critic is not None and name in own.keys)
    row = block.keys.index(name)
    with torch.no_grad():
        for buffer, number in (("mean", 0.0), ("spread_level", 1.0), ("spread_advantage", 1.0)):
            getattr(block, buffer)[row] = number
        block.critic.table[row, :, 0] = 0.0
        block.critic.table[row, :, 1:] = values


def stage(elbo: TraceBackpropQ_ELBO, stored: StoredRollout, site: str, seed: int) -> Staged:
    held = held_sites(stored.network, site, elbo.trainer.replayer.replay.coparents)
    values = [{name: v for name, v in each.items() if name in held} for each in stored.values]
    return elbo.trainer.replayer._rerun(elbo, stored, values, seed)


def network_7() -> BackpropQNetwork:
    return BackpropQNetwork.build(graph_of(*WORKED["replay"]), "chain", immediate="learned")


def test_worked_case_7_tuples() -> None:
    network = network_7()
    assert network.q_node("x").scope == ("a", "x")
    # The edge from Q_Y2 to Q_A is removed.
    assert network.children("a") == ("x",)
    assert held_sites(network, "x") == {"a", "x"}
    assert held_sites(network, "x", "stored") == {"a", "x", "b1", "b2"}
    assert held_sites(network, "b1", "stored") == {"b1", "x"}
    assert held_sites(network, "a", "stored") == {"a"}


def test_trainable_needs_the_rest_of_what_bears_on_a_target_to_be_redrawn() -> None:
    network = network_7()
    # Held a and x: the co-parents' own Q-functions average over x, which is not redrawn.
    assert {"b1", "b2"}.isdisjoint(trainable(network, {"a", "x"}))
    assert "x" in trainable(network, {"a", "x"}) and "a" not in trainable(network, {"a", "x"})
    assert "x" not in trainable(network, {"a", "x", "b1"})
    assert trainable(network, set()) == {node.name for node in network.learned}


@pytest.mark.parametrize("coparents", ["redrawn", "stored"])
def test_worked_case_7_target_by_hand(coparents: str) -> None:
    elbo = case_7(coparents)
    rollouts = list(elbo.replay_buffer._rollouts)[:8]
    seen = set()
    for seed, stored in enumerate(rollouts * 4):
        staged = stage(elbo, stored, "x", seed)
        now = {name: int(site.value) for name, site in staged.traced[0].run.sites.items()}
        before = {name: int(value) for name, value in stored.values[0].items()}
        assert (now["x"], now["a"]) == (before["x"], before["a"])
        if coparents == "stored":
            assert (now["b1"], now["b2"]) == (before["b1"], before["b2"])
        seen.add((now["b1"], now["b2"]))
        _, target = critic_targets(staged.signals.again(), Learning(0.0, 1.0))["x"]
        assert float(target) == pytest.approx(hand_target(now), abs=1e-12)
    assert len(seen) > 1


def hand_target(now: Mapping[str, int]) -> float:
    """``Q_Y1 + Q_Y2`` in expectation over the children, and their divergences from the prior, which are exact."""
    x, a, b1, b2 = (now[name] for name in ("x", "a", "b1", "b2"))
    y1, y2 = torch.sigmoid(NEW["qy1"][x, b1]), torch.sigmoid(NEW["qy2"][x, a, b2])
    hand = (1 - y1) * Y1[0] + y1 * Y1[1] + (1 - y2) * Y2[0] + y2 * Y2[1]
    hand = hand + divergence(NEW["qy1"][x, b1], OLD["qy1"][x, b1])
    return float(hand + divergence(NEW["qy2"][x, a, b2], OLD["qy2"][x, a, b2]))


def test_several_draws_of_one_tuple() -> None:
    """Equation 15: the loss is the mean of the squared errors at several draws of what lies outside the scope."""
    elbo = case_7(draws=5)
    replayer, plain = elbo.trainer.replayer, elbo.trainer.replayer._loss
    with mock.patch.object(replayer, "_loss", wraps=plain) as loss:
        together = replayer.gradients(elbo, ["x"])
    single = [elbo.critics.gradients(plain(*call.args)) for call in loss.call_args_list]
    moved = 0
    for name, mean in together.items():
        parts = torch.stack([each[name] for each in single])
        torch.testing.assert_close(mean, parts.mean(0), rtol=0.0, atol=1e-12)
        moved += bool((parts != parts[0]).any())
    assert moved and len(single) == 5


@pytest.mark.parametrize(("costs", "runs"), [("called", 3), ("stored", 1)])
def test_only_what_is_redrawn_is_run_several_times(costs: str, runs: int) -> None:
    """With stored costs the critics of a chain hold every site, so that one run tells all."""
    elbo = chain_elbo(capacity=4, batch_size=1, updates_per_step=0, costs=costs, draws=3)
    run(elbo, steps=6)
    replayer = elbo.trainer.replayer
    with mock.patch.object(replayer, "_rerun", wraps=replayer._rerun) as rerun:
        assert elbo.replay() == 1
    seeds = {call.args[-1] for call in rerun.call_args_list}
    assert rerun.call_count == runs == len(seeds)


def divergence(logit: Tensor, prior: Tensor) -> Tensor:
    return torch.distributions.kl_divergence(dist.Bernoulli(logits=logit), dist.Bernoulli(logits=prior))


def test_one_node_at_a_time_leaves_the_others_alone() -> None:
    elbo = case_7()
    before = copy.deepcopy(elbo.critics.weights())
    assert elbo.replay(["x"]) == 1
    sites = set()
    for name, weight in elbo.critics.weights().items():
        keys = elbo.critics.blocks[name.split(".")[0]].keys
        sites |= {key for i, key in enumerate(keys) if not torch.equal(weight[i], before[name][i])}
    assert sites == {"x"}


# The buffer


def chain_elbo(**replay: Any) -> TraceBackpropQ_ELBO:
    """All sites have critics."""
    return TraceBackpropQ_ELBO(estimator=AllAction(exact=False), learner=CriticLearner(replay=Replay(**replay)))


def test_draw_is_uniform() -> None:
    buffer = ReplayBuffer(3)
    for i in range(4):
        buffer.add(StoredRollout(i, None, ({},), ()))  # type: ignore[arg-type]
    drawn = [rollout.key for rollout in buffer.draw(3000, torch.Generator().manual_seed(0))]
    counts = [drawn.count(key) for key in (1, 2, 3)]
    # Three standard errors of a count.
    assert sum(counts) == 3000 and all(abs(count - 1000) < 3 * (3000 * 2 / 9) ** 0.5 for count in counts)
    buffer.drop(buffer.draw(1, torch.Generator())[0])
    for i in range(4, 6):
        buffer.add(StoredRollout(i, None, ({},), ()))  # type: ignore[arg-type]
    assert len(buffer) == 3 and buffer.num_dropped == 1


def test_copies_of_a_buffer_are_empty() -> None:
    buffer = ReplayBuffer(4)
    buffer.add(StoredRollout(0, None, ({},), ()))  # type: ignore[arg-type]
    for twin in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        assert len(twin) == 0 and twin.capacity == 4


def test_replay_draws_nothing_from_global_generators() -> None:
    plain, replayed = TraceBackpropQ_ELBO(1), chain_elbo(capacity=8, updates_per_step=3)
    run(plain, steps=10)
    state = torch.get_rng_state()
    run(replayed, steps=10)
    assert torch.equal(torch.get_rng_state(), state)


def test_replay_leaves_model_and_guide_alone() -> None:
    elbo = chain_elbo(capacity=8, updates_per_step=0)
    run(elbo, steps=8)
    critics, leaves = state_of(elbo.critics), dict(pyro.get_param_store().named_parameters())
    before = {name: (p.detach().clone(), p.grad.clone()) for name, p in leaves.items()}
    elbo.replay(updates=3)
    assert not is_equal(critics, state_of(elbo.critics))
    assert_equal({name: (p.detach(), p.grad) for name, p in leaves.items()}, before)


class Changing:
    """Programs whose structure, or whose number of values, may be changed from outside."""

    name, size = "b", 3

    def sites(self, logits: Tensor, b: Tensor, c: Tensor) -> Tensor:
        first = pyro.sample("a", dist.Categorical(logits=logits))
        second = pyro.sample(self.name, dist.Bernoulli(logits=b * first))
        return first + second + pyro.sample("c", dist.Bernoulli(logits=c * second))

    def model(self) -> None:
        total = self.sites(torch.zeros(self.size), torch.tensor(0.5), torch.tensor(0.3))
        pyro.sample("x", dist.Normal(total, 1.0), obs=torch.tensor(0.3))

    def guide(self) -> None:
        b, c = (pyro.param(name, torch.tensor(0.1)) for name in ("qb", "qc"))
        self.sites(pyro.param(f"q{self.size}", torch.zeros(self.size)), b, c)


@pytest.mark.parametrize("change", [{"name": "other"}, {"size": 2}])
def test_outdated_rollouts_are_dropped(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pyro.set_rng_seed(1)
    program = Changing()
    elbo = stepped(10, chain_elbo(capacity=10, updates_per_step=0), program.model, program.guide)
    with monkeypatch.context() as known:
        known.setattr("pyro_bpq.record.tracer.Tape", None)  # a known structure is not recorded again
        assert elbo.replay(updates=2) == 2 and elbo.replay_buffer.num_dropped == 0
    for name, value in change.items():
        setattr(program, name, value)
    elbo.replay(updates=40)
    buffer = elbo.replay_buffer
    assert buffer.num_dropped > 0 and len(buffer) + buffer.num_dropped == 10
    assert len(buffer) == 0 or "size" in change
    # New rollouts take their place.
    elbo.loss_and_grads(program.model, program.guide)
    assert len(buffer) >= 1


@pytest.mark.parametrize(("name", "site"), [("mask_scale", "z"), ("reordered_guide", "b")])
def test_recorded_replay_has_the_network_of_its_rollout(name: str, site: str) -> None:
    learner = CriticLearner(replay=Replay(updates_per_step=0))
    elbo = stepped(4, TraceBackpropQ_ELBO(num_particles=1, learner=learner), *BY_NAME[name].params().programs)
    elbo.runner.recordings.look_again()
    stored = elbo.replay_buffer._rollouts[0]
    assert stage(elbo, stored, site, 0).signals.layout.network == stored.network


def test_state_dict_leaves_the_rollouts_out_and_continues_otherwise() -> None:
    elbo = chain_elbo(capacity=8, updates_per_step=1)
    run(elbo, steps=8)
    state = copy.deepcopy(elbo.state_dict())
    fresh = chain_elbo(capacity=8, updates_per_step=1)
    fresh.load_state_dict(state)
    assert len(fresh.replay_buffer) == 0 and len(elbo.replay_buffer) == 8
    elbo.trainer.replayer.buffer = ReplayBuffer(8)
    assert_equal(run(fresh, steps=4, seed=3), run(elbo, steps=4, seed=3))
    assert_equal(state_of(fresh), state_of(elbo))


def test_replay_without_a_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="Replay"):
        TraceBackpropQ_ELBO().replay()
