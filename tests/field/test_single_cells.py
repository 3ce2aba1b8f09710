"""A Pyro module of scvi-tools under its own training plans: ``examples/single_cells.py``."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyro_bpq import TraceBackpropQ_ELBO, compile_report

pytest.importorskip("scvi")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
FILE = Path(__file__).parents[2] / "examples" / "single_cells.py"
PLANS = ("PyroTrainingPlan", "LowLevelPyroTrainingPlan")


@functools.cache
def example() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(FILE)))


def train(elbo: Any, plan: str, **options: Any) -> torch.Tensor:
    """All weights after 21 steps."""
    torch.set_default_dtype(torch.float32)
    model, clock = example().trained(elbo, plan, 3, example().counts(1000, 40), **options)
    assert len(clock.steps) == 21
    return torch.cat([each.detach().flatten() for each in model.module.parameters()])


@pytest.mark.parametrize("plan", PLANS)
def test_wrappers_made_anew_are_one_recording(plan: str) -> None:
    elbo = TraceBackpropQ_ELBO()
    train(elbo, plan, scale_elbo=0.1)
    assert " steps ago." in str(elbo)


def test_both_plans_train_alike() -> None:
    first, second = (train(TraceBackpropQ_ELBO(), plan) for plan in PLANS)
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("plan", PLANS)
def test_recorded_steps_train_alike(plan: str) -> None:
    # The weight of the KL divergence is a number that grows in each step: the second recording has it as an input.
    elbo = TraceBackpropQ_ELBO(compile="eager")
    torch.testing.assert_close(train(elbo, plan), train(TraceBackpropQ_ELBO(), plan))
    assert compile_report(elbo).count("Recorded") == 2
