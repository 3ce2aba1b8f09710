r"""Slow copies of parameters, from which targets are formed.

The paper keeps a slow part ``θ`` and the rest ``Δ`` of every parameter; the current one is ``θ + Δ``. After each
change of the parameter

    Δ ← Δ + change,   θ ← θ + α Δ,   Δ ← (1 - α) Δ.

Written with the current parameter ``w = θ + Δ`` this is the soft update ``θ ← (1 - α) θ + α w``.

References:
    | Backprop-Q (Xu et al., 2018), Appendix, Details for Slow-tracking Target
    | Continuous control with deep reinforcement learning (Lillicrap et al., 2016)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pyro_bpq.errors import OptionError

__all__ = ["SlowTracking", "track", "two_part_step"]


@dataclass(frozen=True)
class SlowTracking:
    """Targets are formed with slowly tracking copies of the critics.

    Args:
        rate: Weight ``α`` of the current parameters, in ``(0, 1]``, per step of the critics' optimiser; 1 is no
            tracking.
        guide: Whether replay also redraws from a slowly tracking copy of the guide's parameters, updated once per
            training step with the same rate. Critics then learn the costs under that slower guide.

    Raises:
        OptionError: If an option is out of range.
    """

    rate: float = 0.05
    guide: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.rate <= 1.0:
            raise OptionError(f"SlowTracking(rate={self.rate!r}): write a number in (0, 1].")


def two_part_step(theta: Tensor, delta: Tensor, change: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """The paper's form of one update.

    Args:
        theta: Slow part ``θ``.
        delta: The rest ``Δ``.
        change: What the optimiser adds to the parameter.
        rate: Weight ``α``.

    Returns:
        The new ``θ`` and ``Δ``.
    """
    delta = delta + change
    return theta + rate * delta, (1.0 - rate) * delta


@torch.no_grad()
def track(slow: Sequence[Tensor], current: Sequence[Tensor], rate: float) -> None:
    """Moves slow copies towards the current parameters, in place: ``θ ← (1 - α) θ + α w``."""
    if slow:
        # n_averaged is not read by this rule.
        update: Any = get_ema_multi_avg_fn
        update(1.0 - rate)(list(slow), list(current), torch.ones(()))
