r"""What a step is for, and what it draws from."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mode:
    """What a step is for.

    Args:
        learning: Whether anything learns from it.
        num_steps: Number of steps taken.
        by_value: Whether all gradients come by way of ``log q`` of every value, as what is kept for later needs it.
        first_order: Whether critics learn from slopes of the costs, too.
        goes_back: Whether the step itself asks once for the gradients of its loss: slopes may be found on the way.
        has_ranks: Whether other processes learn along.
        is_checked: Whether particles that run in a hidden dimension are looked at for what they leave behind.
        is_recorded: Whether operators of the step are recorded: findings of earlier steps are then taken as they are.
        may_order: Whether the step needs nothing but costs in program order, where that is all that is known.
        shows: Whether it is asked what sites are told, so that a graph is needed in any case.
    """

    learning: bool = False
    num_steps: int = 0
    by_value: bool = False
    first_order: bool = False
    goes_back: bool = False
    has_ranks: bool = False
    is_checked: bool = False
    is_recorded: bool = False
    may_order: bool = False
    shows: bool = False


class NoiseSource:
    """Generators for what an objective draws itself; the global generators are left alone.

    Args:
        seed: Where they start from.

    Attributes:
        number: How many there have been.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.number = seed, 0

    def __repr__(self) -> str:
        return f"NoiseSource(seed={self.seed}, number={self.number})"

    def __call__(self) -> torch.Generator:
        """The next generator."""
        self.number += 1
        return torch.Generator().manual_seed(self.seed_of(self.number))

    def seed_of(self, number: int) -> int:
        """Seed of a generator, counted from 1."""
        return (self.seed * 7919 + 1) * 1_000_003 + number
