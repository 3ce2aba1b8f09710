"""The model's log-probability with enumerated sites that the guide lacks summed out, state by state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.subsample_messenger import _Subsample
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.testing.choices import ChoiceMessenger, walk


def is_marked(msg: Any) -> bool:
    """Whether a site of the model that the guide lacks is to be summed out."""
    return not msg["is_observed"] and msg["infer"].get("enumerate") is not None


class _MarkedChoices(ChoiceMessenger):
    """Chooses the values of marked sites; subsets of plates are drawn in the first run and kept."""

    def __init__(self, num_outcomes: int, guide_trace: Any) -> None:
        super().__init__(num_outcomes)
        self.guide_trace = guide_trace
        self.names: set[str] = set()
        self.subsets: dict[str, Any] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if isinstance(msg["fn"], _Subsample):
            msg["value"] = self.subsets.get(msg["name"], msg["value"])
        elif is_marked(msg) and msg["name"] not in self.guide_trace:
            self.names.add(msg["name"])
            super()._pyro_sample(msg)

    def _pyro_post_sample(self, msg: Any) -> None:
        if isinstance(msg["fn"], _Subsample):
            self.subsets[msg["name"]] = msg["value"]


def marginal_log_prob(model: Callable[..., Any], guide_trace: Any, args: Any, kwargs: Any, num_outcomes: int) -> Tensor:
    """Sums the marked sites out of the model's probability, over all joint states one by one.

    A scale is applied outside of the logarithm and a mask inside. The mask of a marked site itself is ignored.

    Returns:
        The log-probability in nats, a scalar.
    """
    choices = _MarkedChoices(num_outcomes, guide_trace)

    def run() -> Any:
        replayed = poutine.replay(model, trace=guide_trace)
        trace = prune_subsample_sites(poutine.trace(replayed).get_trace(*args, **kwargs))
        trace.compute_log_prob()
        return trace

    # The choices are the outer handler, so that they act after the replay.
    traces = [trace for _, trace in walk(choices, run)]
    sites = [name for name, site in traces[0].nodes.items() if site["type"] == "sample"]
    inside, total, scales = [], torch.zeros(()), set()
    marked = {_scale(traces[0].nodes[name]) for name in choices.names}
    for name in sites:
        found = [trace.nodes[name] for trace in traces]
        scaled = [site["log_prob"].sum() for site in found]
        is_alike = name not in choices.names and all(torch.equal(value, scaled[0]) for value in scaled)
        # Equal values may have different gradients. A constant may stand inside the sum if its scale is the sum's.
        if is_alike and not (marked and scaled[0].requires_grad and _scale(found[0]) in marked):
            total = total + scaled[0]
            continue
        scales.add(_scale(found[0]))
        inside.append(torch.stack([_unscaled(site, name in choices.names) for site in found]))
    if len(scales) > 1:
        raise UnsupportedProgramError(
            f"Sites that depend on {sorted(choices.names)} have scales {sorted(map(str, scales))}."
        )
    if inside:
        (scale,) = scales
        if scale is None:
            raise UnsupportedProgramError(
                f"Sites that depend on {sorted(choices.names)} have a scale for each element."
            )
        total = total + scale * torch.stack(inside).sum(0).logsumexp(0)
    return total


def _scale(site: Any) -> float | None:
    """The scale of a site; ``None`` if its elements have scales of their own."""
    scale = torch.as_tensor(site["scale"]).detach()
    return float(scale) if scale.numel() == 1 else None


def _unscaled(site: Any, is_own: bool) -> Tensor:
    log_prob, mask = site["unscaled_log_prob"], site["mask"]
    if is_own or mask is None:
        return log_prob.sum()
    return torch.where(torch.as_tensor(mask), log_prob, log_prob.new_zeros(())).sum()
