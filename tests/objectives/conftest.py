"""Fixtures of tests of objectives."""

from __future__ import annotations

from typing import Any

import pytest
from steps import OPTIONS


@pytest.fixture(params=list(OPTIONS))
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return OPTIONS[request.param]
