r"""The extra run of the model: which sites it flips, in which rows, and which of their costs it tells.

Every component of a site is set to each of its other values, while everything else keeps its sampled value. Sites that
no evaluated cost reads together are flipped in the same rows. The others get rows of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.batching.classes import Known
from pyro_bpq.estimators.all_action import AllAction
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.graph.scg import StochasticComputationGraph, cost_of_guide, cost_of_model
from pyro_bpq.plan.structure import Structure, has_like_prior
from pyro_bpq.rollout.features import Components

# Longest time of an extra run, in units of the step without it. In a longer time more particles win more.
DEAR = 1.0


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


@dataclass(frozen=True)
class ExtraRun:
    """The extra run of the model."""

    flips: FlipPlan | None = None  # which rows flip which sites; ``None`` for no extra run
    components: dict[str, Components] = field(default_factory=dict)  # finite components of the sites that it flips
    refused: str = ""  # why there is none, where its price speaks against it

    def costs(self, name: str) -> tuple[str, ...]:
        """The costs of the model that it evaluates at other values of a site."""
        return () if self.flips is None else self.flips.costs.get(name, ())


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
        start.update(dict.fromkeys(members, rows))
        rows += max(components[m].size * (components[m].cardinality - 1) for m in members)
    return FlipPlan(start, rows, {name: tuple(costs[name]) for name in components})


def immediate_model_costs(graph: StochasticComputationGraph) -> dict[str, tuple[str, ...]]:
    """For each stochastic node its immediate costs of the model that can be read off row by row.

    They are immediate, belong to another site of the model, and have all plates of the node. So all rows of the node
    can be flipped at once: each row of the cost depends on one row of the node only.
    """
    found = {}
    for name, costs in graph.last_costs.items():
        plates, own = set(graph.node(name).plates), (cost_of_guide(name), cost_of_model(name))
        others = [graph.cost(cost) for cost in costs if cost not in own]
        found[name] = tuple(cost.name for cost in others if not cost.is_of_guide and plates <= set(cost.plates))
    return found


def known_costs(structure: Structure, name: str, estimator: Estimator) -> set[Known]:
    """The site's own costs that follow from its distributions alone."""
    traced, graph, cost = structure.traced, structure.graph, cost_of_model(name)
    if traced.infos[name].components is None or not estimator.uses_critic:
        return set()
    kinds = set() if name in traced.untraced or traced.only_costs else {Known.LOG_Q}
    if has_like_prior(traced, name) and cost in structure.immediate[name]:
        if graph.cost(cost).plates == graph.node(name).plates:
            kinds.add(Known.LOG_P)
    return kinds


def is_complete(structure: Structure, name: str, evaluated: tuple[str, ...]) -> bool:
    """Whether after an extra run nothing of a site's cost-to-go is unknown at its other values."""
    known = _names(name, known_costs(structure, name, AllAction()))
    return known.union(evaluated).issuperset(structure.graph.downstream_costs(name))


def _names(name: str, kinds: set[Known]) -> set[str]:
    """The names of a site's own costs."""
    return {cost_of_guide(name) if kind is Known.LOG_Q else cost_of_model(name) for kind in kinds}


def plan_extra_run(structure: Structure, estimators: Mapping[str, Estimator], max_elements: int) -> ExtraRun:
    """Plans the extra run of the model; none where it does not pay."""
    traced, costs = structure.traced, _readable(structure)
    # Other values of one of many components pay only where they tell the whole cost-to-go of every such site.
    vectors = [n for n, i in traced.infos.items() if i.components is not None and i.components.size > 1]
    is_flat = all(is_complete(structure, name, costs[name]) for name in vectors)
    components, wanted = {}, None
    for name, info in traced.infos.items():
        exact = estimators[name].exact_costs
        if info.components is None or exact is False:
            continue
        if costs[name] and (exact is True or info.components.size == 1 or is_flat):
            components[name] = info.components
            wanted = name if exact is True else wanted
    if not components:
        return ExtraRun()
    flips = flip_plan(structure.graph, components, costs)
    refused = "" if wanted is not None else _too_dear(structure, flips, max_elements)
    return ExtraRun(refused=refused) if refused else ExtraRun(flips, components)


def _too_dear(structure: Structure, flips: FlipPlan, max_elements: int) -> str:
    """Why an extra run costs more than it is worth; empty where it does not."""
    rows, recorded = flips.rows, structure.facts.recorded
    told = dict.fromkeys(cost for costs in flips.costs.values() for cost in costs)
    assert recorded is not None
    elements = rows * sum(recorded.num_elements(cost) for cost in told)
    if elements > max_elements:
        return f"its {rows} rows evaluate {elements} costs, more than {max_elements}"
    # A backward pass takes about twice as long as the run itself; the extra run has none.
    ratio = recorded.work_at(told, flips.start).seconds(rows) / (3.0 * recorded.work.seconds())
    return f"its {rows} rows take about {ratio:.1f} times as long as the rest of the step" if ratio > DEAR else ""


def _readable(structure: Structure) -> dict[str, tuple[str, ...]]:
    """The model's costs that may be read off an extra run, by site."""
    graph, facts, found = structure.graph, structure.facts, {}
    for name, costs in immediate_model_costs(graph).items():
        # All rows of a plate are flipped at once.
        is_known = facts.recorded is not None and (facts.cuts_plates or not graph.node(name).plates)
        found[name] = tuple(c for c in costs if is_known and facts.recorded and facts.recorded.can_cut(c, name))
    return found
