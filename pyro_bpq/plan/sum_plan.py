r"""Which programs are summed over all values of all their sites, in one run and without a draw.

The law of a site with ``V`` values is a table ``q(v | u)``, if it reads at most one other such site. So is every cost
that reads no more than one. One run of ``V`` rows fills all these tables: in row ``u`` every site has its value ``u``,
and the distributions tell the rest, since they know their log-probabilities at all values. Reparameterised sites that
read none of these sites are drawn once, for all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyro_bpq.graph.scg import CostNode, StochasticNode, cost_of_guide, cost_of_model
from pyro_bpq.plan.structure import Structure, is_plated
from pyro_bpq.record.watch import carried
from pyro_bpq.rollout.features import Components, have_same_values


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
    if structure.facts.self_read or traced.is_dear or traced.untraced or traced.enumerated or traced.only_costs:
        return None
    shared = frozenset(name for name, info in traced.infos.items() if info.has_rsample)
    names = [name for name in traced.infos if name not in shared]
    own = {cost_of_guide(name): name for name in names} | {cost_of_model(name): name for name in names}
    reads = dict[str, str | None]()
    readers: list[StochasticNode | CostNode] = [*graph.nodes, *graph.costs]
    for reader in readers:
        read = [name for name in reader.parents if name not in shared and name != own.get(reader.name)]
        # In every row of whose plates there must be something that reads it.
        if len(read) > 1 or not all(set(graph.node(name).plates) <= set(reader.plates) for name in read):
            return None
        reads[reader.name] = next(iter(read), None)
    for name in shared:
        record = traced.run.sites[name]
        if reads[name] or record.score is not None or carried(record.value):
            return None
    components = dict[str, Components]()
    for name in names:
        split, record = traced.infos[name].components, traced.run.sites[name]
        if split is None or split.size != 1 or not 2 <= split.cardinality <= max_support:
            return None
        if not is_plated(traced.guide_trace.nodes[name]) or reads[cost_of_guide(name)] not in (None, reads[name]):
            return None
        if cost_of_model(name) in reads and not (record.prior and have_same_values(record.prior, record.fn)):
            return None
        components[name] = split
    priors = {name: reads[cost_of_model(name)] for name in names if cost_of_model(name) in reads}
    others = {cost.name: reads[cost.name] for cost in graph.costs if cost.name not in own}
    return SumPlan(components, {name: reads[name] for name in names}, priors, others, shared) if names else None
