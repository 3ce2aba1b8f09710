"""Programs whose rows at other values would mix: what they cost there is what runs at each value cost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from pyro import poutine
from steps import coins_guide, seeing, unbiased
from torch import Tensor, nn

from pyro_bpq import AllAction, TraceBackpropQ_ELBO
from pyro_bpq.objectives import runner


def looped(z: Tensor) -> Tensor:
    total = torch.tensor(0.0)
    for i in range(3):
        total = total * 0.5 + z[i]
    return total


class Recurrent:
    """Torch's own recurrent layers refuse a hidden dimension."""

    def __init__(self, batch_first: bool) -> None:
        torch.manual_seed(0)
        self.layer = nn.LSTM(1, 2, batch_first=batch_first).double()

    def __call__(self, z: Tensor) -> Tensor:
        _, (state, _) = self.layer(z.reshape(-1, 3, 1) if self.layer.batch_first else z.reshape(3, 1))
        return state.sum(-1).reshape(z.shape[:-1])


def written(z: Tensor) -> Tensor:
    memory = torch.zeros(3)
    memory[0] = z[..., 0]
    memory[1] = z[..., 2]
    return memory.sum()


class Keeping:
    """Keeps what it has drawn, to be looked at after the step."""

    def __call__(self, z: Tensor) -> Tensor:
        self.kept = z
        return z[0] - z[1]


NORMALISE = nn.BatchNorm1d(1).double().train()
# What an observation reads, and whether values stay in torch: else there is nothing to evaluate at other values.
PROGRAMS: dict[str, tuple[Any, bool]] = {
    "right": (lambda z: z[..., 0] - z.sum(-1) * z[..., 1], True),
    "left": (lambda z: z[0] - z.sum() * z[1], True),
    "looped": (looped, True),
    # torch.stack does not broadcast.
    "stacked": (lambda z: torch.stack([z[..., 0], torch.tensor(0.4), z[..., 1]], -1).sum(-1), True),
    "flattened": (lambda z: z.reshape(-1)[0], True),
    "LSTM over rows": (Recurrent(True), True),
    "LSTM": (Recurrent(False), True),
    "written": (written, True),
    "batch norm": (lambda z: NORMALISE(z.reshape(3, 1)).reshape(3)[0], True),
    "keeps values": (Keeping(), True),
    "boolean mask": (lambda z: z[z > 0].sum() * 0.5, False),
}


@pytest.mark.parametrize("estimator", [None, AllAction(exact=True)], ids=["default", "exact"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_costs_at_other_values_are_those_of_runs(name: str, estimator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (mean, is_cut), found, flips = PROGRAMS[name], list[Any](), runner.flipped_costs
    model = seeing(mean, 3)

    def spied(plan: Any, values: Any, rollout: Any) -> Any:
        tables = flips(plan, values, rollout)
        found.append((tables["z"], plan.flips.costs["z"], values.traced[0].run.sites["z"].value.detach()))
        return tables

    monkeypatch.setattr(runner, "flipped_costs", spied)
    unbiased(TraceBackpropQ_ELBO(1, estimator=estimator), model, coins_guide, steps=5)
    assert bool(found) == is_cut
    for table, costs, value in found:
        assert [*costs] == ["-log p(x)"]
        for d, k in itertools.product(range(3), range(2)):
            other = value.clone()
            other[d] = k
            alone = poutine.trace(poutine.condition(model, {"z": other})).get_trace()
            alone.compute_log_prob()
            torch.testing.assert_close(table[0, d, k], -alone.nodes["x"]["log_prob"].detach(), rtol=0, atol=1e-12)
