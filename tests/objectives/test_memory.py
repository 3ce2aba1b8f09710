"""What an ELBO holds does not grow with the number of steps of programs whose structure changes."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pyro
import pytest
from models import BY_NAME
from pyro.infer import SVI
from pyro.optim import Adam
from steps import repeat
from torch import Tensor

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.critics.bank import Block

CASE = BY_NAME["dynamic_sites"]
OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {"structure": "auto"},
    "dynamic": {"structure": "dynamic"},
    "two_particles": {"num_particles": 2},
    "no_learner": {"learner": None},
    "score": {"estimator": ScoreFunction(), "critic": None},
}


class Stepper:
    """Takes steps and counts what is alive afterwards."""

    def __init__(self, options: dict[str, Any]) -> None:
        CASE.params()
        pyro.set_rng_seed(0)
        self.elbo = TraceBackpropQ_ELBO(**options)
        self.svi = SVI(*CASE.programs, Adam({"lr": 1e-3}), self.elbo)

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


@pytest.mark.parametrize("name", OPTIONS)
def test_objects_do_not_grow(name: str) -> None:
    stepper = Stepper(OPTIONS[name])
    before = stepper.take(100)
    after = stepper.take(100)
    assert sum(after.values()) - sum(before.values()) < SLACK
    assert after["any tensor"] - before["any tensor"] < 50
    assert max(rows(stepper.elbo).values(), default=1) == 1
