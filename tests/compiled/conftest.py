"""Small programs are recorded as others are: a few steps after the first."""

from __future__ import annotations

import pytest

from pyro_bpq.objectives import particle_count


@pytest.fixture(autouse=True)
def draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is summed over all values: a program that is would be recorded from a later step on."""
    monkeypatch.setattr(particle_count, "num_rows_for", lambda *_: 0)
