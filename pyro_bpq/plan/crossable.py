"""Which log-probabilities of a program may be costed beside another particle's past."""

from __future__ import annotations

from typing import Any

from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.rollout.features import finite_components
from pyro_bpq.tracing.traced_run import TracedRun, cost_of_guide, cost_of_model


def crossable(traced: TracedRun, graph: StochasticComputationGraph, handed: frozenset[str]) -> dict[str, bool]:
    """The log-probabilities of sites whose values all occur under any law of theirs: those of finite support."""
    found: dict[str, bool] = {}
    if traced.elimination is not None:
        return found
    for name, site in traced.run.sites.items():
        components, cost = traced.infos[name].components, cost_of_model(name)
        if components is None or name in traced.untraced or not _is_plated(traced.guide_trace.nodes[name]):
            continue
        found[cost_of_guide(name)] = True
        if site.prior is not None and finite_components(site.prior) == components:
            if graph.cost(cost).plates == graph.node(name).plates and _is_plated(traced.model_trace.nodes[name]):
                found[cost] = False
    return {cost: of_guide for cost, of_guide in found.items() if cost not in handed}


def _is_plated(site: Any) -> bool:
    """Whether all batch dimensions of a traced site are plates, or that of the particles."""
    dims = {frame.dim for frame in site["cond_indep_stack"] if frame.vectorized}
    return all(size == 1 or -1 - i in dims for i, size in enumerate(reversed(site["fn"].batch_shape)))
