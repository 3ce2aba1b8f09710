r"""Runs programs at given values of their sites, to compare what they cost there."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_bpq.rollout.runs import Program
from pyro_bpq.tracing.cost_statement import SkipCosts
from pyro_bpq.tracing.linear_reads import nodes_behind
from pyro_bpq.tracing.sandbox import Sandbox
from pyro_bpq.tracing.substitute import Substitute
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.watch import is_enumerated, samples

Trace = Callable[[Program, Callable[[Any], Any]], TracedRun]


class RunsAt:
    """Runs programs at given values, and leaves generators and buffers unchanged.

    Args:
        trace: Wraps model and guide with a function, and traces the program.
        subsamples: Indices of subsampled plates, by name.
        has_buffers: Whether the programs may call modules with buffers.

    Attributes:
        draw_alike: Whether all runs, which start from one seed, have drawn the same number of random numbers.
    """

    def __init__(self, trace: Trace, subsamples: Mapping[str, Any], has_buffers: bool) -> None:
        self.trace, self.subsamples, self.has_buffers = trace, subsamples, has_buffers
        self.draw_alike = True
        self._after: list[Tensor] | None = None

    def costs(self, program: Program, values: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The costs of a run; ``None`` if it fails."""
        put, sandbox = Substitute({**values, **self.subsamples}), Sandbox(0, self.has_buffers)
        try:
            with sandbox, pyro.validation_enabled(False), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # Cost functions may be expensive, so they are called only once per step.
                run = self.trace(program, lambda part: SkipCosts()(put(part))).run
        except Exception:
            return None
        after = self._after = self._after or sandbox.after
        self.draw_alike &= all(torch.equal(*pair) for pair in zip(after, sandbox.after, strict=True))
        return {name: cost.detach() for name, cost in run.costs.items()}


def drawn_sites(run: TracedRun) -> dict[str, Any]:
    """The sites of a run whose values may be put in: latent ones that do not hold all their values at once."""
    return {
        name: site
        for trace in (run.model_trace, run.guide_trace)
        for name, site in samples(trace).items()
        if not site["is_observed"] and not is_enumerated(site) and isinstance(site["value"], Tensor)
    }


def leaves_of(costs: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that costs depend on."""
    variables = (getattr(node, "variable", None) for node in nodes_behind(*costs))
    leaves = (leaf for leaf in variables if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return [leaf for leaf in leaves if leaf.layout is torch.strided]


@contextlib.contextmanager
def moved(leaves: Sequence[Tensor], generator: torch.Generator) -> Iterator[None]:
    """Moves parameters by about a hundredth, and back; autograd takes no notice."""
    kept = [leaf.data for leaf in leaves]
    try:
        for leaf, data in zip(leaves, kept, strict=True):
            noise = torch.randn(data.shape, generator=generator).to(data)
            leaf.data = data + 0.01 * (1.0 + data.abs()) * noise
        yield
    finally:
        for leaf, data in zip(leaves, kept, strict=True):
            leaf.data = data
