"""Tensors live where the program's tensors live; nothing depends on the default device or dtype.

All other tests run on a device with ``pytest --device cuda``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from steps import repeat
from torch import Tensor

from pyro_bpq import LinearCritic, ScoreFunction, TraceBackpropQ_ELBO, TraceBackpropQ_IWAE
from pyro_bpq.estimators import DisARM

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

OBJECTIVES: dict[str, Callable[[], Any]] = {
    "default": TraceBackpropQ_ELBO,
    "two": lambda: TraceBackpropQ_ELBO(num_particles=2),
    "vectorised": lambda: TraceBackpropQ_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1),
    "score_function": lambda: TraceBackpropQ_ELBO(estimator=ScoreFunction(), critic=None),
    "disarm": lambda: TraceBackpropQ_ELBO(estimator=DisARM()),
    "linear": lambda: TraceBackpropQ_ELBO(critic=LinearCritic()),
    "iwae": lambda: TraceBackpropQ_IWAE(2),
}


def programs(device: str, dtype: torch.dtype) -> tuple[Callable[[], None], Callable[[], None]]:
    """A coin, coins of a plate with two components each, and a reparameterised site."""
    data = torch.tensor([0.3, -0.8, 1.4], device=device, dtype=dtype)

    def param(name: str, *shape: int) -> Tensor:
        value: Tensor = pyro.param(name, lambda: torch.full(shape, 0.2, device=device, dtype=dtype))
        return value

    def model() -> None:
        top = pyro.sample("top", dist.Bernoulli(logits=param("p_top")))
        shift = pyro.sample("shift", dist.Normal(torch.zeros_like(top), 1.0))
        with pyro.plate("rows", 3, device=device):
            low = pyro.sample("low", dist.Bernoulli(logits=param("p_low", 2) + top.unsqueeze(-1)).to_event(1))
            pyro.sample("x", dist.Normal(low.sum(-1) + shift, 0.8), obs=data)

    def guide() -> None:
        top = pyro.sample("top", dist.Bernoulli(logits=param("q_top")))
        pyro.sample("shift", dist.Normal(param("q_shift"), 0.5))
        with pyro.plate("rows", 3, device=device):
            pyro.sample("low", dist.Bernoulli(logits=param("q_low", 3, 2) - top.unsqueeze(-1)).to_event(1))

    return model, guide


@pytest.mark.parametrize("make", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("where", DEVICES)
def test_state_follows_the_program(where: str, dtype: torch.dtype, make: Callable[[], Any]) -> None:
    model, guide = programs(where, dtype)
    objective = make()
    svi = SVI(model, guide, Adam({"lr": 0.01}), objective)
    assert all(math.isfinite(loss) for loss in repeat(4, svi.step))
    tensors = {**dict(pyro.get_param_store().named_parameters()), **dict(objective.named_buffers())}
    assert len(tensors) >= 5
    for name, tensor in tensors.items():
        assert tensor.device.type == where, name
        assert tensor.dtype == dtype or not tensor.is_floating_point(), name
    assert all(torch.isfinite(leaf).all() for leaf in tensors.values())


@pytest.mark.gpu
def test_default_device() -> None:
    with torch.device("cuda"):
        test_state_follows_the_program("cuda", torch.float64, TraceBackpropQ_ELBO)
        test_state_follows_the_program("cuda", torch.float64, OBJECTIVES["disarm"])
