r"""Which sites take other values, in which rows, and which costs and laws are evaluated there.

Every component of a site is set to each of its other values, while everything else keeps its value. Sites that no
evaluated cost or law reads together take other values in the same rows; the others get rows of their own. *The extra
run of the model* tells immediate costs, *held costs* also what reads a site and a site downstream of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bpq.errors import warn
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.estimators.differences import Differences
from pyro_bpq.estimators.hindsight import Hindsight
from pyro_bpq.graph.bitsets import union
from pyro_bpq.graph.scg import Plate, StochasticComputationGraph, cost_of_guide, cost_of_model
from pyro_bpq.plan.structure import Structure, work_at, work_of_run
from pyro_bpq.record.recorded import Recorded
from pyro_bpq.record.watch import samples
from pyro_bpq.rollout.features import Components

# Longest time of an extra run, in units of the step without it. In a longer time more particles win more.
DEAR = 1.0

# Plates of costs and laws, by name.
Terms = Mapping[str, tuple[Plate, ...]]


@dataclass(frozen=True)
class FlippedSite:
    """A site that takes other values while all other sites keep theirs.

    Args:
        components: Its finite components, or its counts.
        number: Number of components that are set to other values; all of them, or some that are drawn.
        costs: The costs that read it and are evaluated.
        immediate: Those of ``costs`` that read no site downstream. Their mean over the site's own law is known.
        laws: The log-probabilities of the sites of the guide that read it.
        rest: The costs that read it and are not known at other values.
        curvature: Whether curvatures predict the costs of components that are not evaluated.
        is_drawn: Whether the components that are evaluated are drawn.
    """

    components: Components
    number: int
    costs: Terms
    immediate: Collection[str]
    laws: Terms = field(default_factory=dict)
    rest: tuple[str, ...] = ()
    curvature: bool = True
    is_drawn: bool = False

    @property
    def rows(self) -> int:
        """Number of rows in which it takes other values."""
        return self.number * (self.components.cardinality - 1)

    @property
    def is_sloped(self) -> bool:
        """Whether its changes are predicted from slopes."""
        return self.is_drawn and self.components.has_slopes

    @cached_property
    def changes(self) -> dict[str, Terms]:
        """What changes with its value: laws, later and immediate costs."""
        later = {cost: plates for cost, plates in self.costs.items() if cost not in self.immediate}
        immediate = {cost: plates for cost, plates in self.costs.items() if cost in self.immediate}
        return {"law": self.laws, "later": later, "immediate": immediate}


@dataclass(frozen=True)
class SlopedCosts:
    """Costs whose slopes are found in one backward pass.

    Args:
        costs: The costs.
        immediate: The sites that they are immediate costs of. To other sites none of them is one.
        own: The sites of whose own log-probabilities this is true.
    """

    costs: tuple[str, ...]
    immediate: frozenset[str]
    own: frozenset[str]


class Moves(NamedTuple):
    """Which components of sites take other values, where not all do.

    Args:
        drawn: The components of sites, ``(M, plates, n)``; all of those of sites that are not in it.
        steps: How far counts are from the values next to them, in the shape of their values.
        is_apart: Whether rows are evaluated one by one, by operators like those of the run.
    """

    drawn: Mapping[str, Tensor] = MappingProxyType({})
    steps: Mapping[str, Tensor] = MappingProxyType({})
    is_apart: bool = False


# All components of all sites take all other values.
ALL = Moves()


@dataclass(frozen=True)
class Flips:
    """Rows of values: which of them set which sites to other values.

    Args:
        sites: The sites.
        start: The first row of each; row 0 is the sample.
        rows: Number of rows in all.
        refused: Why there are none, where their price speaks against them.
        groups: The costs that slopes predict.
        laws: The laws that slopes predict.
    """

    sites: Mapping[str, FlippedSite]
    start: Mapping[str, int]
    rows: int
    refused: str = ""
    groups: tuple[SlopedCosts, ...] = ()
    laws: tuple[str, ...] = ()
    _deltas: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def of(
        graph: StochasticComputationGraph, sites: Mapping[str, FlippedSite], more: Mapping[str, int] | None = None
    ) -> Flips:
        """Assigns rows to sites by greedy colouring; ``more`` are bits of further sites that matter to a site."""
        # The members of each colour; as bits, too, with what their costs read.
        colours: list[tuple[list[str], int, int]] = []
        for name, site in sites.items():
            own, reads = 1 << graph.index[name], graph.cost_set_bits(site.costs) | (more or {}).get(name, 0)
            fitting = (k for k, (_, inside, read) in enumerate(colours) if not (inside & reads or own & read))
            k = next(fitting, len(colours))
            members, inside, read = colours[k] if k < len(colours) else ([], 0, 0)
            colours[k : k + 1] = [([*members, name], inside | own, read | reads)]
        start, rows = {}, 1
        for members, *_ in colours:
            start.update(dict.fromkeys(members, rows))
            rows += max(sites[member].rows for member in members)
        return Flips(sites, start, rows)

    @cached_property
    def costs(self) -> dict[str, tuple[str, ...]]:
        """The evaluated costs of each site."""
        return {name: tuple(site.costs) for name, site in self.sites.items()}

    @cached_property
    def wanted(self) -> tuple[str, ...]:
        """All costs and laws that are evaluated."""
        terms = (*(site.costs for site in self.sites.values()), *(site.laws for site in self.sites.values()))
        return tuple(dict.fromkeys(name for each in terms for name in each))

    @property
    def picks_one(self) -> bool:
        """Whether a step evaluates one random particle: components of all sites are drawn.

        The errors of predictions for counts are too large for that.
        """
        sites = self.sites.values()
        return bool(sites) and all(site.is_drawn and site.components.kind != "count" for site in sites)

    def moved(self, name: str, value: Tensor, fn: Any, moves: Moves) -> Tensor:
        """Values ``(rows, batch, event)`` of a site, whose distribution is ``fn``.

        Each row but the first sets one component to another value.
        """
        site, split = self.sites[name], self.sites[name].components
        lead, drawn, step = value.shape[: value.dim() - split.value_ndim], moves.drawn.get(name), moves.steps.get(name)
        if drawn is None:
            delta = self._of_all(name, value.device).reshape(-1, *(1 for _ in lead), split.size)
        else:
            delta = self._delta(name, drawn.reshape(*lead, site.number))
        if split.has_pairs:
            other = 1 - value if step is None else value + step
            return torch.where(delta.reshape(*delta.shape[:-1], *split.event_shape) > 0, other, value)
        return split.value((split.index(value, fn) + delta) % split.cardinality, fn).to(value.dtype)

    def _of_all(self, name: str, device: torch.device) -> Tensor:
        """How far each row moves each component of a site, all of which move, ``(rows, D)``: alike in every step."""
        key = (name, device)
        if key not in self._deltas:
            every = torch.arange(self.sites[name].components.size, device=device)
            self._deltas[key] = self._delta(name, every)
        return self._deltas[key]

    def _delta(self, name: str, drawn: Tensor) -> Tensor:
        """How far each row moves each component of a site, ``(rows, ..., D)``, of which ``drawn`` ``(..., n)`` move."""
        site, start, others = self.sites[name], self.start[name], self.sites[name].components.cardinality - 1
        at = drawn.movedim(-1, 0).repeat_interleave(others, 0).unsqueeze(-1)
        steps = torch.arange(site.rows, device=at.device) % others + 1
        delta = at.new_zeros(self.rows, *at.shape[1:-1], site.components.size)
        steps = steps.reshape(-1, *(1,) * (at.dim() - 1)).expand_as(at)
        delta[start : start + site.rows].scatter_(-1, at, steps)
        return delta


# The extra run of the model.


def plan_extra_run(
    structure: Structure, estimators: Mapping[str, Estimator], max_elements: int, served: Collection[str] = ()
) -> Flips:
    """Plans the extra run of the model.

    Args:
        structure: The structure.
        estimators: Those of all sites; they say whether immediate costs are wanted at all values, or if that pays.
        max_elements: Largest number of costs that are evaluated where nobody insists.
        served: Sites that need none.
    """
    costs, graph, infos = structure.readable, structure.graph, structure.traced.infos
    # Other values of one of many components pay only where they tell the whole cost-to-go of every such site.
    is_flat = all(structure.is_complete(name, costs[name]) for name in infos if structure.size(name) > 1)
    can_flip, insists, sites = structure.is_exact and not structure.facts.is_dynamic, False, {}
    for name, info in infos.items():
        exact = estimators[name].exact_costs if can_flip and name not in served and costs[name] else False
        if info.components is not None and (exact is True or (exact and (info.components.size == 1 or is_flat))):
            plates = {cost: graph.cost(cost).plates for cost in costs[name]}
            sites[name] = FlippedSite(info.components, info.components.size, plates, costs[name])
            insists = insists or exact is True
    flips = Flips.of(graph, sites)
    refused = "" if insists or not sites else _too_dear(structure, flips, max_elements)
    return replace(Flips.of(graph, {}), refused=refused) if refused else flips


def _too_dear(structure: Structure, flips: Flips, max_elements: int) -> str:
    """Why an extra run costs more than it is worth; empty where it does not."""
    rows, recorded = flips.rows, structure.facts.recorded
    assert recorded is not None
    elements = rows * sum(map(recorded.num_elements, flips.wanted))
    if elements > max_elements:
        return f"its {rows} rows evaluate {elements} costs, more than {max_elements}"
    # A backward pass takes about twice as long as the run itself; the extra run has none.
    ratio = work_at(recorded, flips.wanted, flips.start).seconds(rows) / (3.0 * work_of_run(recorded).seconds())
    return f"its {rows} rows take about {ratio:.1f} times as long as the rest of the step" if ratio > DEAR else ""


# Held costs.


def held_plan(structure: Structure, estimators: Mapping[str, Estimator], is_chosen: bool) -> Flips:
    """Plans the rows for the sites whose estimator asks for held costs.

    A site is left out if one of its children has a law that is not known at other values.

    Args:
        structure: The structure.
        estimators: Those of all sites.
        is_chosen: Whether the user has chosen an estimator for all sites.

    Returns:
        The rows; none if nobody asks for them, or if sampled values may steer the program.
    """
    traced, graph, sites = structure.traced, structure.graph, dict[str, FlippedSite]()
    is_refused = structure.facts.is_dynamic or traced.enumerated & samples(traced.guide_trace).keys()
    for name, estimator in estimators.items() if not is_refused else ():
        if not isinstance(estimator, Hindsight | Differences):
            continue
        components, children = estimator.split(traced.infos[name]), graph.children(name)
        if components is None or components.cardinality < 2:
            continue
        lost = sorted(child for child in children if not _is_computed(structure, child))
        if lost and (is_chosen or not traced.options[name].leaves_estimator):
            warn(
                f"Site {name!r}: the law of {lost[0]!r}, which reads it, is not known at other values of it, as where "
                f"the program draws noise of its own, so {type(estimator).__name__}() is leave-one-out there. Write "
                "ScoreFunction(LeaveOneOut()), which costs less."
            )
        if not lost and all(_has_law(structure, name, child, estimators[child]) for child in children):
            reading = graph.cost_names(graph.cost_child_bits[graph.index[name]])
            costs = {cost: graph.cost(cost).plates for cost in reading if structure.knows(name, cost)}
            sites[name] = FlippedSite(
                components,
                number=min(components.size, estimator.number(components)),
                costs=costs,
                immediate=tuple(cost for cost in costs if _is_immediate(graph, name, cost)),
                laws={Recorded.law(child): graph.node(child).plates for child in children},
                rest=tuple(cost for cost in reading if cost not in costs),
                curvature=estimator.curvature,
                is_drawn=components.size > estimator.number(components),
            )
    if any(site.is_drawn for site in sites.values()):
        # All of them can then be served by one particle. A single component is too much for slopes to tell.
        for name, site in sites.items():
            is_few = site.components.size > 1 and site.components.has_slopes
            sites[name] = replace(site, is_drawn=site.is_drawn or is_few)
    # What the probabilities of the children's values read, as bits.
    below = {name: graph.bits_of(graph.children(name)) for name in sites}
    laws = {name: bits | union(graph.parent_bits, bits) for name, bits in below.items()}
    sloped = dict.fromkeys(law for site in sites.values() if site.is_sloped for law in site.laws)
    return replace(Flips.of(graph, sites, laws), groups=_groups(graph, sites), laws=tuple(sloped))


def _groups(graph: StochasticComputationGraph, sites: Mapping[str, FlippedSite]) -> tuple[SlopedCosts, ...]:
    """The costs of sites with slopes, so that no site has immediate and other costs in one group.

    Each group takes a backward pass. None has costs of both programs, as those of the guide may be laws of children.
    """
    # By cost: whether it is a known immediate cost of a site, and whether this is so of the site's own log-probability.
    readers: dict[str, dict[Any, bool]] = {}
    sloped = {name: site for name, site in sites.items() if site.is_sloped}
    for cost in dict.fromkeys(cost for site in sloped.values() for cost in site.costs):
        readers[cost] = {"guide": graph.cost(cost).is_of_guide}
        for name, site in sloped.items():
            if cost in site.costs or cost in site.rest:
                readers[cost][name, cost in (cost_of_guide(name), cost_of_model(name))] = cost in site.immediate
    groups: list[tuple[list[str], dict[Any, bool]]] = []
    for cost, kinds in readers.items():
        fitting = (group for group in groups if all(group[1].get(key, kind) == kind for key, kind in kinds.items()))
        members, known = next(fitting, ([], {}))
        groups += [] if members else [(members, known)]
        members.append(cost)
        known.update(kinds)

    def told(known: Mapping[Any, bool], is_own: bool) -> frozenset[str]:
        return frozenset(name for name in sites if known.get((name, is_own)))

    return tuple(SlopedCosts(tuple(members), told(known, False), told(known, True)) for members, known in groups)


def _is_immediate(graph: StochasticComputationGraph, name: str, cost: str) -> bool:
    """Whether a cost reads no site downstream."""
    return not graph.cost_bits[graph.cost_index[cost]] & graph.descendant_bits[graph.index[name]]


def _is_computed(structure: Structure, name: str) -> bool:
    """Whether the probability of a site's value follows from values of sites: noise would have other values."""
    recorded, law = structure.facts.recorded, Recorded.law(name)
    return recorded is not None and recorded.can_compute(law) and not recorded.draws(law)


def _has_law(structure: Structure, name: str, child: str, estimator: Estimator) -> bool:
    """Whether the probability of a child's value is known at other values of a site."""
    if child in structure.traced.untraced or estimator.attaches:
        return False
    return structure.keeps_rows(name, structure.graph.node(child).plates)
