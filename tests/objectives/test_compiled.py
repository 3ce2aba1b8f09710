"""Steps inside ``torch.jit.trace`` and ``torch.compile``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pyro.ops.jit import trace
from steps import CHAIN
from torch import Tensor

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO, TraceBackpropQ_IWAE
from pyro_bpq.errors import UnsupportedProgramError


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    "objective",
    [TraceBackpropQ_ELBO(), TraceBackpropQ_ELBO(estimator=ScoreFunction(), critic=None).eval(), TraceBackpropQ_IWAE(2)],
    ids=["default", "evaluated", "bound"],
)
def test_a_traced_step_is_an_error_with_a_remedy(objective: Any) -> None:
    CHAIN.params()

    def loss() -> Tensor:
        found: Tensor = objective.differentiable_loss(CHAIN.model, CHAIN.guide)
        return found

    loss().backward()
    with pytest.raises(UnsupportedProgramError, match="untraced"):
        trace(loss, ignore_warnings=True)()
    assert torch.isfinite(loss())
