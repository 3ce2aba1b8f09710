r"""What a step worked on, kept for what learns from it later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyro_bpq.critics.bank import CriticBank
from pyro_bpq.step.exact_sum import ExactSum, sum_step
from pyro_bpq.step.program_order import RunInOrder, order_step
from pyro_bpq.step.signals import Signals
from pyro_bpq.step.surrogate import Learning, Step, step
from pyro_bpq.tracing.traced_run import TracedRun


@dataclass(frozen=True, eq=False)
class Staged:
    """What a step works on.

    Args:
        traced: Its runs.
        programs: Model, guide, arguments and keyword arguments of each run.
        signals: Their tensors.
        result: What the step yielded, with all its particles; ``None`` before.
    """

    traced: tuple[TracedRun, ...]
    programs: tuple[Any, ...]
    signals: Signals
    result: Step | None = None

    def again(self, bank: CriticBank) -> Signals:
        """The tensors with the critics as they are now; nothing is built."""
        return Signals(self.signals.layout, self.signals.rollout, self.signals.tables, bank, False)


@dataclass(frozen=True, eq=False)
class Observation:
    """The runs of a step, and what their sites are told.

    Args:
        runs: One run for each particle, or a single one of all.
        items: One for all particles; or one for each, where sampled values steer the program.
        ordered: In place of items, what each run tells in program order.
        summed: In place of items, the loss summed over all values.
    """

    runs: tuple[TracedRun, ...]
    items: tuple[Staged, ...] = ()
    ordered: tuple[RunInOrder, ...] = ()
    summed: ExactSum | None = None

    @property
    def loss(self) -> Tensor:
        """The loss, summed over draws, a scalar in nats; its gradient has no meaning."""
        if self.summed is not None:
            return self.summed.loss.detach()
        losses = [traced.run.loss for traced in self.runs]
        return sum(losses[1:], losses[0])

    def step(self, loss: Tensor, bank: CriticBank, learning: Learning, is_learning: bool = False) -> Step:
        """The step on these runs: with the graph, in program order, or summed over all values."""
        if self.summed is not None:
            return sum_step(self.summed, is_learning)
        if self.ordered:
            return order_step(self.ordered, loss, bank, learning, is_learning)
        return step([item.signals for item in self.items], loss, bank, learning, is_learning)


class Transient:
    """What the last step worked on: it belongs to the process, copies and pickles are empty."""

    def __init__(self, items: Sequence[Any] = ()) -> None:
        self.items: tuple[Any, ...] = tuple(items)

    def __deepcopy__(self, memo: Any) -> Transient:
        return Transient()

    def __reduce__(self) -> tuple[Any, ...]:
        return Transient, ()
