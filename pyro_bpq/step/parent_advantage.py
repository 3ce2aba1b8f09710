"""The advantage of a site: its Q-function, or its lambda-return, minus what its parents' critics predicted of it."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.estimators.parent_advantage import ParentAdvantage
from pyro_bpq.step.asked import RolloutTensors
from pyro_bpq.step.returns import by_name
from pyro_bpq.targets.advantages import advantages


def of_class(signals: RolloutTensors, c: int) -> Tensor | None:
    """The advantages of the sites of a class, ``(G, M, plates)`` in nats, detached; ``None`` without critics.

    Raises:
        PlateError: If the rows of a site share one prediction, see :func:`~pyro_bpq.targets.advantages.advantages`.
        UnsupportedProgramError: If sampled values steer the program.
    """
    layout, batch = signals.layout, signals.batches[c]
    estimator, names = layout.classes[c].spec.estimator, layout.classes[c].names
    assert isinstance(estimator, ParentAdvantage)
    if layout.is_steered:
        # What comes after a site, and with it the sites that count as siblings, follows from its value.
        raise UnsupportedProgramError(
            f"Sites {', '.join(map(repr, names))}: sampled values steer this program, so which sites a parent's critic "
            "predicts besides follows from the value; use LambdaReturn() or ScoreFunction(RunningBaseline()) there."
        )
    if layout.network is None or not signals.critics:
        return None
    key = f"advantage {estimator.lam}"
    if key not in signals.shared:
        groups = {g: critic.group for g, critic in signals.critics.items()}
        values, means = signals.q_values
        detached = {g: value.detach() for g, value in values.items()}
        q, costs, expected = by_name(layout, signals.costs, groups, detached, signals.ahead(means, 1.0), 1.0)
        # All classes share one backward pass.
        signals.shared[key] = advantages(layout.network, q, costs, estimator.lam, 1.0, expected)
    found = signals.shared[key]
    shape, zero = batch.batch_shape, signals.costs[0].new_zeros(())
    return torch.stack([found.get(name, zero).expand(shape) for name in names])
