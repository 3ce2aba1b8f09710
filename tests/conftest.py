from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from pyro.poutine.runtime import _PYRO_STACK
from selection import NOT_QUICK, THINNED, within

from pyro_bpq.plan import plan as particles
from pyro_bpq.plan import rules

# Random examples at a desk, where a new one is a find; the same ones each time in CI.
hypothesis.settings.register_profile("desk", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "desk")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device on which tests create their tensors")
    parser.addoption("--quick", action="store_true", help="one case of each test, and no test of not_quick.txt")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``--quick`` a file that is left out is not imported."""
    return (config.getoption("--quick") and within(collection_path) in NOT_QUICK) or None


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: Any, name: str) -> Generator[None, Any, Any]:
    """Marks cases of thinned tests as slow; with ``--quick`` there is one case of a test, or none."""
    is_quick, name = collector.config.getoption("--quick"), f"{within(collector.path)}::{name}"
    items = yield
    if not isinstance(items, list):
        return items
    cases = [item for item in items if not item.get_closest_marker("slow")]
    step = THINNED.get(name, 1)
    for i, item in enumerate(cases):
        if not step or i % step:
            item.add_marker(pytest.mark.slow)
    if not is_quick:
        return items
    return [item for item in cases[:1] if step and name not in NOT_QUICK]


def pytest_collection_finish(session: pytest.Session) -> None:
    # A step makes many small objects that refer to each other in cycles: with Python's thresholds, the collector takes
    # a fifth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def _float64_on_device(_isolated: None, device: torch.device) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    if device.type == "cpu":
        yield
        return
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def _drawn_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that are summed over all values draw for fifty steps: most tests are about what draws."""
    monkeypatch.setattr(particles, "DRAWN_STEPS", (50, 50))


@pytest.fixture
def two_particles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is left open is two at most: the values of more particles cannot be enumerated."""
    monkeypatch.setattr(rules, "MOST_PARTICLES", 2)


@pytest.fixture(autouse=True)
def _no_handler_left(_isolated: None) -> Iterator[None]:
    yield
    left = list(_PYRO_STACK)
    _PYRO_STACK.clear()
    assert not left, f"handlers left on Pyro's stack: {left}"
