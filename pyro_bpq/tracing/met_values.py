r"""The plain values that steps have read so far: a new one may switch a part of the program on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# Largest number of values of a kind that are told apart.
_MOST = 32


@dataclass(frozen=True)
class MetValues:
    """The plain values of steps, by kind.

    Args:
        known: The values that were read so far.
        counts: Whether numbers differ in many steps. The program is then looked at more often.
        has_switched: Whether values are new since a run was tracked last, so that no step went on with what was known.
    """

    known: Mapping[str, frozenset[tuple[Any, ...]]] = field(default_factory=dict)
    counts: bool = False
    has_switched: bool = False

    def after(self, kind: str, values: tuple[Any, ...], has_counters: bool) -> MetValues:
        """These values and those of one more step; the same object where they are known.

        Where values differ in many steps, only the first of them count as new.
        """
        known = self.known.get(kind, frozenset())
        if values in known:
            return self if self.counts or not has_counters else replace(self, counts=True)
        if len(known) >= _MOST:
            return self if self.counts else replace(self, counts=True)
        found = {**self.known, kind: known | {values}}
        return replace(self, known=found, counts=self.counts or has_counters, has_switched=bool(known))

    def seen(self) -> MetValues:
        """The same after a tracked run."""
        return replace(self, has_switched=False) if self.has_switched else self
