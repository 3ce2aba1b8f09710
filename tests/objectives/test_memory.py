"""What an ELBO holds does not grow with the number of steps of programs whose structure changes."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
from models import BY_NAME
from pyro.infer import SVI
from pyro.optim import Adam
from steps import repeat
from torch import Tensor

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.critics.bank import Block

CASE = BY_NAME["dynamic_sites"]
DYNAMIC, SCORE = {"structure": "dynamic"}, {"estimator": ScoreFunction(), "critic": None}


def alive_after(steps: int, svi: Any) -> tuple[int, int]:
    """How many objects, and how many tensors, are alive after steps."""
    repeat(steps, svi.step)
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    # isinstance would ask proxies in other libraries for their class.
    return kinds.total(), sum(number for kind, number in kinds.items() if issubclass(kind, Tensor))


@pytest.mark.parametrize("options", [{}, DYNAMIC, {"num_particles": 2}, {"learner": None}, SCORE], ids=str)
def test_objects_do_not_grow(options: dict[str, Any]) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    svi = SVI(*CASE.params(seed=0).programs, Adam({"lr": 1e-3}), elbo)
    (objects, tensors), (more_objects, more_tensors) = repeat(2, alive_after, 100, svi)
    # Of what a run leaves behind until the next one there is more after a long run than after a short one.
    assert more_objects - objects < 200 and more_tensors - tensors < 50
    # Each kind of row exists once for each key.
    rows = [(b.kind, key) for b in elbo.critics.blocks.values() if isinstance(b, Block) for key in b.keys]
    assert len(set(rows)) == len(rows)
