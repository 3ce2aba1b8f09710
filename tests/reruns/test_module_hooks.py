"""Hooks on all modules watch for buffers only where there are some: a compiled network compiles anew for each."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import DebiasedStraightThrough

ROWS, WIDTH = 20, 6


class Nets(nn.Module):
    """An autoencoder of one or two layers that counts the hooks it finds."""

    def __init__(self, layers: int, with_buffers: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        # In training mode rows would meet.
        norm: nn.Module = nn.BatchNorm1d(WIDTH, dtype=torch.float64).eval() if with_buffers else nn.Tanh()
        self.up = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), norm)
        self.down = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.layers = layers
        self.data = torch.bernoulli(torch.full((ROWS, WIDTH), 0.4, dtype=torch.float64))
        self.hooks: list[int] = []

    def net(self, net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.hooks.append(len(torch_module._global_forward_pre_hooks))
        return net(x.flatten(0, -2)).reshape(x.shape)

    def guide(self) -> None:
        pyro.module("nets", self)
        x = self.data
        with pyro.plate("rows", ROWS, dim=-1):
            for i in range(self.layers):
                x = pyro.sample(f"z_{i}", dist.Bernoulli(logits=self.net(self.up, x)).to_event(1))

    def model(self) -> None:
        pyro.module("nets", self)
        logits = torch.zeros(WIDTH, dtype=torch.float64)
        with pyro.plate("rows", ROWS, dim=-1):
            for i in reversed(range(self.layers)):
                z = pyro.sample(f"z_{i}", dist.Bernoulli(logits=logits).to_event(1))
                logits = self.net(self.down, z)
            pyro.sample("x", dist.Bernoulli(logits=logits).to_event(1), obs=self.data)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "flips": (1, {"num_particles": 1}),
    "rerun": (1, {"estimator": DebiasedStraightThrough()}),
    "second run": (2, {"num_particles": 1}),
    "particles": (2, {}),
}


@pytest.mark.parametrize("with_buffers", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_hooks_are_set_where_there_are_buffers(case: str, with_buffers: bool) -> None:
    layers, options = CASES[case]
    nets, elbo = Nets(layers, with_buffers), TraceBackpropQ_ELBO(**options)
    for _ in range(3):  # tracked
        elbo.loss_and_grads(nets.model, nets.guide)
    # A step that compares particles or tracks is among them.
    found = []
    for _ in range(6):
        nets.hooks.clear()
        elbo.loss_and_grads(nets.model, nets.guide)
        found.append(max(nets.hooks))
    # A step that compares particles lends buffers, and so does each run in it.
    assert set(found) <= {0, 1, 2}
    assert (max(found) > 0) == with_buffers
