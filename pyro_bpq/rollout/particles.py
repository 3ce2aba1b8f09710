r"""Settings for how the particles of a step run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Particles:
    """Says how particles run: one after the other, in a plate of their own, or in a hidden dimension.

    Args:
        number: Number of particles ``M``.
        is_vectorized: Whether all particles run in one call, in an outermost plate that the programs see.
        is_hidden: Whether all particles run in one call, in a dimension that the programs do not see.
        nesting: Bound on the number of nested plates, including the plate of the particles.
        sums: Whether they are no draws, but the values of all sites, one in each, over which the loss is summed.
    """

    number: int = 1
    is_vectorized: bool = False
    is_hidden: bool = False
    nesting: float = float("inf")
    sums: bool = False

    @property
    def draws(self) -> int:
        """Number of draws whose mean the loss is."""
        return 1 if self.sums else self.number

    @property
    def has_plate(self) -> bool:
        """Whether the particles have a plate of their own."""
        return self.is_vectorized and self.number > 1
