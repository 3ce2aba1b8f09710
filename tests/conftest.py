from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from pyro.poutine.runtime import _PYRO_STACK

# Random examples at a desk, where a new one is a find; the same ones each time in CI.
hypothesis.settings.register_profile("desk", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "desk")


HERE = Path(__file__).parent


def _thinned() -> dict[str, int]:
    """Of how many cases of a test one runs by default; 0 where none does."""
    lines = (HERE / "thinned.txt").read_text().splitlines()
    pairs = (line.split() for line in lines if not line.startswith("#"))
    return {name.removeprefix("tests/"): int(number) for number, name in pairs}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device on which tests create their tensors")
    parser.addoption("--quick", action="store_true", help="one case of each test, and no test of not_quick.txt")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    counts, thinned = Counter[str](), _thinned()
    for item in items:
        name = _function(item)
        if name in thinned and not item.get_closest_marker("slow"):
            if not thinned[name] or counts[name] % thinned[name]:
                item.add_marker(pytest.mark.slow)
            counts[name] += 1
    if config.getoption("--quick"):
        left_out = {line.removeprefix("tests/") for line in (HERE / "not_quick.txt").read_text().splitlines()}
        seen, kept = set[str](), []
        for item in items:
            name = _function(item)
            if not (name in left_out or name in seen or item.get_closest_marker("slow")):
                seen.add(name)
                kept.append(item)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    # A step makes many small objects that refer to each other in cycles: with Python's thresholds, the collector takes
    # a fifth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _function(item: pytest.Item) -> str:
    """The file of a test within this folder, and the name of its function."""
    if not item.path.is_relative_to(HERE):
        return item.nodeid
    return f"{item.path.relative_to(HERE).as_posix()}::{item.name.split('[')[0]}"


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
def _no_handler_left(_isolated: None) -> Iterator[None]:
    yield
    left = list(_PYRO_STACK)
    _PYRO_STACK.clear()
    assert not left, f"handlers left on Pyro's stack: {left}"
