r"""Tracked runs of particles that have run in one call, each on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pyro_bpq.errors import ParticlesDifferError
from pyro_bpq.reruns.row_runs import agree
from pyro_bpq.tracing.sandbox import Sandbox
from pyro_bpq.tracing.substitute import Substitute
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.watch import samples


def tracked_alone(trace: Callable[..., TracedRun], runs: Sequence[TracedRun], has_buffers: bool) -> list[TracedRun]:
    """Tracks each particle in a run of its own, at the values that it has drawn together with the others.

    Generators and buffers stay as the runs of the step have left them.

    Args:
        trace: Traces the program for one particle; takes ``track`` and ``put``, which wraps model and guide.
        runs: The particles as they ran together.
        has_buffers: Whether the programs may call modules with buffers.

    Returns:
        The tracked runs.

    Raises:
        ParticlesDifferError: If a particle costs something else alone. Nobody can tell where programs draw more
            noise, may have changed buffers in the meantime, or cost something else each time.
    """

    def alone(run: TracedRun, track: bool) -> TracedRun:
        sites = {**samples(run.model_trace), **samples(run.guide_trace)}
        values = {name: site["value"] for name, site in sites.items() if not site["is_observed"]}
        return trace(track=track, put=Substitute({**values, **run.subsamples}))

    found, is_comparable = [], True
    for run in runs:
        with Sandbox(torch.get_rng_state(), has_buffers) as sandbox:
            found.append(alone(run, True))
        is_comparable &= not found[-1].has_buffers and all(map(torch.equal, sandbox.before, sandbox.after))
    differing = [pair for pair in zip(runs, found, strict=True) if not costs_alike(*pair)]
    if is_comparable and differing:
        run, own = differing[0]
        with Sandbox(torch.get_rng_state(), has_buffers):
            again = [alone(run, False) for _ in range(2)]
        if all(costs_alike(own, one) for one in again):
            raise ParticlesDifferError("a particle costs something else on its own, at the same values of all sites")
    return found


def costs_alike(one: TracedRun, other: TracedRun) -> bool:
    """Whether two runs at the same values cost the same; true if they have other sites, since values steer these."""
    costs, others = one.run.costs, other.run.costs
    names = costs.keys() if one.key == other.key else ()
    return agree([costs[name].detach() for name in names], [others[name].detach() for name in names])
