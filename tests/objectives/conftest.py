"""Fixtures of tests of objectives."""

from __future__ import annotations

from typing import Any

import pytest
from steps import OPTIONS

from pyro_bpq import CriticLearner, SlowTracking, paper_settings
from pyro_bpq.plan import plan as particles

ALL = {**OPTIONS, "slow": {"learner": CriticLearner(slow=SlowTracking(0.1))}, "sweep": paper_settings()}


@pytest.fixture(params=list(ALL))
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return ALL[request.param]


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are summed from the third one on."""
    monkeypatch.setattr(particles, "DRAWN_STEPS", (2, 2))
