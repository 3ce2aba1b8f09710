"""The user's own prediction of the cost-to-go, from Pyro's baseline options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from pyro_bpq.step.signals import Signals

__all__ = ["of_class"]


def of_class(signals: Signals, c: int) -> Tensor:
    """The predictions for the sites of a class, ``(G, M, plates)`` in nats, with their gradient."""
    return signals.batches[c].baseline
