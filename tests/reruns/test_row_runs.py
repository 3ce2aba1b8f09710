"""Runs at many values: each way gives the costs of single runs, or says that it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import repeat, trained
from torch import Tensor, nn

from pyro_bpq import AllAction, TraceBackpropQ_ELBO
from pyro_bpq.reruns import row_runs as module
from pyro_bpq.reruns.comparisons import agree
from pyro_bpq.reruns.row_runs import RowProgram, Rows, Way
from pyro_bpq.testing import assert_unbiased


def guide() -> None:
    logits = pyro.param("q", torch.tensor([0.3, -0.5, 0.9]))
    pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))


def coins() -> Tensor:
    z: Tensor = pyro.sample("z", dist.Bernoulli(torch.tensor([0.1, 0.6, 0.3])).to_event(1))
    return z


def observed(mean: Tensor) -> None:
    pyro.sample("x", dist.Normal(mean, 1.0), obs=torch.tensor(0.7))


def reads(mean: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    return lambda: observed(mean(coins()))


def looped() -> None:
    z, total = coins(), torch.tensor(0.0)
    for i in range(3):
        total = total * 0.5 + z[i]
    observed(total)


class Recurrent(nn.Module):
    """Torch's own recurrent layers refuse a hidden dimension."""

    def __init__(self, kind: type[nn.Module], batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer: Any = kind(1, 2, batch_first=batch_first).double()

    def __call__(self) -> None:
        z = coins()
        _, state = self.layer(z.reshape(-1, 3, 1) if self.layer.batch_first else z.reshape(3, 1))
        state = state[0] if isinstance(state, tuple) else state
        observed(state.sum(-1).reshape(z.shape[:-1]))


def written() -> None:
    z, memory = coins(), torch.zeros(3)
    memory[0] = z[..., 0]
    memory[1] = z[..., 2]
    observed(memory.sum())


def noisy_or() -> None:
    z = coins()
    fails = (1.0 - 0.8 * z[0]) * (1.0 - 0.5 * z[1]) * (1.0 - 0.7 * z[2])
    pyro.sample("x", dist.Bernoulli(1.0 - 0.9 * fails), obs=torch.tensor(1.0))


class Keeping:
    """Keeps what it has drawn, to be looked at after the step."""

    def __call__(self) -> None:
        self.kept = coins()
        observed(self.kept[0] - self.kept[1])


NORMALISE = nn.BatchNorm1d(1).double().train()
PROGRAMS: dict[str, tuple[Any, Way | None]] = {
    "right": (reads(lambda z: z[..., 0] - z.sum(-1) * z[..., 1]), Way.BROADCAST),
    "left": (reads(lambda z: z[0] - z.sum() * z[1]), Way.HIDDEN),
    "looped": (looped, Way.HIDDEN),
    "flattened": (reads(lambda z: z.reshape(-1)[0]), Way.HIDDEN),
    "LSTM over rows": (Recurrent(nn.LSTM, True), Way.BROADCAST),
    "LSTM": (Recurrent(nn.LSTM, False), Way.SINGLE),
    "written": (written, Way.SINGLE),
    "batch norm": (reads(lambda z: NORMALISE(z.reshape(3, 1)).reshape(3)[0]), Way.SINGLE),
    "stack": (reads(lambda z: torch.stack([z[..., 0], z[..., 1]])[0]), Way.BROADCAST),
    "noisy or": (noisy_or, Way.HIDDEN),
    "keeps values": (Keeping(), Way.SINGLE),
    # Values leave torch: there is no extra run at all.
    "boolean mask": (reads(lambda z: z[z > 0].sum() * 0.5), None),
}


def train(model: Any, **options: Any) -> TraceBackpropQ_ELBO:
    return trained(TraceBackpropQ_ELBO(1, **options), model, guide, steps=5)


def ways(elbo: TraceBackpropQ_ELBO) -> list[Way]:
    return [way for way, _ in elbo.runner.row_runs._ways.values()]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("estimator", [None, AllAction(exact=True)], ids=["default", "exact"])
def test_each_program_runs_in_the_fastest_way_that_is_right(name: str, estimator: Any) -> None:
    model, way = PROGRAMS[name]
    elbo = train(model, estimator=estimator)
    assert ways(elbo) == [way] * (way is not None)
    elbo.eval()
    assert_unbiased(elbo, model, guide)


@pytest.mark.parametrize("name", ["left", "looped", "flattened"])
def test_broadcast_rows_that_are_believed_bias_these_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the proof, and with rows taken from whatever the costs hold."""

    def believed(self: RowProgram, rows: Rows) -> dict[str, Tensor]:
        costs = self.costs({**rows.fixed, **rows.varied}, rows.number)
        return {name: cost.reshape(-1)[:1].expand(rows.number) for name, cost in costs.items()}

    monkeypatch.setattr(module, "_prove", lambda *args: Way.BROADCAST)
    monkeypatch.setattr(module, "agree", lambda *args: True)
    monkeypatch.setattr(RowProgram, "_broadcast", believed)
    model, _ = PROGRAMS[name]
    elbo = train(model)
    assert ways(elbo) == [Way.BROADCAST]
    elbo.eval()
    with pytest.raises(AssertionError, match="biased"):
        assert_unbiased(elbo, model, guide)


# One program at a time.


def test_rounding_agrees_and_a_mixed_mean_does_not() -> None:
    """A mean over 20,000 rows changes each cost by less than rounding may."""
    generator = torch.Generator().manual_seed(0)
    costs = torch.rand(20_000, generator=generator, dtype=torch.float32)
    noise = torch.rand(20_000, generator=generator, dtype=torch.float32) - 0.5
    assert agree([costs * (1.0 + 1e-6 * noise)], [costs])
    assert not agree([costs + 1e-5 * noise.abs()], [costs])
    assert not agree([costs + 1e-3 * (torch.arange(20_000) == 7)], [costs])
    assert agree([torch.tensor([torch.inf, torch.nan])], [torch.tensor([torch.inf, torch.nan])])
    assert not agree([torch.tensor([torch.inf])], [torch.tensor([1.0])])
    assert not agree([torch.zeros(2)], [torch.zeros(1, 2)])


def test_a_program_that_needs_all_values_of_one_shape_gets_them_repeated() -> None:
    """Only the last site differs between rows, and ``torch.stack`` does not broadcast."""

    def stacks() -> None:
        values = [pyro.sample(f"z_{i}", dist.Bernoulli(0.4)) for i in range(3)]
        pyro.sample("x", dist.Normal(torch.stack(values, -1).sum(-1), 1.0), obs=torch.tensor(0.3))

    def each() -> None:
        q = pyro.param("q", torch.tensor([0.3, -0.5, 0.2]))
        for i in range(3):
            pyro.sample(f"z_{i}", dist.Bernoulli(logits=q[i]))

    pyro.clear_param_store()
    elbo = TraceBackpropQ_ELBO(num_particles=1)
    repeat(3, elbo.loss_and_grads, stacks, each)
    assert ways(elbo) == [Way.REPEATED]
    assert_unbiased(elbo.eval(), stacks, each)
