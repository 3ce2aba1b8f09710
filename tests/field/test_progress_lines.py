"""A compilation that takes time says so, also where the output is no terminal, as in a log or under a scheduler."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from steps import coin_guide, repeat, seeing

from pyro_bpq import CompiledSVI, TraceBackpropQ_ELBO

SECONDS = 2.0


def slow(told: list[str], read: Callable[[], str]) -> Callable[..., Any]:
    """A compiler that takes its time, and notes what was printed meanwhile."""

    def backend(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        time.sleep(SECONDS)
        told.append(read())
        return graph

    return backend


@pytest.mark.parametrize("kind", [SVI, CompiledSVI])
def test_a_compilation_says_that_it_goes_on(kind: type, capfd: pytest.CaptureFixture[str]) -> None:
    assert not sys.stderr.isatty()
    told: list[str] = []
    elbo = TraceBackpropQ_ELBO(num_particles=1, compile=slow(told, lambda: "".join(capfd.readouterr())))
    svi = kind(seeing(lambda z: z), coin_guide, Adam({"lr": 0.01}), loss=elbo)
    repeat(30, svi.step)
    assert told, "nothing was compiled"
    assert "ompiling" in told[0] and "operators" in told[0]
