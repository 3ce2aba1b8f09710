r"""What a step is for, and what it prepares: ``Mode``, ``Staged``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyro_bpq.step.signals import Signals
from pyro_bpq.step.values import Step
from pyro_bpq.tracing.traced_run import TracedRun


@dataclass(frozen=True)
class Mode:
    """What a step is for."""

    learning: bool = False  # whether anything learns from it
    num_steps: int = 0  # number of steps taken
    # Whether all gradients come by way of ``log q`` of every value, as what is kept for later needs it.
    by_value: bool = False
    first_order: bool = False  # whether critics learn from slopes of the costs, too
    # Whether the step itself asks once for the gradients of its loss: slopes may be found on the way.
    goes_back: bool = False
    has_ranks: bool = False  # whether other processes learn along
    # Whether particles that run in a hidden dimension are looked at for what they leave behind.
    is_checked: bool = False
    # Whether operators of the step are recorded: findings of earlier steps are then taken as they are.
    is_recorded: bool = False
    # Whether the step needs nothing but costs in program order, where that is all that is known.
    may_order: bool = False
    shows: bool = False  # whether somebody wants to see the signals of sites, so that a graph is needed in any case

    @property
    def asks_for_more(self) -> bool:
        """Whether it needs more than a loss and its gradient."""
        return self.shows or self.by_value or not self.may_order


@dataclass(frozen=True, eq=False)
class Staged:
    """Runs of like structure, and the signals of their sites."""

    traced: tuple[TracedRun, ...]  # the runs
    programs: tuple[Any, ...]  # model, guide, arguments and keyword arguments of each run
    signals: Signals  # their tensors
    result: Step | None = None  # what the step yielded, with all its particles; ``None`` before


class Transient:
    """Holds what belongs to the process: copies and pickles are empty."""

    def __init__(self, items: Sequence[Any] = ()) -> None:
        self.items: tuple[Any, ...] = tuple(items)

    def __deepcopy__(self, memo: Any) -> Transient:
        return Transient()

    def __reduce__(self) -> tuple[Any, ...]:
        return Transient, ()
