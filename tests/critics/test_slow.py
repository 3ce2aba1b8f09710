"""Slow copies, by hand and in the paper's two parts."""

from __future__ import annotations

import pytest
import torch

from pyro_bpq.critics.learner import track


def test_the_two_part_form_is_the_soft_update() -> None:
    theta, delta, current = torch.tensor(1.0), torch.tensor(0.0), torch.tensor(1.0)
    slow = torch.tensor(1.0)
    for change in (0.5, -2.0, 3.0):
        delta = delta + change
        theta, delta = theta + 0.1 * delta, 0.9 * delta
        current = current + change
        track([slow], [current], 0.1)
        torch.testing.assert_close(theta, slow)
        torch.testing.assert_close(theta + delta, current)
    assert float(slow) == pytest.approx((1.0 * 0.9 + 0.15) * 0.81 + 0.1 * (-0.5) * 0.9 + 0.1 * 2.5)
