"""What a step is told of learning, and what it yields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.critics.blocks import Write
from pyro_bpq.rollout.distributed import Ranks

# Estimator and detached diagnostics, by name of the site.
Info = dict[str, dict[str, Any]]
# The cost in nats that a step in program order adds to the recent costs of each site.
Seen = Mapping[str, float]


@dataclass
class Notes:
    """What a step notes of what it learns: nothing of it takes effect before the step is over."""

    writes: list[Write] = field(default_factory=list)  # New running statistics
    info: Info = field(default_factory=dict)

    def show(self, site: str, **found: Any) -> None:
        """Adds diagnostics of a site."""
        self.info.setdefault(site, {}).update(found)


def total(values: Sequence[Tensor]) -> Tensor:
    """The sum of tensors; zero for none."""
    return sum(values[1:], values[0]) if values else torch.zeros(())


@dataclass(frozen=True)
class Learning:
    """How the critics' targets and loss are formed."""

    lam: float | Tensor = 0.97  # Weight of the return against the critic
    gamma: float = 1.0  # Discount per level
    level_weight: float = 0.1  # Weight of the level against differences within a data point
    slow: bool = False  # Whether slow copies of the critics form the targets
    num_steps: int = 0  # Number of steps taken, for estimators with a schedule
    ranks: Ranks | None = None  # The processes that learn together, or `None`
    is_recorded: bool = False  # Whether the step's operators are recorded; the loss is then not checked for finiteness
    # Step size of a backward sweep before the gradient; `None` for a regression on all targets at once
    sweep: float | None = None


@dataclass(frozen=True)
class Step:
    """The result of one step."""

    loss: Tensor  # The loss of the runs in nats; its gradient has no meaning
    surrogate: Tensor  # Sum of the sites' surrogate terms over particles; only its gradient has meaning
    critic_loss: Tensor | None = None  # Regression loss of the critics, or `None`
    writes: list[Write] = field(default_factory=list)  # New running statistics, to be committed after the step
    info: Info = field(default_factory=dict)
    learns: bool = False  # Whether the step counts as a training step
    # The costs through which pathwise gradients flow, summed over particles
    paths: Tensor = field(default_factory=lambda: torch.zeros(()))
    # What is added to the recent costs of sites
    seen: Seen = field(default_factory=dict)
