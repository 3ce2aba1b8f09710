"""Critics that are worth nothing, or worse, do no harm: total variance next to the plain baseline's.

Guides stand still, so that running moments settle; variances are exact, by enumeration, at frozen statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import fresh, stepped
from torch import Tensor, nn

from pyro_bpq import AllAction, LeaveOneOut, RunningBaseline, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.critics.nets import CriticShape
from pyro_bpq.testing import expected_moments


class Fixed(nn.Module):
    """A table that nothing trains."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.idle = nn.Parameter(torch.zeros(table.shape[0], 1, 1))

    def forward(self, context: Tensor, cells: Tensor) -> Tensor:
        rows = cells.unsqueeze(-1).expand(-1, -1, self.table.shape[-1])
        return self.table.gather(1, rows) + 0.0 * self.idle


@dataclass(frozen=True)
class PlantedCritic:
    """Noise in units of the spread of the targets; the last value of a site, a rare one, gets ``-rare`` on top."""

    noise: float
    rare: float = 0.0

    uses_cells: ClassVar[bool] = True

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        table = self.noise * torch.randn(shape.sites, shape.cells, shape.outputs, generator=generator)
        if shape.components:
            table[..., 1:].unflatten(-1, (shape.components, shape.cardinality))[..., -1] -= self.rare
        return Fixed(table)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rare_logits(*shape: int, seed: int) -> Tensor:
    logits = numbers(*shape, seed=seed)
    logits[..., -1] = -3.5
    return logits


def table_program(parents: dict[str, list[str]], values: int, is_fitted: bool = False) -> tuple[Any, Any]:
    """Model and guide of categorical sites on a graph whose last values are rare, and one cost that reads all of them.

    The cost of the last value of a site is large, or, where the guide fits the model, cancels ``log q`` of every state
    but for a remainder: then the plain estimator is a good one, and no part of its sum may be taken out of it.
    """
    names, seeds = list(parents), {name: i for i, name in enumerate(parents)}
    cost = numbers(*(values,) * len(names), seed=99)
    if is_fitted:
        cost = 0.3 * cost
        for name, above in parents.items():
            log_q = rare_logits(*(values,) * (len(above) + 1), seed=seeds[name]).log_softmax(-1)
            shape = [values if other in (*above, name) else 1 for other in names]
            cost = cost - log_q.reshape(shape)
    else:
        for axis in range(len(names)):
            cost.select(axis, values - 1).add_(4.0)

    def model() -> None:
        found = [pyro.sample(name, dist.Categorical(logits=torch.zeros(values))) for name in names]
        pyro.factor("cost", -cost[tuple(found)])

    def guide() -> None:
        found: dict[str, Tensor] = {}
        for name, above in parents.items():
            start = rare_logits(*(values,) * (len(above) + 1), seed=seeds[name])
            logits = pyro.param(f"q_{name}", start)
            found[name] = pyro.sample(name, dist.Categorical(logits=logits[tuple(found[p] for p in above)]))

    return model, guide


def chain(length: int) -> dict[str, list[str]]:
    return {f"x{t}": [f"x{t - 1}"] if t else [] for t in range(length)}


PROGRAMS = {
    "chain": table_program(chain(3), 3),
    "long chain": table_program(chain(5), 2),
    "short chain": table_program(chain(3), 2),
    "fitted chain": table_program(chain(3), 2, is_fitted=True),
    "fork": table_program({"x": [], "y": ["x"], "z": ["x"]}, 2),
}
CRITICS = {
    "noise": PlantedCritic(1.0),
    "loud noise": PlantedCritic(5.0),
    "wrong at rare values": PlantedCritic(0.3, 3.0),
    "very wrong at rare values": PlantedCritic(0.3, 20.0),
}
PAIRS = [(name, 1) for name in PROGRAMS if name != "short chain"]
PAIRS += [("short chain", 2), ("fitted chain", 2), ("fork", 2)]


def variance(elbo: TraceBackpropQ_ELBO, program: tuple[Any, Any], steps: int) -> float:
    """Total variance of the gradient after more steps, at frozen statistics."""
    found = expected_moments(stepped(steps, elbo, *program).eval(), *program).total_variance
    elbo.train()
    return found


def excess(name: str, critic: PlantedCritic, particles: int, **options: Any) -> float:
    """Variance of the all-action estimator over that of the plain baseline, minus 1, once both have settled."""
    program = PROGRAMS[name]
    fresh(3)
    ours = TraceBackpropQ_ELBO(num_particles=particles, estimator=AllAction(**options), critic=critic)
    baseline = LeaveOneOut() if particles > 1 else RunningBaseline()
    rival = TraceBackpropQ_ELBO(num_particles=particles, estimator=ScoreFunction(baseline), critic=None)
    stepped(700 // particles, ours, *program)
    assert ours.network is not None and ours.network.learned
    stepped(300 if particles == 1 else 2, rival, *program)
    number = 2 if particles > 1 or name == "long chain" else 5
    found = mean(variance(ours, program, 50) for _ in range(number))
    # Leave-one-out has nothing to learn.
    plain = mean(variance(rival, program, 50) for _ in range(number if particles == 1 else 1))
    return found / plain - 1.0


@pytest.mark.slow
@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize(("name", "particles"), PAIRS)
def test_adaptive_scales_make_bad_critics_harmless(name: str, particles: int, critic: str) -> None:
    assert excess(name, CRITICS[critic], particles) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "fork"])
def test_bad_critics_harm_where_scales_do_not_adapt(name: str) -> None:
    assert excess(name, CRITICS["very wrong at rare values"], 1, adaptive=False) > 0.5
