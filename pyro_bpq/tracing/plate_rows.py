"""Finds rows of a plate that meet: one reads another, although a plate declares rows independent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from pyro_bpq.rollout.features import batch_of
from pyro_bpq.tracing.elements import NONE, ElementTracker

# Plates, each by its name and its dimension.
_Plates = tuple[tuple[str, int], ...]


class PlateRows:
    """Follows the rows of latent sites in plates to the costs in the same plates."""

    def __init__(self, elements: ElementTracker) -> None:
        self.elements = elements
        self.plates: dict[_Plates, tuple[int, ...]] = {}

    def drawn(self, name: str, fn: Any, value: Tensor, frames: Sequence[Any]) -> None:
        """Starts to follow the rows of a newly drawn site."""
        batch = batch_of(fn, value)
        plates = tuple(sorted((frame.name, frame.dim) for frame in frames))
        if not plates or max(-dim for _, dim in plates) > len(batch):
            return
        sizes = tuple(batch[dim] for _, dim in plates)
        # Other plate sizes number their rows differently: such sites cannot be followed as one source.
        if math.prod(sizes) == 1 or self.plates.setdefault(plates, sizes) != sizes:
            return
        rows = _rows(batch, plates).reshape(*batch, *(1,) * (value.dim() - len(batch)))
        self.elements.follow_rows(plates, name, value, np.broadcast_to(rows, tuple(value.shape)))

    def meeting(self, costs: Iterable[tuple[str, Any]]) -> dict[str, tuple[str, ...]]:
        """Finds the costs in which a row reads another row of a site in the same plates, with these plates.

        It reports only certain cases: after an unknown operator, it reports nothing.
        """
        found = {}
        for cost, site in costs if self.plates else ():
            where = {(frame.name, frame.dim) for frame in site["cond_indep_stack"] if frame.vectorized}
            met = [p for p, sizes in self.plates.items() if where.issuperset(p) and self._meet(p, sizes, site)]
            if met:
                found[cost] = tuple(dict.fromkeys(name for plates in met for name, _ in plates))
        return found

    def _meet(self, plates: _Plates, sizes: tuple[int, ...], site: Any) -> bool:
        positions, shape = self.elements.positions(plates, site["log_prob"]), site["log_prob"].shape
        if positions is None or any(-dim > len(shape) for _, dim in plates):
            return False
        if tuple(shape[dim] for _, dim in plates) != sizes:
            return False
        return bool(((positions != NONE) & (positions != _rows(shape, plates))).any())


def _rows(batch: Sequence[int], plates: _Plates) -> np.ndarray:
    """Returns, for each element of a batch, the number of its row in the given plates."""
    rows = np.zeros((1,) * len(batch), dtype=np.int32)
    for _, dim in plates:
        size = batch[dim]
        rows = rows * size + np.arange(size, dtype=np.int32).reshape(-1, *(1,) * (-dim - 1))
    return np.broadcast_to(rows, tuple(batch))
