r"""What a site gets for which nobody chose an estimator."""

from __future__ import annotations

import math

from pyro_bpq.estimators import (
    AllAction,
    DebiasedStraightThrough,
    DisARM,
    Estimator,
    LeaveOneOut,
    Pathwise,
    RunningBaseline,
    ScoreFunction,
    SecondRun,
)
from pyro_bpq.estimators.base import SiteInfo
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.tracing.traced_run import TracedRun

__all__ = ["compared", "default_estimator", "in_rows", "is_comparable", "pays_to_compare", "score_function"]

# Rows of a plate from which on they are taken for data.
MANY_ROWS = 10


def default_estimator(site: SiteInfo, max_support: int) -> Estimator:
    """The estimator of a site for which nobody chose one.

    Reparameterised: :class:`Pathwise`. Finite components of at most ``max_support`` values: :class:`AllAction`. Else
    the score function, with leave-one-out from two particles on, with a running baseline for one. Sites of many
    components keep :class:`AllAction` only with a critic, or with an extra run of the model that tells all of their
    costs (:meth:`Planner.plan`).

    Args:
        site: The site.
        max_support: Largest number of values of a component that are summed over.

    Returns:
        The estimator.
    """
    if site.has_rsample:
        return Pathwise()
    if site.components is not None and site.components.cardinality <= max_support:
        return AllAction()
    return _plain_score(site)


def _plain_score(site: SiteInfo) -> Estimator:
    return ScoreFunction(LeaveOneOut() if site.num_particles > 1 else RunningBaseline())


def score_function(traced: TracedRun, name: str) -> Estimator:
    """The score function with the site's own baseline, else leave-one-out or, with one particle, a running mean."""
    baseline = traced.options[name].baseline
    return _plain_score(traced.infos[name]) if baseline is None else baseline.estimator()


def in_rows(traced: TracedRun, graph: StochasticComputationGraph) -> frozenset[str]:
    """Sites for which nothing is chosen, in plates of many rows, whose costs differ from row to row as data do.

    Critics see data only where ``context`` shows them some.
    """
    return frozenset(
        name
        for name, options in traced.options.items()
        if options.is_open
        and not traced.infos[name].has_rsample
        and math.prod(traced.plate_sizes[plate] for plate in graph.node(name).plates) >= MANY_ROWS
    )


def pays_to_compare(info: SiteInfo) -> bool:
    """Whether other particles serve a site better than sums over its values; of many components they always do."""
    return info.num_particles > 1 and info.components is not None and info.components.size == 1


def is_comparable(traced: TracedRun, name: str) -> bool:
    """Whether other runs of the program may serve a site."""
    return traced.options[name].baseline is None and name not in traced.untraced and not traced.user_costs


def compared(
    traced: TracedRun, graph: StochasticComputationGraph, name: str, is_alone: bool, has_slopes: bool
) -> Estimator:
    """The estimator of a site of many components, whose costs may be compared with those of other runs.

    Other values serve a single site whose rows of plates stay apart; a second run of both programs serves all sites.
    """
    info, is_last = traced.infos[name], not graph.descendants(name)
    if is_alone and is_last and not graph.leaves_plates(name) and traced.elimination is None:
        if has_slopes and DebiasedStraightThrough().unsupported(info) is None:
            return DebiasedStraightThrough()
        if info.num_particles == 1 and DisARM().unsupported(info) is None:
            return DisARM()
    return SecondRun() if info.num_particles == 1 else score_function(traced, name)
