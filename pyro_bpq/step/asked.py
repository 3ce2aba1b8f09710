"""What a signal may read: the tensors of a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_bpq.batching.layout import Layout
from pyro_bpq.batching.site_batch import SiteBatch
from pyro_bpq.rollout.runs import Rollout
from pyro_bpq.step.critic_step import CriticBatch


class RolloutTensors(Protocol):
    """The tensors of a rollout, as :class:`~pyro_bpq.step.signals.Signals` has them.

    Attributes:
        layout: The batching of its graph.
        rollout: Its runs.
        batches: Tensors of its sites, by class.
        costs: Stacked costs, by class of costs.
        critics: The critics, evaluated, by group of Q-nodes.
        rerun: Runs the program again, or ``None`` where that cannot be done.
        generator: Noise of the estimators.
        shared: What signals of several classes have in common, by name of the signal.
    """

    layout: Layout
    rollout: Rollout
    batches: list[SiteBatch]
    costs: list[Tensor]
    critics: dict[int, CriticBatch]
    rerun: Any
    generator: torch.Generator | None
    shared: dict[str, Any]

    @property
    def q_values(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """``q_X(x)`` with the critics' gradient, and its expectation, ``(Q, M, plates)`` by group."""
        ...

    def ahead(self, means: Mapping[int, Tensor], gamma: float) -> dict[int, Tensor]:
        """Expectations of Q-functions with their exact immediate costs, by group."""
        ...
