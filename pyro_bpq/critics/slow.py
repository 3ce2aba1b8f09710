r"""Slow copies of parameters, from which targets are computed.

The paper splits every parameter into a slow part ``θ`` and a rest ``Δ``; the current parameter is ``θ + Δ``. After each
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


@dataclass(frozen=True)
class SlowTracking:
    """Option to compute targets from copies of the critics that track them slowly.

    Args:
        rate: Weight ``α`` of the current parameters, in ``(0, 1]``, per step of the critics' optimiser; 1 turns
            tracking off.
        guide: Whether replay also redraws from a slowly tracking copy of the guide's parameters. That copy is updated
            once per training step with the same rate. Critics then learn the costs under the slower guide.

    Raises:
        OptionError: If an option is out of range.
    """

    rate: float = 0.05
    guide: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.rate <= 1.0:
            raise OptionError(f"SlowTracking(rate={self.rate!r}): write a number in (0, 1].")


@torch.no_grad()
def track(slow: Sequence[Tensor], current: Sequence[Tensor], rate: float) -> None:
    """Moves slow copies towards the current parameters, in place: ``θ ← (1 - α) θ + α w``."""
    if slow:
        # The rule does not read its argument n_averaged, so any tensor will do.
        update: Any = get_ema_multi_avg_fn
        update(1.0 - rate)(list(slow), list(current), torch.ones(()))
