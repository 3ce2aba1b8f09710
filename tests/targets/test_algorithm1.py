"""Algorithm 1 as written: it runs, is right with exact Q-functions and biased with any others."""

from __future__ import annotations

import itertools

import torch
from algorithm1 import backpropq_algorithm1
from tabular import graph_of
from torch import Tensor, nn
from torch.distributions import Categorical

from pyro_bpq.graph.network import BackpropQNetwork

GRAPH = graph_of({"x": [], "y": ["x"], "z": ["y"]}, {"f": ["z"], "g": ["x", "y"]})
SIZES = {"x": 2, "y": 3, "z": 2}
COSTS = {
    "f": torch.tensor([1.0, -2.0], dtype=torch.float64),
    "g": torch.tensor([[0.5, 2.0, -1.0], [1.5, -0.5, 0.0]], dtype=torch.float64),
}


def logits() -> dict[str, Tensor]:
    start = {"x": torch.tensor([0.2, -0.3]), "y": torch.tensor([[0.1, 0.5, -0.4], [0.3, -0.6, 0.2]])}
    start["z"] = torch.tensor([[0.7, -0.1], [-0.5, 0.4], [0.2, 0.9]])
    return {name: value.requires_grad_() for name, value in start.items()}


class Table(nn.Module):
    """A table over a scope."""

    def __init__(self, sites: tuple[str, ...], start: Tensor | None = None) -> None:
        super().__init__()
        self.sites = sites
        self.table = nn.Parameter(torch.zeros([SIZES[s] for s in sites]) if start is None else start.clone())

    def forward(self, values: dict[str, Tensor]) -> Tensor:
        assert set(values) == set(self.sites)
        return self.table[tuple(values[site] for site in self.sites)]


class Planned(Categorical):
    """Draws what it is told to."""

    def __init__(self, logits: Tensor, value: int | None) -> None:
        super().__init__(logits=logits)
        self.value = value

    def sample(self, shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        return super().sample(shape) if self.value is None else torch.tensor(self.value)


def run(parameters: dict[str, Tensor], critics: dict[str, nn.Module], plan: dict[str, int], **options: float) -> float:
    above = {"x": (), "y": ("x",), "z": ("y",)}
    conditionals = {
        name: lambda values, name=name: Planned(parameters[name][tuple(values[p] for p in above[name])], plan.get(name))
        for name in SIZES
    }
    costs = {"f": lambda values: COSTS["f"][values["z"]], "g": lambda values: COSTS["g"][values["x"], values["y"]]}
    optimizer = torch.optim.SGD(list(parameters.values()), lr=options.pop("lr", 0.0))
    return backpropq_algorithm1(network(), conditionals, costs, critics, optimizer, **options)


def network() -> BackpropQNetwork:
    return BackpropQNetwork.build(GRAPH, immediate="learned")


def exact_tables(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Exact Q-functions by hand: z -> f; y -> f and g(x, y); x -> both."""
    p = {name: value.detach().softmax(-1) for name, value in parameters.items()}
    future = p["z"] @ COSTS["f"]
    q_y = COSTS["g"] + future
    return {"z": COSTS["f"], "y": q_y, "x": (p["y"] * q_y).sum(-1)}


def exact_gradient(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    p = {name: value.softmax(-1) for name, value in parameters.items()}
    loss = (p["x"] * (p["y"] * (COSTS["g"] + p["z"] @ COSTS["f"])).sum(-1)).sum()
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def expected_gradient(tables: dict[str, Tensor], critic_lr: float) -> dict[str, Tensor]:
    """Over all joint states, each from the same critics."""
    parameters = logits()
    p = {name: value.detach().softmax(-1) for name, value in parameters.items()}
    total = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for x, y, z in itertools.product(range(2), range(3), range(2)):
        critics = {node.name: Table(node.scope, tables[node.name]) for node in network().learned}
        run(parameters, critics, {"x": x, "y": y, "z": z}, critic_lr=critic_lr)
        for name, value in parameters.items():
            if value.grad is not None:
                total[name] += p["x"][x] * p["y"][x, y] * p["z"][y, z] * value.grad
    return total


def error(tables: dict[str, Tensor], critic_lr: float) -> float:
    exact, found = exact_gradient(logits()), expected_gradient(tables, critic_lr)
    return max(float((found[name] - g).abs().max()) for name, g in exact.items())


def test_gradient_is_right_with_exact_q_functions() -> None:
    assert error(exact_tables(logits()), 0.0) < 1e-12


def test_gradient_is_biased_with_untrained_critics() -> None:
    zero = {name: torch.zeros_like(table) for name, table in exact_tables(logits()).items()}
    # Zero critics say that nothing is to be gained.
    assert all(float(g.abs().max()) == 0.0 for g in expected_gradient(zero, 0.0).values())
    assert error(zero, 0.0) > 0.05


def test_gradient_is_right_while_exact_tables_learn() -> None:
    # The mean of a sample update of an exact table is the table: its bias is that of the critics alone.
    assert error(exact_tables(logits()), 0.3) < 1e-12
    half = {name: 0.5 * table for name, table in exact_tables(logits()).items()}
    assert error(half, 0.0) > error(half, 0.3) > 0.01
