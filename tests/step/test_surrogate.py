"""A step is a function: the same arguments give the same result, and nothing else is read or changed."""

from __future__ import annotations

import pytest
import torch
from models import BY_NAME
from steps import repeat

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.objectives.observation import Observation
from pyro_bpq.rollout.runs import Program
from pyro_bpq.step.surrogate import step


def trained(name: str = "chain", **options: object) -> tuple[TraceBackpropQ_ELBO, Observation]:
    case = BY_NAME[name].params()
    elbo = TraceBackpropQ_ELBO(**options)  # type: ignore[arg-type]
    repeat(5, elbo.loss_and_grads, case.model, case.guide, *case.args)
    return elbo, elbo.observe(Program(case.model, case.guide, case.args, {}))


def tensors(elbo: TraceBackpropQ_ELBO) -> dict[str, torch.Tensor]:
    found = elbo.critics.state_dict()
    return {name: value.clone() for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", ["chain", "fork", "plate"])
def test_the_same_arguments_give_the_same_step(name: str) -> None:
    elbo, seen = trained(name, num_particles=2)
    signals = [item.signals for item in seen.items]
    before = tensors(elbo)
    results = [step(signals, seen.runs[0].run.loss, elbo.critics, elbo.learning(), True) for _ in range(2)]
    first, second = results
    assert torch.equal(first.surrogate, second.surrogate) and torch.equal(first.paths, second.paths)
    losses = first.critic_loss, second.critic_loss
    # All that the sites of "plate" cost is known exactly.
    assert (losses == (None, None)) == (name == "plate")
    assert name == "plate" or torch.equal(*losses)  # type: ignore[arg-type]
    for mine, theirs in zip(first.writes, second.writes, strict=True):
        assert mine[:2] == theirs[:2] and torch.equal(mine[3], theirs[3])
    after = tensors(elbo)
    assert before and all(torch.equal(value, after[key]) for key, value in before.items())


def test_a_step_without_learning_has_the_same_gradient_and_teaches_nothing() -> None:
    elbo, seen = trained()
    signals = [item.signals for item in seen.items]
    learns, looks = (step(signals, torch.zeros(()), elbo.critics, elbo.learning(), on) for on in (True, False))
    assert torch.equal(learns.surrogate, looks.surrogate)
    assert learns.learns and not looks.learns and looks.critic_loss is None and not looks.info
