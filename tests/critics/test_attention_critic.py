"""``AttentionCritic``: reads every member of a scope, whatever their number; estimators stay unbiased with it."""

from __future__ import annotations

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME
from torch import Tensor

from pyro_bpq import AttentionCritic, CriticLearner, ExpectedCost, MLPCritic, Replay, TraceBackpropQ_ELBO, cost
from pyro_bpq.critics.attention import Members
from pyro_bpq.critics.nets import CriticShape
from pyro_bpq.errors import OptionError
from pyro_bpq.testing import assert_unbiased, exact_gradient, expected_gradient

SHAPE = CriticShape(2, 3, 1, 2, members=(1, 2))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moved(critic: AttentionCritic, shape: CriticShape = SHAPE) -> torch.nn.Module:
    module = critic.build(shape, torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.add_(random(*p.shape, seed=i))
    return module


def members(places: int, seed: int = 0) -> Members:
    values = (random(2, 4, places, 1, seed=seed), random(2, 4, 3, 2, seed=seed + 1))
    return Members(values, tuple(torch.ones(2, part.shape[2], dtype=torch.bool) for part in values))


def test_it_starts_at_zero_and_every_weight_learns() -> None:
    module, context = AttentionCritic().build(SHAPE, torch.Generator().manual_seed(0)).double(), random(2, 4, 3)
    assert not module(context, None, members(5)).any()
    module = moved(AttentionCritic())
    module(context, None, members(5)).square().sum().backward()
    assert all(p.shape[0] == 2 and bool(p.grad.flatten(1).any(1).all()) for p in module.parameters())


def test_places_without_a_member_do_not_matter() -> None:
    module, context = moved(AttentionCritic()), random(2, 4, 3)
    given = members(5)
    longer = members(8, seed=7)
    longer.values[0][:, :, :5] = given.values[0]
    longer.present[0][:, 5:] = False
    longer = longer._replace(values=(longer.values[0], given.values[1]))
    torch.testing.assert_close(module(context, None, longer), module(context, None, given), rtol=0.0, atol=1e-12)
    longer.present[0][:, 5:] = True
    assert not torch.allclose(module(context, None, longer), module(context, None, given))


def test_without_any_member_it_reads_the_context() -> None:
    module, context = moved(AttentionCritic()), random(2, 4, 3)
    none = [
        members(5, seed)._replace(present=(torch.zeros(2, 5, dtype=bool), torch.zeros(2, 3, dtype=bool)))
        for seed in (0, 5)
    ]
    first, second = (module(context, None, each) for each in none)
    assert torch.equal(first, second) and bool(first.isfinite().all())
    assert not torch.equal(first, module(context + 1.0, None, none[0]))


def test_attention_by_hand() -> None:
    """One head of width 1, two members: the weights are those of a softmax over two numbers."""
    module = moved(AttentionCritic(width=1, heads=1, hidden=()), CriticShape(1, 1, 0, 0, members=(1,)))
    weights = {name: [float(x) for x in p.flatten()] for name, p in module.state_dict().items()}
    values, context = [0.3, -0.8], 0.4
    given = Members((torch.tensor(values).reshape(1, 1, 2, 1),), (torch.ones(1, 2, dtype=torch.bool),))
    found = float(module(torch.tensor([[[context]]]), None, given).detach())
    (w, *r), (b,) = weights["embeddings.0"], weights["biases.0"]

    def place(j: int) -> list[float]:
        angles = [2.0 * math.pi * j / wave for wave in (3, 6, 12, 24, 48)]
        return [math.log(1 + j), 1 / (1 + j), *(part for a in angles for part in (math.cos(a), math.sin(a)))]

    raw = [w * v + sum(x * y for x, y in zip(r, place(j), strict=True)) + b for j, v in enumerate(values)]
    hidden = [torch.tensor(x / (1.0 + math.exp(-x))) for x in raw]
    query = context * weights["query"][0] + weights["query_bias"][0]
    score = torch.stack([query * weights["keys"][0] * h for h in hidden]).softmax(0)
    pooled = sum(a * weights["values"][0] * h for a, h in zip(score, hidden, strict=True))
    inputs = (context, pooled, sum(hidden) / 2**0.5)
    hand = sum(x * y for x, y in zip(inputs, weights["head.weights.0"], strict=True)) + weights["head.biases.0"][0]
    assert found == pytest.approx(float(hand), abs=1e-12)


def test_a_number_is_one_hidden_layer() -> None:
    assert AttentionCritic(hidden=32) == AttentionCritic(hidden=(32,))


@pytest.mark.parametrize("options", [{"width": 0}, {"heads": True}, {"hidden": 0}, {"hidden": (0,)}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        AttentionCritic(**options)


# In programs

SITES = 5


def guide() -> None:
    q, total = pyro.param("q", torch.linspace(-0.5, 0.5, SITES)), torch.zeros(())
    for t in range(SITES):
        total = total + pyro.sample(f"z{t}", dist.Bernoulli(logits=q[t] - 0.3 * total))


def model() -> None:
    first = pyro.sample("z0", dist.Bernoulli(torch.tensor(0.4)))
    for t in range(1, SITES):
        pyro.sample(f"z{t}", dist.Bernoulli(torch.tensor(0.4)))
    pyro.factor("f", 3.0 * first)


def trained(critic: Any, steps: int = 8, program: Any = (model, guide), **options: Any) -> TraceBackpropQ_ELBO:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    elbo = TraceBackpropQ_ELBO(num_particles=1, critic=critic, **options)
    for _ in range(steps):
        elbo.loss_and_grads(*program)
    return elbo


def test_it_reads_its_whole_scope_and_stays_unbiased() -> None:
    elbo = trained(AttentionCritic(width=4, hidden=(8,)))
    (node,) = elbo.network.q_nodes("z3")
    assert elbo.plan.layout.members(node) == (tuple(f"z{t}" for t in range(3)), 0)
    assert "critic: AttentionCritic(width=4, hidden=(8,)), reads up to 3 others" in str(elbo.plan)
    weights = elbo.critics.weights()
    assert any("embeddings" in name and bool(w.any()) for name, w in weights.items())
    assert_unbiased(elbo.eval(), model, guide)


@pytest.mark.parametrize("name", ["chain", "diamond", "plate", "global_local", "vector_layers", "reparam_in_plate"])
def test_it_serves_the_programs_of_the_tests(name: str) -> None:
    case = BY_NAME[name]
    case.params()
    elbo = TraceBackpropQ_ELBO(critic=AttentionCritic(width=4, hidden=(4,)), num_particles=2)
    for _ in range(3):
        elbo.loss_and_grads(case.model, case.guide, *case.args)


def lengthy(length: int) -> Any:
    """A policy of ``length`` shared sites, and a cost at its end that reads how many are 1."""

    def policy() -> None:
        q, total, values = pyro.param("q", torch.tensor([0.2, -0.1])), torch.zeros(()), []
        for t in range(length):
            infer = {"bpq": {"share": "z", "context": torch.tensor([float(length - t)])}}
            values.append(pyro.sample(f"z_{t}", dist.Bernoulli(logits=q[0] + q[1] * total), infer=infer))
            total = total + values[-1]
        cost("f", lambda v: float(v.sum() - 0.5 * length) ** 2, torch.stack(values))

    return policy


def test_one_critic_serves_sequences_of_different_lengths() -> None:
    """The weights do not depend on the length: two lengths share one row; with a window each length has its own."""
    rows = {}
    for critic in (AttentionCritic(width=4, hidden=(8,)), MLPCritic()):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        objective = ExpectedCost(critic=critic, num_particles=1, window=20)
        for step in range(8):
            objective.loss_and_grads(None, lengthy(3 + 2 * (step % 2)))
        rows[type(critic)] = sum(block.critic is not None for block in objective.critics.blocks.values())
        if isinstance(critic, AttentionCritic):
            truth = exact_gradient(None, lengthy(3), only_costs=True)
            found = expected_gradient(objective.eval(), None, lengthy(3))
            assert float((found["q"] - truth["q"]).abs().max()) < 1e-10
    assert rows[AttentionCritic] == 1 < rows[MLPCritic]


def test_it_learns_from_replay() -> None:
    elbo = trained(AttentionCritic(width=4, hidden=(4,)), learner=CriticLearner(replay=Replay(capacity=8)))
    assert elbo.replay() == 1
