"""What an ELBO holds of a program grows with its sites, not with their square."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import SGD
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.graph import scg
from pyro_bpq.graph.bitsets import Names
from pyro_bpq.rollout import sums
from pyro_bpq.tracing import structure_cache as program_graph
from pyro_bpq.tracing import structure_cache as structure
from pyro_bpq.tracing.traced_run import TracedRun

SIZES = (256, 512)


def held(value: object, seen: dict[int, object]) -> int:
    """Bytes of all that can be reached from a value."""
    if id(value) in seen or isinstance(value, (type, ModuleType, FunctionType, MethodType)):
        return 0
    seen[id(value)] = value
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen[storage.data_ptr()] = storage
        return storage.nbytes()
    if isinstance(value, np.ndarray):
        return value.nbytes
    parts: list[Any] = []
    if isinstance(value, Mapping) and not hasattr(value, "bits"):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = list(value)
    parts += vars(value).values() if hasattr(value, "__dict__") else []
    for kind in type(value).__mro__:
        parts += [getattr(value, name) for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    return sys.getsizeof(value) + sum(held(part, seen) for part in parts)


def program(kind: str, sites: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Binary sites with an observation each, that read the one before (``chain``) or the sum of all (``dense``)."""

    def model() -> None:
        read = torch.tensor(0.0)
        for t in range(sites):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=read))
            pyro.sample(f"x_{t}", dist.Normal(z, 1.0), obs=torch.tensor(0.5))
            read = (read * t + z) / (t + 1) if kind == "dense" else z

    def guide() -> None:
        slope, read = pyro.param("slope", torch.tensor(0.5)), torch.tensor(0.0)
        for t in range(sites):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=slope * read))
            read = (read * t + z) / (t + 1) if kind == "dense" else z

    return model, guide


def size_of_plan(kind: str, sites: int) -> int:
    pyro.clear_param_store()
    elbo = TraceBackpropQ_ELBO()
    svi = SVI(*program(kind, sites), SGD({"lr": 1e-3}), elbo)
    for _ in range(2):
        svi.step()
    return held((elbo.runner.structure, elbo.runner.plans), {})


def growth(kind: str) -> float:
    small, large = (size_of_plan(kind, sites) for sites in SIZES)
    return large / small


@pytest.mark.parametrize("kind", ["chain", "dense"])
def test_structure_and_plan_grow_with_the_sites(kind: str) -> None:
    # Sets as bits have a bit for each pair of sites: a little above 2.
    assert growth(kind) < 2.4


def test_matrices_held_as_they_are_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "DENSE", 1 << 30)
    assert growth("chain") > 3.0


@pytest.mark.parametrize("module", [scg, program_graph])
def test_sets_held_as_tuples_are_found(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "named", lambda of, bits: tuple(Names(of, bits)))
    assert growth("dense") > 2.6


def test_sets_of_what_is_read_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    build = structure.build_graph

    def keeping(traced: TracedRun, reads: Mapping[str, frozenset[str]]) -> Any:
        found = build(traced, reads)
        found.__dict__["kept"] = dict(reads)
        return found

    monkeypatch.setattr(structure, "build_graph", keeping)
    assert growth("dense") > 2.6
