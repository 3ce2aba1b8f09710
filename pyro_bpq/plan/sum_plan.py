r"""Which programs are summed over all values of all their sites, in one run and without a draw.

The law of a site with ``V`` values is a table ``q(v | u)``, if it reads at most one other such site. So is every cost
that reads no more than one. One run of ``V`` rows fills all these tables: in row ``u`` every site has its value ``u``,
and the distributions tell the rest, since they know their log-probabilities at all values. Reparameterised sites that
read none of these sites are drawn once, for all rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pyro_bpq.graph.scg import StochasticComputationGraph, cost_of_guide, cost_of_model
from pyro_bpq.plan.structure import Structure
from pyro_bpq.rollout.features import Components, have_same_values
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.watch import carried


@dataclass(frozen=True)
class SumPlan:
    """The tables of a program."""

    components: Mapping[str, Components]  # values of each site, in the order of draws
    parents: Mapping[str, str | None]  # the site that the law of a site reads; ``None`` if it reads none
    priors: Mapping[str, str | None]  # the site that the model's law of a site reads
    others: Mapping[str, str | None]  # the site that another cost of a model or guide site reads, by name of the cost
    shared: frozenset[str] = frozenset()  # reparameterised sites that are drawn once, for all rows

    @property
    def rows(self) -> int:
        """Number of rows of the run."""
        return max(split.cardinality for split in self.components.values())


def sum_plan(structure: Structure, max_support: int) -> SumPlan | None:
    """Plans the sum; ``None`` if a site has more values or a law or a cost reads more."""
    traced, graph = structure.traced, structure.graph
    if structure.facts.self_read or traced.user_costs or traced.untraced or traced.enumerated or traced.only_costs:
        return None
    shared = frozenset(name for name, info in traced.infos.items() if info.has_rsample)
    components, parents = {}, dict[str, str | None]()
    for name, info in traced.infos.items():
        split, read = info.components, [parent for parent in graph.node(name).parents if parent not in shared]
        if name in shared:
            record = traced.run.sites[name]
            if read or record.score is not None or carried(record.value):
                return None
            continue
        if split is None or split.size != 1 or not 2 <= split.cardinality <= max_support:
            return None
        if not (_reads_at_most_one(graph, read, graph.node(name).plates) and _has_plates(traced, name)):
            return None
        components[name], parents[name] = split, next(iter(read), None)
    if not components:
        return None
    priors, others = dict[str, str | None](), dict[str, str | None]()
    own = {cost_of_guide(name): name for name in components} | {cost_of_model(name): name for name in components}
    for cost in graph.costs:
        site = own.get(cost.name)
        read = [name for name in cost.parents if name != site and name not in shared]
        if not _reads_at_most_one(graph, read, cost.plates):
            return None
        parent = next(iter(read), None)
        if site is None:
            others[cost.name] = parent
        elif cost.name == cost_of_model(site):
            priors[site] = parent
            record = traced.run.sites[site]
            if not _is_known_pair(site, parent, parents):
                return None
            if record.prior is None or not have_same_values(record.prior, record.fn):
                return None
        elif parent not in (None, parents[site]):
            return None
    return SumPlan(components, parents, priors, others, shared)


def _reads_at_most_one(graph: StochasticComputationGraph, read: Collection[str], plates: Collection[Any]) -> bool:
    """Whether no more than one site is read, in every row of whose plates there is something that reads it."""
    return len(read) <= 1 and all(set(graph.node(name).plates) <= set(plates) for name in read)


def _has_plates(traced: TracedRun, name: str) -> bool:
    """Whether every batch dimension of a site is that of a plate."""
    dims = {plate.dim for plate in traced.plates[name]}
    shape = traced.run.sites[name].fn.batch_shape[-traced.plate_ndim :] if traced.plate_ndim else ()
    return all(size == 1 or i - len(shape) in dims for i, size in enumerate(shape))


def _is_known_pair(site: str, other: str | None, parents: Mapping[str, str | None]) -> bool:
    """Whether the joint law of two sites is at hand: one is the other's parent, or they are independent."""
    if other is None or other == parents[site] or parents[other] == site:
        return True
    return _root(site, parents) != _root(other, parents)


def _root(site: str, parents: Mapping[str, str | None]) -> str:
    parent = parents[site]
    return site if parent is None else _root(parent, parents)
