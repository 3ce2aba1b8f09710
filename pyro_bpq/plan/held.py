r"""The extra run at other values of a site while all other sites, its children too, keep their values.

The plan says which sites take other values, and which of their costs are known there.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pyro_bpq.errors import BPQWarning
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.estimators.hindsight import Hindsight
from pyro_bpq.graph.bitsets import union
from pyro_bpq.graph.scg import Plate, StochasticComputationGraph, cost_of_guide, cost_of_model
from pyro_bpq.plan.extra_run import FlipPlan, flip_plan
from pyro_bpq.plan.structure import Structure
from pyro_bpq.rollout.features import Components
from pyro_bpq.tracing.watch import carried, samples


@dataclass(frozen=True)
class HeldSite:
    """A site whose other values are compared while all other sites keep their values.

    Args:
        components: Its finite components.
        number: Number of components whose costs are evaluated; all of them, or some that are drawn.
        is_drawn: Whether the components that are evaluated are drawn.
        costs: The costs that read it and are evaluated.
        immediate: Those of ``costs`` that read no site downstream. Their mean over the site's own law is known.
        rest: The costs that read it and are not known at other values.
        children: The sites of the guide that read it.
        curvature: Whether curvatures predict the costs of components that are not evaluated.
    """

    components: Components
    number: int
    costs: tuple[str, ...]
    immediate: tuple[str, ...]
    rest: tuple[str, ...]
    children: tuple[str, ...]
    curvature: bool = True
    is_drawn: bool = False

    @property
    def is_sloped(self) -> bool:
        """Whether its changes are predicted from slopes."""
        return self.is_drawn and self.components.has_slopes


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


@dataclass(frozen=True)
class HeldPlan:
    """The extra run of guide and model at other values.

    Args:
        flips: Which rows flip which sites.
        sites: The sites that are flipped. A site whose children have unknown laws is not among them.
        groups: The costs that slopes predict.
        laws: The sites whose laws slopes predict.
    """

    flips: FlipPlan
    sites: Mapping[str, HeldSite]
    groups: tuple[SlopedCosts, ...] = ()
    laws: tuple[str, ...] = ()

    @cached_property
    def group_of(self) -> Mapping[str, int]:
        """Numbers of the groups of sites that take other values in the same rows, from 0 on."""
        starts = sorted(set(self.flips.start.values()))
        return {name: starts.index(start) for name, start in self.flips.start.items()}

    @cached_property
    def rows_of_group(self) -> int:
        """The number of rows of the largest group."""
        return max(site.number * (site.components.cardinality - 1) for site in self.sites.values())

    @property
    def all_drawn(self) -> bool:
        """Whether components of all sites are drawn. A step then evaluates one random group of sites."""
        return all(site.is_drawn for site in self.sites.values())

    @property
    def rows(self) -> int:
        """The number of rows of the extra run, beside the sample."""
        return self.rows_of_group if self.all_drawn else self.flips.rows - 1

    @property
    def sloped(self) -> frozenset[str]:
        """Sites whose changes are predicted from slopes."""
        return frozenset(name for name, site in self.sites.items() if site.is_sloped)

    @property
    def curved(self) -> bool:
        """Whether curvatures are asked for, too."""
        return any(self.sites[name].curvature for name in self.sloped)


def held_plan(structure: Structure, estimators: Mapping[str, Estimator], is_chosen: bool) -> HeldPlan | None:
    """Plans the extra run for the sites whose estimator is :class:`~pyro_bpq.estimators.Hindsight`.

    Args:
        structure: The structure.
        estimators: Those of all sites.
        is_chosen: Whether the user has chosen an estimator for all sites.

    Returns:
        The plan. ``None`` if nobody asks for it, or if sampled values may steer the program.
    """
    traced, graph = structure.traced, structure.graph
    if structure.facts.is_dynamic or traced.enumerated & samples(traced.guide_trace).keys():
        return None
    sites: dict[str, HeldSite] = {}
    asked = {n: own for n, own in estimators.items() if isinstance(own, Hindsight) and traced.infos[n].components}
    children = dict.fromkeys(child for name in asked for child in graph.children(name))
    noisy = {child for child in children if not _is_computed(structure, child)}
    for name, estimator in asked.items():
        own = graph.children(name)
        if (lost := sorted(noisy.intersection(own))) and (is_chosen or not traced.options[name].leaves_estimator):
            warnings.warn(
                f"Site {name!r}: the law of {lost[0]!r}, which reads it, is not known at other values of it, as where "
                "the program draws noise of its own, so Hindsight() is leave-one-out there. Write "
                "ScoreFunction(LeaveOneOut()), which costs less.",
                BPQWarning,
                stacklevel=2,
            )
        if not lost and all(_has_law(structure, name, child, estimators[child]) for child in own):
            sites[name] = _site(structure, name, estimator)
    if not sites:
        return None
    if any(site.is_drawn for site in sites.values()):
        # All of them can then be served by one particle. A single component is too much for slopes to tell.
        for name, site in sites.items():
            is_few = site.components.size > 1 and site.components.has_slopes
            sites[name] = replace(site, is_drawn=site.is_drawn or is_few)
    sizes = {name: replace(site.components, event_shape=(site.number,)) for name, site in sites.items()}
    costs = {name: site.costs for name, site in sites.items()}
    # What the probabilities of the children's values read, as bits.
    bits = {name: graph.bits_of(site.children) for name, site in sites.items()}
    laws = {name: own | union(graph.parent_bits, own) for name, own in bits.items()}
    sloped = dict.fromkeys(child for site in sites.values() if site.is_sloped for child in site.children)
    return HeldPlan(flip_plan(graph, sizes, costs, laws), sites, _groups(graph, sites), tuple(sloped))


def _groups(graph: StochasticComputationGraph, sites: Mapping[str, HeldSite]) -> tuple[SlopedCosts, ...]:
    """The costs of sites with slopes, so that no site has immediate and other costs in one group.

    Each group takes a backward pass. None has costs of both programs, as those of the guide may be laws of children.
    """
    # By cost: whether it is immediate to a site, and whether this is so of the site's own log-probability.
    readers: dict[str, dict[Any, bool]] = {}
    for name, site in sites.items():
        for cost in site.costs if site.is_sloped else ():
            is_own = cost in (cost_of_guide(name), cost_of_model(name))
            kinds = readers.setdefault(cost, {"guide": graph.cost(cost).is_of_guide})
            kinds[name, is_own] = cost in site.immediate
    groups: list[tuple[list[str], dict[Any, bool]]] = []
    for cost, kinds in readers.items():
        for members, known in groups:
            if all(known.get(key, kind) == kind for key, kind in kinds.items()):
                members.append(cost)
                known.update(kinds)
                break
        else:
            groups.append(([cost], kinds))
    found = []
    for members, known in groups:
        read, own = (frozenset(name for name in sites if known.get((name, is_own))) for is_own in (False, True))
        found.append(SlopedCosts(tuple(members), read, own))
    return tuple(found)


def _site(structure: Structure, name: str, estimator: Hindsight) -> HeldSite:
    graph, components = structure.graph, structure.traced.infos[name].components
    assert components is not None
    reading = graph.cost_names(graph.cost_child_bits[graph.index[name]])
    costs = tuple(cost for cost in reading if _is_known(structure, name, cost))
    return HeldSite(
        components,
        number=min(components.size, estimator.draws),
        costs=costs,
        immediate=tuple(cost for cost in costs if _is_immediate(graph, name, cost)),
        rest=tuple(cost for cost in reading if cost not in costs),
        children=tuple(graph.children(name)),
        curvature=estimator.curvature,
        is_drawn=components.size > estimator.draws,
    )


def _is_immediate(graph: StochasticComputationGraph, name: str, cost: str) -> bool:
    """Whether a cost reads no site downstream."""
    return not graph.cost_bits[graph.cost_index[cost]] & graph.descendant_bits[graph.index[name]]


def _is_known(structure: Structure, name: str, cost: str) -> bool:
    """Whether a run at another value of a site, in all rows of its plates at once, tells a cost row by row."""
    recorded = structure.facts.recorded
    is_known = recorded is not None and recorded.can_cut(cost, name)
    return is_known and _keeps_rows(structure, name, structure.graph.cost(cost).plates)


def _is_computed(structure: Structure, name: str) -> bool:
    """Whether the probability of a site's value follows from values of sites: noise would have other values."""
    recorded = structure.facts.recorded
    if recorded is None:
        return False
    law = recorded.law(name)
    return recorded.can_compute(law) and not recorded.draws(law)


def _has_law(structure: Structure, name: str, child: str, estimator: Estimator) -> bool:
    """Whether the probability of a child's value is known at other values of a site."""
    record = structure.traced.run.sites[child]
    is_unknown = child in structure.traced.untraced or estimator.attaches or carried(record.value)
    if is_unknown or _is_masked_within(record.fn):
        return False
    return _keeps_rows(structure, name, structure.graph.node(child).plates)


def _keeps_rows(structure: Structure, name: str, plates: Sequence[Plate]) -> bool:
    """Whether what has these plates tells one row of a site from the others."""
    own = {plate.name for plate in structure.graph.node(name).plates}
    return not own or (structure.facts.cuts_plates and own <= {plate.name for plate in plates})


def _is_masked_within(fn: object) -> bool:
    """Whether a mask inside of ``to_event`` hides a part of the law that values are drawn from."""
    is_joined = False
    while hasattr(fn, "base_dist"):
        if is_joined and type(fn).__name__ == "MaskedDistribution":
            return True
        is_joined = is_joined or type(fn).__name__ == "Independent"
        fn = fn.base_dist
    return False
