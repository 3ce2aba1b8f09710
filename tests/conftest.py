from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from pyro.poutine.runtime import _PYRO_STACK

# Random examples at a desk, where a new one is a find; the same ones each time in CI.
hypothesis.settings.register_profile("desk", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "desk")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device on which tests create their tensors")


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
