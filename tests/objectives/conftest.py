"""Fixtures of tests of objectives."""

from __future__ import annotations

from typing import Any

import pytest
from steps import OPTIONS

from pyro_bpq.plan import particles


@pytest.fixture(params=list(OPTIONS))
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return OPTIONS[request.param]


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are summed from the third one on."""
    monkeypatch.setattr(particles, "DRAWN_STEPS", (2, 2))
