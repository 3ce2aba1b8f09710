"""A plugin of pytest: ``TraceBackpropQ_ELBO`` in place of ``TraceGraph_ELBO`` in Pyro's own tests, see the Makefile."""

from __future__ import annotations

import pyro.infer
import pytest

from pyro_bpq import TraceBackpropQ_ELBO

# Test modules take the class from here when they are imported.
pyro.infer.TraceGraph_ELBO = TraceBackpropQ_ELBO
