"""Steps under ``torch.autocast``: compiled, and as eager steps are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import WAYS, assert_recorded, filtered
from torch import Tensor, nn

ROWS, STEPS = 5, 14
OPTIONS: dict[str, dict[str, Any]] = {"default": {}, "critics": {"num_particles": 1}, "together": WAYS["vectorised"]}


def programs(dtypes: Sequence[torch.dtype | None]) -> tuple[Any, Any, Iterator[tuple[Tensor]]]:
    """Model, guide, and the data of steps that run under these types, or under none."""
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

    def calls() -> Iterator[tuple[Tensor]]:
        for dtype in dtypes:
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                yield (data,)

    return model, guide, calls()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_are_recorded_once(options: dict[str, Any]) -> None:
    with filtered("error"):
        assert_recorded(lambda: programs([torch.bfloat16] * STEPS), rel=1e-6, **options)


@pytest.mark.parametrize("other", [None, torch.float16])
def test_another_type_is_another_recording(other: torch.dtype | None) -> None:
    assert_recorded(lambda: programs([other, torch.bfloat16] * STEPS), 2, rel=1e-6)
