"""A plugin of pytest for Pyro's own tests: ``TraceBackpropQ_ELBO`` stands in place of ``TraceGraph_ELBO``.

``make pyro-tests SRC=...`` runs them from a checkout of Pyro.
"""

from __future__ import annotations

from importlib.util import find_spec

import pyro.infer
import pytest

from pyro_bpq import TraceBackpropQ_ELBO

# Test modules take the class from here when they are imported.
pyro.infer.TraceGraph_ELBO = TraceBackpropQ_ELBO


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = {f"{item.path.name}::{item.name}": item for item in items}
    assert any("TraceBackpropQ_ELBO" in name for name in found), "the class is nowhere in place of Pyro's"
    if find_spec("funsor") is None:
        for name, item in found.items():
            if "Funsor" in name:
                item.add_marker(pytest.mark.skip(reason="needs funsor"))
