r"""Further particles of a program that cannot run in a plate: the recording of one particle, for many at once.

The first particle is the user's own run. What the others draw and cost are rows of one flat function, so that
``z[0]`` and ``z.sum()`` mean what they mean in a run of one particle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_bpq.record.laws import mapped
from pyro_bpq.record.recorded import Bound
from pyro_bpq.record.recording import Uncut
from pyro_bpq.record.traced_run import TracedRun, record_run
from pyro_bpq.record.watch import samples

# What of a site's message is computed anew.
_PARTS = ("fn", "value", "log_prob", "unscaled_log_prob", "log_prob_sum", "score_parts", "scale", "mask")


def further_particles(first: TracedRun, bound: Bound | None, number: int) -> list[TracedRun]:
    """Runs of further particles, which differ from the first one in what they draw; ``bound`` is that run.

    Raises:
        Uncut: If something cannot be computed again, or not for many particles at once.
    """
    if bound is None or first.untraced or not bound.recorded.traced:
        raise Uncut("a value that no operator has made")
    rows = {value: tensor.unbind(0) for value, tensor in bound.many(number).items()}
    return [_particle(first, 1 + number, iter(bound.recorded.traced), rows, i) for i in range(number)]


def _particle(first: TracedRun, number: int, names: Iterator[Any], rows: Any, i: int) -> TracedRun:
    """One of them."""

    def own(tensor: Tensor) -> Tensor:
        name = next(names)
        return rows[name][i] if name in rows else tensor

    guide, model = (_changed(trace, own) for trace in (first.guide_trace, first.model_trace))
    again = record_run(model, guide, samples(guide), number, first.subsamples, first.flags)
    return replace(again, recorded=first.recorded)


def parts_of(guide_trace: Any, model_trace: Any) -> list[Tensor]:
    """The tensors of traces in a fixed order."""
    found: list[Tensor] = []
    for trace in (guide_trace, model_trace):
        _changed(trace, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _changed(trace: Any, change: Callable[[Tensor], Tensor]) -> Trace:
    copied: Any = Trace()
    for name, site in trace.nodes.items():
        if site["type"] == "sample":
            new = {part: mapped(site[part], change) for part in _PARTS if part in site}
            copied.nodes[name] = {**site, **new}
        elif site["type"] == "param":
            copied.nodes[name] = site
    return copied


@torch.no_grad()
def costs_agree(traced: TracedRun, bound: Bound) -> bool:
    """Whether the operators of an earlier run give the costs of a run, up to rounding."""
    try:
        found = bound.again(traced.run.costs)
    except (Uncut, KeyError, RuntimeError):
        return False
    alike = list[Tensor]()
    for name, own in traced.run.costs.items():
        rounding = 100.0 * torch.finfo(own.dtype).eps
        alike.append(torch.isclose(own, found[name], rounding, rounding).all())
    # One read on the host.
    return bool(torch.stack(alike).all())


def gradients_agree(traced: TracedRun, bound: Bound) -> bool:
    """Whether the operators of a run have the gradient of the run itself: hooks and ``no_grad`` are not among them."""
    wanted, loss = bound.recorded.differentiable, traced.run.differentiable
    if wanted is None or not loss.requires_grad:
        return wanted is not None
    function = bound.recorded.recording.cut([wanted])
    # Reparameterised values lead on to the parameters of their laws.
    values = {site.value: traced.run.sites[name].value for name, site in bound.recorded.drawn.items()}
    (again,) = function.at({**bound.tensors, **values})
    leaves = [tensor for tensor in bound.tensors.values() if tensor.is_leaf and tensor.requires_grad]
    native = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    if not again.requires_grad:
        return all(gradient is None for gradient in native)
    other = torch.autograd.grad(again, leaves, allow_unused=True, retain_graph=True)
    return all(_agree(*pair) for pair in zip(native, other, strict=True))


def _agree(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        known = first if second is None else second
        return known is None or not bool(known.any())
    return torch.allclose(first, second, rtol=1e-3, atol=1e-3 * float(first.abs().max()))
