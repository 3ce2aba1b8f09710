"""What is printed of an object: its options that are not the usual ones."""

from __future__ import annotations

import pytest
import torch

from pyro_bpq import AllAction, LeaveOneOut, MLPCritic, RunningBaseline, ScoreFunction
from pyro_bpq.short import short


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (AllAction(), "AllAction()"),
        (AllAction(decay=0.9), "AllAction(decay=0.9)"),
        (ScoreFunction(LeaveOneOut()), "ScoreFunction(baseline=LeaveOneOut())"),
        (ScoreFunction(RunningBaseline(0.5)), "ScoreFunction(baseline=RunningBaseline(decay=0.5))"),
        (MLPCritic((8,)), "MLPCritic(hidden=(8,))"),
        (AllAction, repr(AllAction)),
        (torch.tensor(True), "tensor(True)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_usual_options_are_left_out(value: object, text: str) -> None:
    assert short(value) == text
