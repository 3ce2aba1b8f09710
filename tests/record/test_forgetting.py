"""Programs that name sites anew in every step: time and state stay bounded, and what is used again is kept."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import SGD
from torch import Tensor

from pyro_bpq import CriticLearner, TraceBackpropQ_ELBO
from pyro_bpq.critics.bank import Block, CriticBank

IDLE = 20


def named(name: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """Two sites, one with a critic, whose names end in ``name``."""

    def model() -> None:
        z = pyro.sample(f"z_{name}", dist.Categorical(torch.ones(3)))
        w = pyro.sample(f"w_{name}", dist.Bernoulli(torch.tensor([0.2, 0.5, 0.7])[z]))
        pyro.sample(f"x_{name}", dist.Normal(w + z, 1.0), obs=torch.tensor(0.5))

    def guide() -> None:
        z = pyro.sample(f"z_{name}", dist.Categorical(logits=pyro.param("q", torch.zeros(3))))
        pyro.sample(f"w_{name}", dist.Bernoulli(logits=pyro.param("p", torch.zeros(3))[z]))

    return model, guide


def step(elbo: TraceBackpropQ_ELBO, *names: Any) -> None:
    for name in names:
        SVI(*named(name), SGD({"lr": 0.01}), elbo).step()


def small(**options: Any) -> TraceBackpropQ_ELBO:
    # Which steps are tracked is not saved.
    return TraceBackpropQ_ELBO(1, learner=CriticLearner(max_idle=IDLE, **options), structure="dynamic")


def rows(elbo: TraceBackpropQ_ELBO) -> list[str]:
    return [key for block in elbo.critics.blocks.values() if isinstance(block, Block) for key in block.keys]


def num_bytes(elbo: TraceBackpropQ_ELBO) -> int:
    file = io.BytesIO()
    torch.save(elbo.state_dict(), file)
    return len(file.getvalue())


@pytest.mark.parametrize("options", [{}, {"steps": 2}], ids=str)
def test_state_and_steps_are_bounded(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    elbo, asked, weights = small(**options), list[int](), CriticBank.weights

    def counted(bank: CriticBank, *args: Any) -> dict[str, Tensor]:
        """Notes how many tensors each question for weights that have gradients is about."""
        found = weights(bank, *args)
        asked.append(len(found))
        return found

    step(elbo, *range(20))
    before = num_bytes(elbo)
    monkeypatch.setattr(CriticBank, "weights", counted)
    step(elbo, 20)
    most = max(asked)
    step(elbo, *range(21, 45))
    assert max(asked) == most and elbo.trainer.optimizer and len(elbo.trainer.optimizer.optimizers) < 30
    assert len(rows(elbo)) <= IDLE + 4 and num_bytes(elbo) < 1.1 * before


def tensors(elbo: TraceBackpropQ_ELBO, name: str) -> Mapping[str, Tensor]:
    blocks = {
        key
        for key, block in elbo.critics.blocks.items()
        if isinstance(block, Block) and any(own.split("^")[0].endswith(f"_{name}") for own in block.keys)
    }
    assert blocks
    state = elbo.critics.blocks.state_dict()
    return {key: tensor.clone() for key, tensor in state.items() if key.split(".")[0] in blocks}


def test_programs_that_alternate_are_kept() -> None:
    elbo = small()
    step(elbo, *["a"] * 5, *["b"] * 5)
    known = tensors(elbo, "a")
    step(elbo, *["b"] * 40, *["c", "d"] * 3)
    now = tensors(elbo, "a")
    assert known.keys() == now.keys() and all(torch.equal(known[key], now[key]) for key in known)


def test_what_was_forgotten_starts_anew() -> None:
    elbo = small()
    step(elbo, *["a"] * 5, *range(15))
    assert not any(key.endswith("_a") for key in rows(elbo))
    step(elbo, "a")
    assert all(tensor.max() == 1.0 for key, tensor in tensors(elbo, "a").items() if key.endswith("count"))


def test_a_step_that_fails_forgets_nothing() -> None:
    elbo = small()
    step(elbo, *range(10))
    known = set(rows(elbo))

    def failing() -> None:
        named("a")[0]()
        raise LookupError

    for _ in range(30):
        with pytest.raises(LookupError):
            elbo.loss_and_grads(failing, named("a")[1])
    assert set(rows(elbo)) == known
    step(elbo, *range(10, 30))
    assert len(rows(elbo)) <= IDLE + 4
