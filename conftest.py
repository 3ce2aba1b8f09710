"""Isolation shared by the tests and the doctests: each starts from the same state and leaves none behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyro
import pytest
import torch
from pyro.util import get_rng_state, set_rng_state


@pytest.fixture(autouse=True)
def _isolated(doctest_namespace: dict[str, Any]) -> Iterator[None]:
    doctest_namespace.update(torch=torch, pyro=pyro)
    dtype, rng = torch.get_default_dtype(), get_rng_state()
    pyro.clear_param_store()
    with torch.random.fork_rng(), pyro.validation_enabled(True):
        pyro.set_rng_seed(0)
        yield
    set_rng_state(rng)
    torch.set_default_dtype(dtype)
    pyro.clear_param_store()
