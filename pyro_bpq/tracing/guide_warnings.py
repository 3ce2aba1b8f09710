r"""Warnings about what a guide does that hardly is meant, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.graph.scg import cost_of_guide
from pyro_bpq.tracing.config import cost_options
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.watch import leaf_of


def guide_warnings(traced: TracedRun, model: Mapping[str, Any], guide: Mapping[str, Any]) -> Iterator[str]:
    """Texts of warnings about a guide, from a recorded run and the sites of both programs."""
    if model:
        yield from _observed(guide.values())
    if torch.is_grad_enabled():
        yield from _detached(traced, guide)
        yield from _by_hand(traced, guide)


def _observed(guide: Iterable[Any]) -> Iterator[str]:
    """Warns if the guide observes data."""
    names = [
        site["name"]
        for site in guide
        if site["is_observed"]
        and not site["infer"].get("_deterministic")
        and cost_options(site) is None
        and type(site["fn"]).__name__ not in ("Unit", "Delta")
    ]
    if names:
        yield (
            f"The guide observes data at {names}: observations belong into the model. Were model and guide handed over "
            "in the wrong order? It is loss(model, guide, ...) and SVI(model, guide, ...)."
        )


def _detached(traced: TracedRun, guide: Mapping[str, Any]) -> Iterator[str]:
    """Warns if nothing that the guide draws or scores carries a gradient to its parameters."""
    own, shared = traced.guide_trace.nodes, traced.model_trace.nodes
    read = frozenset() if traced.recorded is None else traced.recorded.read_parameters()
    still = [
        name
        for name, node in own.items()
        if node["type"] == "param" and name in read and name not in shared and leaf_of(node["value"]).requires_grad
    ]
    tensors = [tensor for site in guide.values() for tensor in (site["value"], site["log_prob"])]
    # A batch may give the guide nothing to draw.
    if still and tensors and not any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
        yield (
            f"No gradient reaches the parameters of the guide, {', '.join(map(repr, still))}: its values and "
            "distributions are cut off from them, so that they never learn. Look for .detach(), .data, .item(), "
            "torch.no_grad() or torch.tensor(...) of a tensor. If only the model is to learn, hand over "
            'pyro.poutine.block(guide, hide_types=["param"]).'
        )


def _by_hand(traced: TracedRun, guide: Mapping[str, Any]) -> Iterator[str]:
    """Warns of factors of the guide that state ``log q`` of values that no site has drawn."""
    drawn = {name for name, record in traced.run.sites.items() if record.score is not None}
    for name, site in guide.items():
        states = vars(site["fn"]).get("has_rsample") is False and hasattr(site["fn"], "log_factor")
        if states and site["log_prob"].requires_grad and drawn.isdisjoint((traced.reads or {})[cost_of_guide(name)]):
            yield (
                f"The factor {name!r} of the guide has has_rsample=False, and reads no value that a site has drawn. If "
                "it is log q of values that the guide draws by hand (torch.bernoulli, numpy), these get no gradient: a "
                f'factor is a cost here, not the score of a draw. Write pyro.sample("{name}", fn, '
                'infer={"is_auxiliary": True}) in place of draw and factor, or the name that the value has in the '
                "model. If it is a cost, write has_rsample=True."
            )
