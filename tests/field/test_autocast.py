"""Steps under ``torch.autocast``: compiled, and as eager steps are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import SGD
from steps import filtered, fresh
from torch import Tensor, nn

from pyro_bpq import CompiledSVI, TraceBackpropQ_ELBO, compile_report

ROWS, STEPS = 5, 14
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "critics": {"num_particles": 1},
    "together": {"num_particles": 3, "vectorize_particles": True, "max_plate_nesting": 1},
}
Around = Callable[[int], contextlib.AbstractContextManager[Any]]


def half(step: int) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def every_other(step: int) -> contextlib.AbstractContextManager[Any]:
    return half(step) if step % 2 else contextlib.nullcontext()


def two_types(step: int) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16 if step % 2 else torch.float16)


def losses(kind: type, around: Around, steps: int = STEPS, **options: Any) -> tuple[list[float], str]:
    """The losses of some steps, and what is said of compiled ones."""
    fresh()
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = torch.randn(ROWS, 3)

    def model(x: Tensor) -> None:
        with pyro.plate("rows", ROWS):
            z = pyro.sample("z", dist.Bernoulli(torch.full((ROWS, 2), 0.4)).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=x.sum(-1))

    def guide(x: Tensor) -> None:
        pyro.module("net", net)
        with pyro.plate("rows", ROWS):
            pyro.sample("z", dist.Bernoulli(logits=net(x).float()).to_event(1))

    more = {"compile": "eager"} if kind is CompiledSVI else {}
    svi, found = kind(model, guide, SGD({"lr": 0.01}), TraceBackpropQ_ELBO(**options), **more), []
    for step in range(steps):
        with around(step):
            found.append(svi.step(data))
    return found, compile_report(svi) if more else ""


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_are_recorded_once(options: dict[str, Any]) -> None:
    with filtered("error"):
        compiled, said = losses(CompiledSVI, half, **options)
    assert said.startswith("Recorded") and said.count("\n") == 0, said
    assert compiled == pytest.approx(losses(SVI, half, **options)[0], rel=1e-6)


@pytest.mark.parametrize("around", [every_other, two_types])
def test_another_type_is_another_recording(around: Around) -> None:
    compiled, said = losses(CompiledSVI, around, 2 * STEPS)
    assert said.count("Recorded") == 2, said
    assert compiled == pytest.approx(losses(SVI, around, 2 * STEPS)[0], rel=1e-5)
