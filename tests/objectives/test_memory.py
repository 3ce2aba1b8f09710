"""What an ELBO holds does not grow with the number of steps of programs whose structure changes."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from steps import repeat
from torch import Tensor

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.critics.blocks import Block

LONGEST = 6


def loop_model() -> None:
    steps = 0
    for t in range(LONGEST):
        steps += 1
        if not pyro.sample(f"z_{t}", dist.Bernoulli(0.5)).item():
            break
    pyro.sample("x", dist.Normal(float(steps), 1.0), obs=torch.tensor(3.0))


def loop_guide() -> None:
    logits = pyro.param("logits", torch.zeros(LONGEST))
    for t in range(LONGEST):
        if not pyro.sample(f"z_{t}", dist.Bernoulli(logits=logits[t] + 0.5)).item():
            break


def branch_model() -> None:
    k = int(pyro.sample("k", dist.Categorical(torch.ones(3))))
    total = torch.zeros(())
    for i in range(k + 1):
        total = total + pyro.sample(f"y_{k}_{i}", dist.Bernoulli(0.5))
    pyro.sample("x", dist.Normal(total, 1.0), obs=torch.tensor(1.0))


def branch_guide() -> None:
    logits, table = pyro.param("logits", torch.zeros(3)), pyro.param("table", torch.zeros(3, 3))
    k = int(pyro.sample("k", dist.Categorical(logits=logits)))
    for i in range(k + 1):
        pyro.sample(f"y_{k}_{i}", dist.Bernoulli(logits=table[k, i]))


PROGRAMS: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
    "loop": (loop_model, loop_guide),
    "branch": (branch_model, branch_guide),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {"structure": "auto"},
    "dynamic": {"structure": "dynamic"},
    "two_particles": {"num_particles": 2},
    "no_learner": {"learner": None},
    "score": {"estimator": ScoreFunction(), "critic": None},
}


class Stepper:
    """Takes steps and counts what is alive afterwards."""

    def __init__(self, program: str, options: dict[str, Any]) -> None:
        pyro.set_rng_seed(0)
        self.elbo = TraceBackpropQ_ELBO(**options)
        self.svi = SVI(*PROGRAMS[program], Adam({"lr": 1e-3}), self.elbo)

    def take(self, steps: int) -> Counter[str]:
        repeat(steps, self.svi.step)
        gc.collect()
        kinds = Counter(map(type, gc.get_objects()))
        alive = Counter({str(kind): number for kind, number in kinds.items()})
        # isinstance would ask proxies in other libraries for their class.
        alive["any tensor"] = sum(number for kind, number in kinds.items() if issubclass(kind, Tensor))
        return alive


def rows(elbo: TraceBackpropQ_ELBO) -> Counter[tuple[str, str]]:
    """How often each kind of row exists for each key."""
    return Counter((b.kind, key) for b in elbo.critics.blocks.values() if isinstance(b, Block) for key in b.keys)


# Of what a run leaves behind until the next one there is more after a long run than after a short one.
SLACK = 200


@pytest.mark.parametrize(
    ("program", "name"), [*(("loop", name) for name in OPTIONS), ("branch", "auto"), ("branch", "dynamic")]
)
def test_objects_do_not_grow(program: str, name: str) -> None:
    stepper = Stepper(program, OPTIONS[name])
    before = stepper.take(100)
    after = stepper.take(100)
    assert sum(after.values()) - sum(before.values()) < SLACK
    assert after["any tensor"] - before["any tensor"] < 50
    assert max(rows(stepper.elbo).values(), default=1) == 1


def test_the_counts_see_what_a_step_leaves_behind() -> None:
    stepper = Stepper("loop", {})
    kept: list[Any] = []
    before = stepper.take(100)
    stepper.svi.loss_and_grads = _keeping(stepper.svi.loss_and_grads, stepper.elbo, kept)
    after = stepper.take(100)
    assert sum(after.values()) - sum(before.values()) > SLACK
    assert after["any tensor"] - before["any tensor"] > 50


def _keeping(call: Callable[..., Any], elbo: TraceBackpropQ_ELBO, kept: list[Any]) -> Callable[..., Any]:
    def keep(*args: Any) -> Any:
        loss = call(*args)
        kept.append(elbo.info)
        return loss

    return keep
