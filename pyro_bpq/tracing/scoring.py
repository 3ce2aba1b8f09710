"""Runs guide and model as Pyro does, and records values that leave torch during a log-probability."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyro import poutine
from pyro.infer.util import is_validation_enabled
from pyro.poutine.guide import GuideMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import prune_subsample_sites
from pyro.util import check_model_guide_match, check_site_shape
from torch import Tensor, nn
from torch.distributions import Distribution, Transform

from pyro_bpq.tracing.ledger import Ledger
from pyro_bpq.tracing.program_errors import explain_scores
from pyro_bpq.tracing.watch import samples

# Modules whose distributions keep a value only in tensors.
_LIBRARIES = ("torch.", "pyro.", "pyro_bpq.")
# Largest depth of nested distributions that is searched.
_DEPTH = 6

Heard = Mapping[tuple[bool, str], int]
"""Sources that may have steered a log-probability in Python, as bits, by (is of the guide, site name)."""


def importance_traces(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    max_plate_nesting: float,
    ledger: Ledger | None = None,
    leaves: Mapping[str, Tensor] | None = None,
) -> tuple[Trace, Trace, Heard]:
    """Traces the guide, and the model replayed against it, with log-probabilities."""
    messenger = poutine.unwrap(guide)
    if isinstance(messenger, Messenger):
        guide(*args, **kwargs)
        assert isinstance(messenger, GuideMessenger)
        model_trace, guide_trace = messenger.get_traces()
    else:
        guide_trace = poutine.trace(guide, graph_type="flat").get_trace(*args, **kwargs)
        replayed = poutine.replay(model, trace=guide_trace)
        model_trace = poutine.trace(replayed, graph_type="flat").get_trace(*args, **kwargs)
    with explain_scores(model_trace, guide_trace):
        if is_validation_enabled():
            check_model_guide_match(model_trace, guide_trace, max_plate_nesting)
        guide_trace, model_trace = prune_subsample_sites(guide_trace), prune_subsample_sites(model_trace)
        for trace in (guide_trace, model_trace):
            for name in trace.nodes.keys() & (leaves or {}).keys():
                trace.nodes[name]["value"] = trace.nodes[name]["value"].detach()  # type: ignore[union-attr]
        heard = {
            **_score(model_trace, Trace.compute_log_prob, False, ledger),
            **_score(guide_trace, Trace.compute_score_parts, True, ledger),
        }
        _check_shapes(model_trace, max_plate_nesting)
        _check_shapes(guide_trace, max_plate_nesting)
    return model_trace, guide_trace, heard


def program_trace(
    program: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], max_plate_nesting: float, ledger: Ledger | None
) -> tuple[Trace, Heard]:
    """Traces a program that has no model, and returns the trace and the sources heard at each site."""
    trace = prune_subsample_sites(poutine.trace(program, graph_type="flat").get_trace(*args, **kwargs))
    with explain_scores(Trace(), trace):
        heard = _score(trace, Trace.compute_score_parts, True, ledger)
        _check_shapes(trace, max_plate_nesting)
    return trace, heard


def _check_shapes(trace: Trace, max_plate_nesting: float) -> None:
    if is_validation_enabled():
        for site in samples(trace).values():
            check_site_shape(site, max_plate_nesting)  # type: ignore[arg-type]


def _score(trace: Trace, compute: Callable[[Trace], None], is_guide: bool, ledger: Ledger | None) -> Heard:
    """Computes the log-probabilities of a trace; with a ledger, site by site, to record the reads of each."""
    if ledger is None:
        compute(trace)
        return {}
    heard = {}
    for name, site in samples(trace).items():
        one = Trace()
        one.nodes[name] = site
        with ledger.listening() as found:
            try:
                compute(one)
            except ValueError:
                # The whole trace is computed again, so that the error message shows the shapes of all sites.
                compute(trace)
                raise
        # A user's own object may have kept any value that has left torch so far.
        heard[is_guide, name] = found.mask | (ledger.escaped if ledger.escaped and _is_own(site["fn"]) else 0)
    return heard


def _is_own(fn: Any, depth: int = 0) -> bool:
    """Whether a distribution contains a user's own Python code."""
    if isinstance(fn, Tensor):
        return False
    if isinstance(fn, (list, tuple)):
        return any(_is_own(item, depth + 1) for item in fn)
    if isinstance(fn, (Distribution, Transform, nn.Module)):
        if not type(fn).__module__.startswith(_LIBRARIES) or depth > _DEPTH:
            return True
        return any(_is_own(item, depth + 1) for item in vars(fn).values())
    return callable(fn) and not (getattr(fn, "__module__", None) or "").startswith(_LIBRARIES)
