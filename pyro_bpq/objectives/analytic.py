r"""Analytic expectations of ``log q - log p`` at reparameterised sites: KL divergences and entropies."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch.distributions.kl import kl_divergence

from pyro_bpq.graph.scg import StochasticComputationGraph, cost_of_model
from pyro_bpq.objectives.observation import Observation
from pyro_bpq.record.traced_run import TracedRun


def analytic_paths(seen: Observation) -> Tensor:
    """The differentiable costs of the runs of a step."""
    # One graph for all particles, or one for each.
    graphs = [item.signals.layout.graph for item in seen.items] * (len(seen.runs) // len(seen.items))
    return sum(map(differentiable_cost, seen.runs, graphs), torch.zeros(()))


def differentiable_cost(traced: TracedRun, graph: StochasticComputationGraph) -> Tensor:
    r"""The differentiable costs of a run, with expectations in closed form where there are any.

        log q(z) - log p(z)  →  KL(q, p)      where torch registers it and p does not depend on later sites
        log q(z)             →  -H(q)         else, where q has an entropy

    This replaces terms only of sites whose value carries all of their gradient. Given all earlier sites, the closed
    form is the expectation of the terms that it replaces. So the gradient keeps its expectation. The costs-to-go that
    multiply the scores of earlier sites stay those of the sample.
    """
    total = traced.run.differentiable
    for name, record in traced.run.sites.items():
        site = traced.guide_trace.nodes.get(name)
        if record.score is not None or site is None or not traced.infos[name].has_rsample:
            continue
        q, prior = site["fn"], traced.model_trace.nodes.get(name)
        divergence = None if prior is None else _divergence(name, site, prior, graph)
        if divergence is not None:
            total = total - (site["log_prob"].sum() - prior["log_prob"].sum()) + divergence.sum()
            continue
        entropy = _closed_form(lambda q=q: q.entropy(), site)
        if entropy is not None:
            total = total - site["log_prob"].sum() - entropy.sum()
    return total


def _divergence(name: str, site: Any, prior: Any, graph: StochasticComputationGraph) -> Tensor | None:
    """``KL(q, p)`` scaled and masked, if the prior is known before the site is sampled."""
    order = graph.index
    later = [parent for parent in graph.cost(cost_of_model(name)).parents if order[parent] > order[name]]
    same = _equal(site["scale"], prior["scale"]) and _equal(site["mask"], prior["mask"])
    if later or not same:
        return None
    return _closed_form(lambda: kl_divergence(site["fn"], prior["fn"]), site)


def _closed_form(compute: Any, site: Any) -> Tensor | None:
    try:
        value = scale_and_mask(compute(), site["scale"], site["mask"])
    except NotImplementedError:
        return None
    # A distribution that broadcasts over a plate that its parameters lack counts once per row.
    return value if value.shape == site["log_prob"].shape else None


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    return one.shape == other.shape and bool((one == other).all())
