r"""What the structure of a program says of its sites, against what follows from their options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from pyro_bpq.estimators import Estimator
from pyro_bpq.estimators.base import SiteInfo
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.plan.plan import StructureFacts
from pyro_bpq.plan.rules import BY_STRUCTURE, Choice, SiteFacts, decide
from pyro_bpq.tracing.component_costs import Pattern
from pyro_bpq.tracing.traced_run import TracedRun, cost_of_guide, cost_of_model
from pyro_bpq.tracing.watch import samples

# Rows of a plate from which on they are taken for data.
MANY_ROWS = 10


def revise(choices: dict[str, Choice], facts: SiteFacts) -> None:
    """Lets the structure of the program overrule what follows from a site's options."""
    found = decide(BY_STRUCTURE, facts)
    if found is not None:
        choices[facts.info.name] = found


def untold(
    site: SiteFacts,
    traced: TracedRun,
    graph: StochasticComputationGraph,
    facts: StructureFacts,
    is_alone: bool,
    is_layer: bool,
) -> SiteFacts:
    """The facts of a site of many components of whose costs nothing is told."""
    name = site.info.name
    keeps_rows = facts.cuts_plates or not graph.node(name).plates
    is_last = not graph.descendants(name) and not graph.leaves_plates(name) and traced.elimination is None
    is_plain = traced.options[name].baseline is None and name not in traced.untraced and not traced.user_costs
    return replace(
        site,
        is_untold=True,
        can_compare=is_plain and not facts.is_dynamic,
        is_alone=is_alone and keeps_rows and is_last,
        is_layer=is_layer and keeps_rows and is_plain and site.options.is_open,
        reads=num_reads(traced, name),
    )


def num_reads(traced: TracedRun, name: str) -> int:
    """The values of all components of a site times the observed elements of a row.

    Other particles tell what all components cost together. Their noise grows with the number of components, and with
    what they explain together; that of slopes, which tell of each component, hardly does.
    """
    components = traced.infos[name].components
    own = {frame.name for frame in traced.guide_trace.nodes[name]["cond_indep_stack"]}
    observed = 0
    for site in samples(traced.model_trace).values():
        if site["is_observed"]:
            others = [frame.size for frame in site["cond_indep_stack"] if frame.name not in own]
            observed += site["fn"].event_shape.numel() * math.prod(others)
    return 0 if components is None else components.size * components.cardinality * observed


def in_rows(traced: TracedRun, graph: StochasticComputationGraph) -> frozenset[str]:
    """Sites for which nothing is chosen, in plates of many rows, whose costs differ from row to row as data do.

    Critics see data only where ``context`` shows them some.
    """
    return frozenset(
        name
        for name in open_sites(traced)
        if math.prod(traced.plate_sizes[plate] for plate in graph.node(name).plates) >= MANY_ROWS
    )


def open_sites(traced: TracedRun) -> list[str]:
    """Sites without ``rsample`` for which nothing is chosen."""
    return [n for n, options in traced.options.items() if options.is_open and not traced.infos[n].has_rsample]


def pays_to_compare(info: SiteInfo) -> bool:
    """Whether other particles serve a site better than sums over its values; of many components they always do."""
    return info.num_particles > 1 and info.components is not None and info.components.size == 1


def charged_costs(
    graph: StochasticComputationGraph,
    name: str,
    estimator: Estimator,
    evaluated: tuple[str, ...],
    patterns: Mapping[tuple[str, str], Pattern],
) -> frozenset[str]:
    """The costs that are charged to single components of a site, if there are any but its own log-probabilities."""
    if not estimator.by_component:
        return frozenset()
    found = {cost for cost in graph.downstream_costs(name) if (name, cost) in patterns and cost not in evaluated}
    return frozenset(found) if found - {cost_of_guide(name), cost_of_model(name)} else frozenset()
