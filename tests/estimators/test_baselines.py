"""Baselines by hand numbers."""

from __future__ import annotations

import pytest
import torch

from pyro_bpq.estimators import LeaveOneOut, RunningBaseline, TrimmedBaseline
from pyro_bpq.estimators.base import update_mean


def test_leave_one_out_alone_is_the_running_mean() -> None:
    cost, statistics, count = torch.full((1, 1, 2), 5.0), {"baseline": torch.tensor([2.0])}, torch.tensor([3.0])
    centred, new = LeaveOneOut()(cost, statistics, count)
    assert centred.tolist() == [[[3.0, 3.0]]] and new["baseline"].tolist() == [2.75]


def test_running_baseline_subtracts_what_was_before() -> None:
    baseline = RunningBaseline(decay=0.5)
    statistics, count = {"baseline": torch.zeros(2)}, torch.zeros(2)
    seen = []
    for value in ([4.0, 1.0], [8.0, 2.0], [2.0, 3.0]):
        cost = torch.tensor(value).reshape(2, 1)
        centred, statistics = baseline(cost, statistics, count)  # type: ignore[assignment]
        count = count + 1
        seen.append(centred.flatten().tolist())
    # Means: 0, then 4, then (4 + 8) / 2 = 6; from then on with weight 1 - decay.
    assert seen == [[4.0, 1.0], [4.0, 1.0], [-4.0, 1.5]]
    assert statistics["baseline"].tolist() == [4.0, 2.25]


def test_an_outlier_stays_out_of_the_trimmed_baseline() -> None:
    baseline, generator = TrimmedBaseline(), torch.Generator().manual_seed(0)
    statistics = {k: torch.as_tensor(v)[None] for k, v in baseline.statistics().items()}
    statistics["baseline"] = torch.zeros(1)
    values = 5.0 + torch.randn(100, generator=generator)
    # The very first costs may be outliers, too.
    values[[0, 1, 40, 41, 60, 61]] = 1e6
    for count, value in enumerate(values):
        cost = value.reshape(1, 1)
        centred, new = baseline(cost, statistics, torch.tensor([float(count)]))
        # It reads earlier costs alone.
        assert centred.item() == value.item() - statistics["baseline"].item()
        statistics = dict(new)
        if count > 4:
            assert abs(statistics["baseline"].item() - 5.0) < 1.5
    kept = values[-32:].sort().values[4:-4]
    assert statistics["baseline"].item() == pytest.approx(kept.mean().item())


def test_the_trimmed_baseline_is_the_median_of_few_costs() -> None:
    baseline, generator = TrimmedBaseline(), torch.Generator().manual_seed(0)
    values = torch.randn(31, generator=generator)
    statistics = {k: torch.as_tensor(v)[None] for k, v in baseline.statistics().items()}
    for count in range(31):
        cost = values[count].reshape(1, 1)
        _, statistics = baseline(cost, statistics, torch.tensor([float(count)]))  # type: ignore[assignment]
        assert statistics["baseline"].item() == values[: count + 1].median().item()


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_update_mean_is_the_plain_mean_at_first(decay: float) -> None:
    mean, values = torch.zeros(1), [3.0, 5.0, 10.0]
    for count, value in enumerate(values):
        mean = update_mean(mean, torch.tensor([value]), torch.tensor([float(count)]), decay)
    expected = {0.0: 10.0, 0.5: (4.0 + 10.0) / 2, 0.99: 6.0}[decay]
    assert mean.tolist() == pytest.approx([expected])
