"""Small programs are recorded as others are: a few steps after the first."""

from __future__ import annotations

import pytest

from pyro_bpq.objectives.runner import StepRunner


@pytest.fixture(autouse=True)
def draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is summed over all values: a program that is would be recorded from a later step on."""
    monkeypatch.setattr(StepRunner, "rows_for", lambda *_: 0)
