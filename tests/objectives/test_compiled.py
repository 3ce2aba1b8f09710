"""Steps inside ``torch.jit.trace`` and ``torch.compile``."""

from __future__ import annotations

from typing import Any

import pyro
import pytest
import torch
from pyro.ops.jit import trace
from steps import CHAIN, run
from torch import Tensor

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO, TraceBackpropQ_IWAE
from pyro_bpq.errors import UnsupportedProgramError

OBJECTIVES = {
    "default": lambda: TraceBackpropQ_ELBO(),
    "evaluated": lambda: TraceBackpropQ_ELBO().eval(),
    "score_function": lambda: TraceBackpropQ_ELBO(estimator=ScoreFunction(), critic=None).eval(),
    "iwae": lambda: TraceBackpropQ_IWAE(2),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("make", OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_traced_step_is_an_error_with_a_remedy(make: Any) -> None:
    objective = make()
    CHAIN.params()

    def loss() -> Tensor:
        found: Tensor = objective.differentiable_loss(CHAIN.model, CHAIN.guide)
        return found

    loss().backward()
    with pytest.raises(UnsupportedProgramError, match="untraced"):
        trace(loss, ignore_warnings=True)()
    assert torch.isfinite(loss())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_finds_its_critics() -> None:
    elbo = TraceBackpropQ_ELBO()
    run(elbo, steps=20)
    elbo.eval()

    def loss() -> Tensor:
        return elbo.differentiable_loss(CHAIN.model, CHAIN.guide)

    found = []
    for step in (loss, torch.compile(loss, backend="eager")):
        leaves = dict(pyro.get_param_store().named_parameters())
        for leaf in leaves.values():
            leaf.grad = None
        pyro.set_rng_seed(1)
        step().backward()
        found.append({name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None})
    assert found[0]
    torch.testing.assert_close(found[1], found[0])
