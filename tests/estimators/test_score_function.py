"""The score function by hand."""

from __future__ import annotations

import torch
from test_contract import context, with_statistics

from pyro_bpq.estimators import LeaveOneOut, Pathwise, RunningBaseline, ScoreFunction


def test_call_is_cost_times_score() -> None:
    made, logits = context()
    (gradient,) = torch.autograd.grad(ScoreFunction()(made).surrogate.sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((made.cost * made.score).sum(), logits)
    torch.testing.assert_close(gradient, expected)


def test_call_with_leave_one_out_vanishes_where_costs_agree() -> None:
    made, logits = context()
    made = with_statistics(ScoreFunction(LeaveOneOut()), made)
    flat = type(made)(**{**vars(made), "cost": torch.full_like(made.cost, 7.0)})
    (gradient,) = torch.autograd.grad(ScoreFunction(LeaveOneOut())(flat).surrogate.sum(), logits)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_statistics_are_those_of_the_baseline() -> None:
    assert ScoreFunction().statistics() == {}
    assert ScoreFunction(RunningBaseline()).statistics() == {"baseline": 0.0}


def test_pathwise_adds_nothing() -> None:
    made, _ = context()
    assert not Pathwise()(made).surrogate.any() and Pathwise().statistics() == {}
