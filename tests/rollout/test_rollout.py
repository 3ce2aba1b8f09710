"""Stacking tensors of like-shaped sites, and sums over plates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyro_bpq.errors import PlateError
from pyro_bpq.graph.scg import Plate
from pyro_bpq.rollout.runs import Rollout, Run

INNER, OUTER = Plate("inner", -1), Plate("outer", -2)
SIZES = {INNER: 3, OUTER: 2}


def run(costs: dict[str, Tensor]) -> Run:
    return Run({}, costs, torch.zeros(()), torch.zeros(()))


def pick(run: Run, name: str) -> Tensor:
    return run.costs[name]


def test_stack_sums_dimensions_without_a_plate() -> None:
    costs = {"a": torch.arange(6.0).reshape(2, 3), "more": torch.ones(4, 1, 1, 3)}
    rollout = Rollout((run(costs),), 1, SIZES, 2)
    assert rollout.stack(pick, ["a"], [INNER]).tolist() == [[[[3, 5, 7]]]]
    assert rollout.stack(pick, ["a"], []).tolist() == [[[[15]]]]
    assert rollout.stack(pick, ["more"], [INNER]).tolist() == [[[[4, 4, 4]]]]


def test_stack_with_dimensions_outside_the_plates_raises() -> None:
    rollout = Rollout((run({"a": torch.ones(4, 1, 2, 3, 5)}),), 1, SIZES, 2)
    with pytest.raises(PlateError, match="more dimensions than"):
        rollout.stack(pick, ["a"], [OUTER, INNER], event_ndim=1)
