"""Steps compiled by Inductor: number for number those of eager steps, and unbiased with draws of their own."""

from __future__ import annotations

import shutil
from typing import Any

import pyro
import pytest
import torch
import torch._inductor.config
from models import BY_NAME
from pyro.infer import SVI
from pyro.optim import ClippedAdam
from steps import some_quick
from torch import Tensor

from pyro_bpq import CompiledSVI, TraceBackpropQ_ELBO, compile_report

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore"),
]


def train(kind: Any, case: Any, steps: int) -> tuple[list[Tensor], TraceBackpropQ_ELBO]:
    """Losses, parameters, critics and statistics after some steps."""
    case.params(seed=3)
    elbo = TraceBackpropQ_ELBO()
    svi = kind(case.model, case.guide, ClippedAdam({"lr": 0.01, "lrd": 0.99}), elbo)
    losses = [svi.step(*case.args) for _ in range(steps)]
    state = [value.double().nan_to_num() for value in elbo.state_dict().values() if isinstance(value, Tensor)]
    params = [value.detach() for _, value in pyro.get_param_store().named_parameters()]
    return [torch.tensor(losses), *params, *state], elbo


@pytest.mark.parametrize("name", some_quick(BY_NAME, ["guide_factor"]))
def test_a_hundred_whole_steps_are_those_of_svi(name: str) -> None:
    case = BY_NAME[name]
    expected, _ = train(SVI, case, 100)
    with torch._inductor.config.patch(fallback_random=True):
        found, elbo = train(CompiledSVI, case, 100)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    if not elbo.compiled.entries:
        assert "run eagerly" in compile_report(elbo)
    else:
        assert elbo.compiled.entries[0].steps > 50
