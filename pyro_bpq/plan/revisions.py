r"""What the structure of a program says of its sites, against what follows from their options."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from pyro_bpq.estimators.base import Estimator, SiteInfo
from pyro_bpq.graph.scg import cost_of_guide, cost_of_model
from pyro_bpq.plan.extra_run import ExtraRun, is_complete
from pyro_bpq.plan.rules import BY_STRUCTURE, FEW_PARTICLES, MANY_COMPONENTS, MANY_SITES, Choice, SiteFacts, decide
from pyro_bpq.plan.structure import Structure
from pyro_bpq.rollout.features import have_same_values
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.watch import samples

# Rows of a plate from which on they are taken for data.
MANY_ROWS = 10


def revise(choices: dict[str, Choice], facts: SiteFacts) -> None:
    """Lets the structure of the program overrule what follows from a site's options."""
    found = decide(BY_STRUCTURE, facts)
    if found is not None:
        choices[facts.info.name] = found


def untold(site: SiteFacts, structure: Structure, is_alone: bool, layers: int) -> SiteFacts:
    """The facts of a site of many components that has no critic, and whose costs no extra run gives."""
    name, traced, graph = site.info.name, structure.traced, structure.graph
    keeps_rows = structure.facts.cuts_plates or not graph.node(name).plates
    is_last = not graph.descendants(name) and not graph.leaves_plates(name) and not traced.enumerated
    is_plain = traced.options[name].baseline is None and name not in traced.untraced and not traced.user_costs
    return replace(
        site,
        is_untold=True,
        can_compare=is_plain and not structure.facts.is_dynamic,
        is_alone=is_alone and keeps_rows and is_last,
        layers=layers if keeps_rows and is_plain and site.options.leaves_estimator else 0,
        reads=num_reads(traced, name),
    )


def num_reads(traced: TracedRun, name: str) -> int:
    """The values of all components of a site times the observed elements of a row.

    Leave-one-out compares the costs of whole values. Its noise grows with the number of components, and with the data
    that they explain. Slopes compare the costs of single components, so their noise hardly grows.
    """
    components = traced.infos[name].components
    own = {frame.name for frame in traced.guide_trace.nodes[name]["cond_indep_stack"]}
    observed = 0
    for site in samples(traced.model_trace).values():
        if site["is_observed"]:
            others = [frame.size for frame in site["cond_indep_stack"] if frame.name not in own]
            observed += site["fn"].event_shape.numel() * math.prod(others)
    return 0 if components is None else components.size * components.cardinality * observed


def in_rows(structure: Structure) -> frozenset[str]:
    """Sites for which no estimator is chosen, in plates of many rows, whose costs differ from row to row as data do.

    Critics see data only where ``context`` shows them some.
    """
    sizes, node = structure.traced.plate_sizes, structure.graph.node
    sites = open_sites(structure.traced)
    return frozenset(name for name in sites if math.prod(sizes[plate] for plate in node(name).plates) >= MANY_ROWS)


def open_sites(traced: TracedRun) -> list[str]:
    """Sites without ``rsample`` for which no estimator is chosen."""
    return [n for n, options in traced.options.items() if options.leaves_estimator and not traced.infos[n].has_rsample]


@dataclass(frozen=True)
class Compared:
    """Which sites, of those without a chosen estimator, get their baseline from other particles.

    Args:
        noisy: Sites for which no estimator is chosen, whose gradients are noisy. A program without noise draws one
            site, each of whose costs reads one component and is known at all of its values.
        sites: Those of them that other particles serve, if there are any.
        served: The sites that get leave-one-out over the particles that run now.
        is_few: Whether that is because the program has few sites, not because of rows of data.
    """

    noisy: frozenset[str] = frozenset()
    sites: frozenset[str] = frozenset()
    served: frozenset[str] = frozenset()
    is_few: bool = False


def compare(structure: Structure, extra: ExtraRun) -> Compared:
    """Finds the sites that leave-one-out over particles serves better than sums over their values and critics.

    In few sites, sums over values take the time of many particles and leave the noise of all other sites. Critics of
    many sites know more than the mean of other particles. Of data they only know what ``context`` shows them.
    """
    traced, particles, rows = structure.traced, structure.facts.num_particles, in_rows(structure)
    sites = frozenset(open_sites(traced))
    told = {name for name in sites if is_complete(structure, name, extra.costs(name))}
    untold = rows - told
    # The extra run goes on only where it tells most sites everything.
    others = untold if 2 * len(untold) < len(rows) else rows
    served = {name for name in others if particles > 1 and _size(traced.infos[name]) == 1}
    served = served if served & untold else set()
    # A net that predicts a baseline serves one particle.
    is_predicted = any(o.baseline is not None and o.baseline.is_predicted for o in traced.options.values())
    if is_predicted or (len(traced.infos) == 1 and any(_is_separate(structure, name) for name in told)):
        return Compared(served=frozenset(served))
    if len(sites) >= MANY_SITES:
        return Compared(sites, untold, frozenset(served))
    if particles >= FEW_PARTICLES:
        served = {name for name in sites if _size(traced.infos[name])}
        if len(traced.infos) == 1:
            # Sums over the values of the many components of the only site take off most of the noise.
            served -= {name for name in told - rows if _size(traced.infos[name]) >= MANY_COMPONENTS}
    return Compared(sites, sites, frozenset(served), not rows)


def _is_separate(structure: Structure, name: str) -> bool:
    """Whether every cost of a site reads one of its components."""
    others = set(structure.graph.downstream_costs(name)) - {cost_of_guide(name), cost_of_model(name)}
    return _size(structure.traced.infos[name]) == 1 or all((name, cost) in structure.patterns for cost in others)


def _size(info: SiteInfo) -> int:
    """Number of components of finitely many values."""
    return 0 if info.components is None else info.components.size


def charged_costs(structure: Structure, name: str, estimator: Estimator, evaluated: tuple[str, ...]) -> frozenset[str]:
    """The costs that are charged to single components of a site, if there are any but its own log-probabilities."""
    if not estimator.by_component:
        return frozenset()
    costs, patterns = structure.graph.downstream_costs(name), structure.patterns
    found = {cost for cost in costs if (name, cost) in patterns and cost not in evaluated}
    return frozenset(found) if found - {cost_of_guide(name), cost_of_model(name)} else frozenset()


def crossable(structure: Structure) -> dict[str, bool]:
    """The log-probabilities that may be costed beside another particle's past, and whether they are the guide's.

    All values of their sites occur under any law: the support is finite. A model's law that reads values of the guide
    itself may read the value that it scores.
    """
    traced, graph = structure.traced, structure.graph
    found: dict[str, bool] = {}
    for name, site in traced.run.sites.items() if not traced.enumerated else ():
        components, cost = traced.infos[name].components, cost_of_model(name)
        if components is None or name in traced.untraced or not _is_plated(traced.guide_trace.nodes[name]):
            continue
        found[cost_of_guide(name)] = True
        if site.prior is not None and have_same_values(site.prior, site.fn):
            if graph.cost(cost).plates == graph.node(name).plates and _is_plated(traced.model_trace.nodes[name]):
                found[cost] = False
    return {cost: of_guide for cost, of_guide in found.items() if cost not in structure.facts.self_read}


def _is_plated(site: Any) -> bool:
    """Whether all batch dimensions of a traced site are plates, or that of the particles."""
    dims = {frame.dim for frame in site["cond_indep_stack"] if frame.vectorized}
    return all(size == 1 or -1 - i in dims for i, size in enumerate(reversed(site["fn"].batch_shape)))
