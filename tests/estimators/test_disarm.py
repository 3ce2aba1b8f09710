"""DisARM on one coin, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import Problem

from pyro_bpq.estimators import DisARM
from pyro_bpq.estimators import disarm as module
from pyro_bpq.rollout.features import Components

# A coin with logit 0.8 that costs 1 or 4 nats.
COIN = Problem(Components("bernoulli", (1,), 2), torch.tensor([0.8], dtype=torch.float64), lambda v: 1 + 3 * v[..., 0])


@pytest.mark.parametrize(("noise", "differs"), [(0.1, True), (0.5, False), (0.9, True)])
def test_the_gradient_of_one_draw(monkeypatch: pytest.MonkeyPatch, noise: float, differs: bool) -> None:
    # The value is 1 where u < p; its partner where 1 - u < p.
    chance = float(torch.tensor(0.8).sigmoid())
    value, partner = int(noise < chance), int(1.0 - noise < chance)
    assert (value != partner) == differs
    made, logits = COIN.context(1, 0)
    index = torch.full_like(made.index, value)
    made.program.value.fill_(float(value))
    made = type(made)(**{**vars_of(made), "index": index, "cost": torch.full_like(made.cost, 1.0 + 3.0 * value)})
    monkeypatch.setattr(module, "uniform_given", lambda p, *_: torch.full_like(p, noise))
    (gradient,) = torch.autograd.grad(DisARM()(made).surrogate.sum(), logits)
    assert float(gradient) == pytest.approx(0.5 * 3.0 * (value - partner) ** 2 * chance)


def vars_of(made: Any) -> dict[str, Any]:
    return {name: getattr(made, name) for name in made.__dataclass_fields__}
