r"""Baselines of steered programs as plain numbers: a step of few sites is too short for calls of tensor operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from pyro_bpq.estimators.baselines import TrimmedBaseline


class RecentCosts:
    """The last costs of each site, in nats, and the baseline of :class:`~pyro_bpq.estimators.TrimmedBaseline`.

    Args:
        max_idle: Number of sites that are remembered besides those of the last step.
    """

    def __init__(self, max_idle: int) -> None:
        self.max_idle = max_idle
        # The sites that were used last are at the end.
        self._costs: dict[str, list[float]] = {}
        self._baselines: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"RecentCosts({len(self._costs)} sites)"

    def baselines(self, names: Iterable[str]) -> list[float]:
        """The baseline of each site; zero for new ones."""
        return [self._baselines.get(name, 0.0) for name in names]

    def add(self, names: Sequence[str], cost: float) -> None:
        """Adds the cost that all of these sites had."""
        for name in names:
            costs = [*self._costs.pop(name, ())[1 - TrimmedBaseline.recent :], cost]
            self._costs[name], self._baselines[name] = costs, _centre(costs)
        surplus = len(self._costs) - self.max_idle - len(names)
        for name in list(islice(self._costs, max(surplus, 0))):
            del self._costs[name], self._baselines[name]

    def state_dict(self) -> dict[str, list[float]]:
        """The costs by site."""
        return {name: list(costs) for name, costs in self._costs.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self._costs = {name: list(costs) for name, costs in state.items()}
        self._baselines = {name: _centre(costs) for name, costs in self._costs.items()}


def _centre(costs: Sequence[float]) -> float:
    """The median of few costs, the trimmed mean of all of them."""
    ordered, cut = sorted(costs), TrimmedBaseline.cut
    if len(costs) < TrimmedBaseline.recent:
        return ordered[(len(costs) - 1) // 2]
    return sum(ordered[cut:-cut]) / (len(costs) - 2 * cut)
