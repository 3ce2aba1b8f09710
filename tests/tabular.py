"""Random graphs with tables, and policies, for tests that need exact Q-functions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from typing import get_args

import pyro
import torch
from tables import TabularProgram
from torch import Tensor

from pyro_bpq.graph.network import BackpropQNetwork, Reduction
from pyro_bpq.graph.scg import StochasticComputationGraph

REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
FORMS = ("ancestor", "history")
MODES = list(itertools.product(REDUCTIONS, FORMS, ("exact", "learned")))
graph_of = StochasticComputationGraph.from_parents
# Worked cases of the design: parents, and variables of the costs.
WORKED: dict[str, tuple[dict[str, list[str]], dict[str, list[str]]]] = {
    "bypass": ({"x": [], "y": ["x"]}, {"f": ["x", "y"]}),
    "two costs": ({"x": [], "y": ["x"], "z": ["x"]}, {"f1": ["y"], "f2": ["y", "z"]}),
    "siblings": ({"x": [], "y1": ["x"], "y2": ["x"], "z": ["y1", "y2"]}, {"f": ["z"]}),
    "chain": ({"x1": [], "x2": ["x1"], "x3": ["x2"], "x4": ["x3"]}, {"fa": ["x2", "x3"], "fb": ["x3", "x4"]}),
    "replay": (
        {"a": [], "b1": [], "b2": [], "x": ["a"], "y1": ["x", "b1"], "y2": ["x", "a", "b2"]},
        {"f1": ["y1"], "f2": ["y2"]},
    ),
}


def random_graph(generator: torch.Generator, max_nodes: int = 7, max_costs: int = 4) -> StochasticComputationGraph:
    """Up to seven nodes in any order of dependence, several costs, bypasses included."""

    def chance(probability: float) -> bool:
        return bool(torch.rand((), generator=generator) < probability)

    names = [f"x{i}" for i in range(int(torch.randint(2, max_nodes + 1, (), generator=generator)))]
    nodes = {name: [p for p in names[:i] if chance(0.45)] for i, name in enumerate(names)}
    count = int(torch.randint(1, max_costs + 1, (), generator=generator))
    return graph_of(nodes, {f"f{k}": [n for n in names if chance(0.4)] for k in range(count)})


@cache
def random_program(seed: int, max_nodes: int = 7, max_costs: int = 4) -> TabularProgram:
    """A random graph with binary and ternary nodes."""
    generator = torch.Generator().manual_seed(seed)
    return TabularProgram.random(random_graph(generator, max_nodes, max_costs), generator)


def numbers(given: Mapping[str, float] | None = None, **more: float) -> dict[str, Tensor]:
    """Numbers by name."""
    return {name: torch.tensor(float(value)) for name, value in {**(given or {}), **more}.items()}


def largest(value: Tensor) -> float:
    return float(value.abs().max())


def site_total(program: TabularProgram, network: BackpropQNetwork, q: dict[str, Tensor], site: str) -> Tensor:
    """The sum of the Q-functions of a site."""
    return sum((program.total(node, q) for node in network.q_nodes(site)), torch.zeros(()))


def set_policy(policy: Mapping[str, Tensor]) -> None:
    """Puts values into the param store."""
    store = pyro.get_param_store()
    for name, value in policy.items():
        if name in store:
            store[name] = value.clone()
        else:
            pyro.param(name, value.clone())


def prob(logit: Tensor, value: int) -> Tensor:
    """The probability of a value of a coin."""
    return torch.sigmoid(logit if value else -logit)
