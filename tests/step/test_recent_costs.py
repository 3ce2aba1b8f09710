"""Recent costs as plain numbers have the baseline that tensors have."""

import random

import pytest
import torch

from pyro_bpq.estimators import TrimmedBaseline
from pyro_bpq.step.program_order import RecentCosts


def test_baselines_are_those_of_tensors():
    recent, baseline, draws = RecentCosts(8), TrimmedBaseline(), random.Random(0)
    statistics = {"baseline": torch.zeros(1, dtype=torch.float64), "recent": torch.zeros(1, 32, dtype=torch.float64)}
    # Both add the same numbers in another order.
    for step in range(80):
        assert recent.baselines(["a"]) == pytest.approx([statistics["baseline"].item()], rel=1e-12)
        # Single outliers are far away.
        cost = draws.gauss(3.0, 1.0) + 1e4 * (step % 9 == 0)
        recent.add({"a": cost})
        _, new = baseline(torch.tensor([[cost]], dtype=torch.float64), statistics, torch.tensor([float(step)]))
        statistics.update(new)


def test_the_sites_that_were_used_last_stay():
    recent = RecentCosts(2)
    for step, names in enumerate((("a", "b"), ("c",), ("a",), ("d", "e"))):
        recent.add(dict.fromkeys(names, float(step + 1)))
    # The last step's, and two more.
    assert list(recent.state_dict()) == ["c", "a", "d", "e"]
    assert recent.baselines(["b"]) == [0.0]


def test_a_state_goes_on_as_before():
    recent, other = RecentCosts(8), RecentCosts(8)
    for step in range(40):
        recent.add({"a": float(step % 7)})
    other.load_state_dict(recent.state_dict())
    assert other.baselines(["a"]) == recent.baselines(["a"])
    other.add({"a": 1.0})
    assert len(recent.state_dict()["a"]) == len(other.state_dict()["a"]) == 32
    assert recent.state_dict()["a"] != other.state_dict()["a"]
