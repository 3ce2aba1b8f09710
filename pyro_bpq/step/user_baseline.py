"""The user's own prediction of the cost-to-go, from Pyro's baseline options."""

from __future__ import annotations

from torch import Tensor

from pyro_bpq.step.asked import RolloutTensors


def of_class(signals: RolloutTensors, c: int) -> Tensor:
    """The predictions for the sites of a class, ``(G, M, plates)`` in nats, with their gradient."""
    return signals.batches[c].baseline
