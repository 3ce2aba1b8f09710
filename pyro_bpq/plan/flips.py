r"""Which sites the extra run of the model flips, in which rows, and which of its costs are read off.

Every component of a site is set to each of its other values, while everything else keeps its sampled value. Sites that
no evaluated cost reads together are flipped in the same rows. The others get rows of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.graph.scg import StochasticComputationGraph, cost_of_guide, cost_of_model
from pyro_bpq.rollout.features import Components


@dataclass(frozen=True)
class FlipPlan:
    """Which rows of the extra run flip which site."""

    start: Mapping[str, int]  # first row of each flipped site; row 0 is the sample
    rows: int  # number of rows in all
    costs: Mapping[str, tuple[str, ...]]  # for each flipped site the model's sites whose costs are read off
    _steps: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def steps(self, name: str, split: Components, device: torch.device) -> Tensor:
        """How far each row moves each component of a site, ``(rows, D)``: the same in every step."""
        key = (name, split.size, split.cardinality, device)
        if key not in self._steps:
            others = split.cardinality - 1
            step = torch.arange(split.size * others)
            delta = torch.zeros(self.rows, split.size, dtype=torch.long if others >> 15 else torch.int16)
            delta[self.start[name] + step, step // others] = (step % others + 1).to(delta.dtype)
            self._steps[key] = delta.to(device)
        return self._steps[key]


def immediate_model_costs(graph: StochasticComputationGraph) -> dict[str, tuple[str, ...]]:
    """For each stochastic node its immediate costs of the model that can be read off row by row.

    They are immediate, belong to another site of the model, and have all plates of the node. So all rows of the node
    can be flipped at once: each row of the cost depends on one row of the node only.
    """
    found = {}
    for name, costs in graph.last_costs.items():
        plates = set(graph.node(name).plates)
        own = (cost_of_guide(name), cost_of_model(name))
        found[name] = tuple(
            cost
            for cost in costs
            if cost not in own and not graph.cost(cost).is_of_guide and plates <= set(graph.cost(cost).plates)
        )
    return found


def flip_plan(
    graph: StochasticComputationGraph,
    components: Mapping[str, Components],
    costs: Mapping[str, tuple[str, ...]],
    more: Mapping[str, int] | None = None,
) -> FlipPlan:
    """Assigns rows to sites by greedy colouring."""
    colours: list[list[str]] = []
    # The members of each colour, and what their costs read, as bits.
    taken: list[tuple[int, int]] = []
    for name in components:
        own, reads = 1 << graph.index[name], graph.cost_set_bits(costs[name]) | (more or {}).get(name, 0)
        for k, (inside, read) in enumerate(taken):
            if not inside & reads and not own & read:
                colours[k].append(name)
                taken[k] = inside | own, read | reads
                break
        else:
            colours.append([name])
            taken.append((own, reads))
    start, rows = {}, 1
    for members in colours:
        for name in members:
            start[name] = rows
        rows += max(components[m].size * (components[m].cardinality - 1) for m in members)
    return FlipPlan(start, rows, {name: tuple(costs[name]) for name in components})
