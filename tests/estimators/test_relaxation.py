"""Relaxed draws, by hand."""

from __future__ import annotations

import torch

from pyro_bpq.estimators.relaxation import Annealed, parameters, score, temperature_at


def test_parameters_are_logits_of_binary_components_and_log_probabilities_of_others() -> None:
    logits = torch.tensor([0.4, -1.2])
    binary = torch.nn.functional.logsigmoid(torch.stack((-logits, logits), -1))
    torch.testing.assert_close(parameters(binary), logits)
    others = torch.tensor([[0.1, 0.5, -0.3]]).log_softmax(-1)
    assert torch.equal(parameters(others), others)


def test_score_is_the_derivative_of_the_log_probability() -> None:
    logits, index = torch.tensor([0.3, -0.7], requires_grad=True), torch.tensor([1, 0])
    log_q = torch.nn.functional.logsigmoid(torch.where(index == 1, logits, -logits)).sum()
    (slope,) = torch.autograd.grad(log_q, logits)
    torch.testing.assert_close(score(logits.detach(), index), slope)
    # Log-probabilities are parameters themselves.
    assert score(torch.tensor([[0.1, 0.5, -0.3]]).log_softmax(-1), torch.tensor([2])).tolist() == [[0.0, 0.0, 1.0]]


def test_annealed_temperature_falls_to_its_end() -> None:
    assert [temperature_at(Annealed(1.0, 0.2, 0.5), step) for step in (1, 50)] == [0.5, 0.2]
