r"""Runs Pyro programs, tracked or not, and records the run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro import poutine
from pyro.infer.util import is_validation_enabled
from pyro.poutine.guide import GuideMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import prune_subsample_sites
from pyro.util import check_model_guide_match, check_site_shape
from torch import Tensor, nn
from torch.distributions import Distribution, Transform

from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.graph.bitsets import Reads
from pyro_bpq.tracing.component_costs import ElementWatch
from pyro_bpq.tracing.cost_statement import cost_options
from pyro_bpq.tracing.ledger import Ledger
from pyro_bpq.tracing.linear_reads import LinearReads
from pyro_bpq.tracing.program_errors import explain_runs, explain_scores
from pyro_bpq.tracing.program_warnings import warn_of_program
from pyro_bpq.tracing.provenance import DependencyTracker
from pyro_bpq.tracing.sandbox import BufferedModules
from pyro_bpq.tracing.traced_run import TracedRun, cost_of_site, full_mask, is_untraced, record_run, total
from pyro_bpq.tracing.watch import HANDED, Attach, Choose, Watch, samples
from pyro_bpq.tracing.work import WorkMode


@dataclass(frozen=True)
class TraceOptions:
    """How programs are run, and what is recorded of the run.

    Args:
        choose: Returns the estimator of a site.
        max_plate_nesting: Bound on the number of nested plates, for Pyro's shape checks.
        num_particles: Number of particles in all runs of the step.
        attach: Returns the estimator in a site's ``infer``, if that estimator attaches a gradient to the site's value.
        track: Whether to track which values depend on which sites.
        noise: Makes the generator that such estimators draw from.
        only_costs: Whether only cost statements count; the guide is then the whole program.
        step: Number of steps taken, for estimators with a schedule.
        components: Whether to also track which components of a site a cost reads.
        sloped: Sites that need the slope of the costs in their value. Their records have autograd leaves of the costs.
        maps: Whether to note the linear maps that read these leaves.
        rows: Whether to look for rows of a plate that meet.
        counts: Whether to count what guide and model compute.
        warns: Whether to warn of what is hardly meant; values that nobody drew may be impossible.
    """

    choose: Choose
    max_plate_nesting: float = math.inf
    num_particles: int = 1
    attach: Attach | None = None
    track: bool = False
    noise: Callable[[], torch.Generator] = torch.Generator
    only_costs: bool = False
    step: int = 0
    components: bool = False
    sloped: frozenset[str] = frozenset()
    maps: bool = False
    rows: bool = False
    counts: bool = False
    warns: bool = True


def trace_run(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: TraceOptions,
) -> TracedRun:
    """Runs the guide, replays the model against it, and records both."""
    track, only_costs, rows, nesting = options.track, options.only_costs, options.rows, options.max_plate_nesting
    components, step, number = options.components and not only_costs, options.step, options.num_particles
    tracker = DependencyTracker() if track else None
    elements = None
    if tracker is not None and (rows or components):
        elements = ElementWatch(tracker, components, rows)
    # The innermost mode: it sees the operators of the programs, not those of the other modes.
    work = WorkMode() if options.counts else None
    watch = Watch(tracker, options.choose, number, options.attach, options.noise, step, elements, options.sloped, work)
    ledger = None if tracker is None else tracker.ledger
    maps = LinearReads(watch.leaves) if options.maps else None
    with contextlib.ExitStack() as stack:
        modules = BufferedModules() if track else None
        for mode in (tracker, None if elements is None else elements.elements, work, maps, watch, modules):
            if mode is not None:
                stack.enter_context(mode)
        with explain_runs(watch, tracker, dict([*enumerate(args), *kwargs.items()])):
            if only_costs:
                model_trace = Trace()
                guide_trace, heard = program_trace(watch.guide(guide), args, kwargs, nesting, ledger)
            else:
                model_trace, guide_trace, heard = importance_traces(
                    model, watch.guide(guide), args, kwargs, nesting, ledger, watch.leaves
                )
        guide_sites, reads, handed = watch.guide_sites(guide_trace), None, frozenset[str]()
        if tracker is not None:
            found = _reads(tracker, guide_sites, watch, heard, True)
            of_model = _reads(tracker, samples(model_trace), watch, heard, False)
            # The lowest bit is not a site: it marks the guide's own values.
            reads = Reads(
                tuple(tracker.ledger.bits)[1:], {cost: bits >> 1 for cost, bits in (found | of_model).items()}
            )
            # A GuideMessenger runs guide and model as one program: the guide hands nothing over.
            handed = frozenset(cost for cost, bits in of_model.items() if bits & watch.handed and watch.has_model)
            handed |= _weighted_by_itself(tracker, samples(model_trace))
        patterns, met = {}, dict[str, tuple[str, ...]]()
        if elements is not None:
            patterns = elements.patterns(_scored(guide_sites, samples(model_trace)))
            if elements.rows is not None:
                met = elements.rows.meeting(_scored(guide_sites, samples(model_trace), user=True))
    escaped = frozenset() if tracker is None else tracker.escaped - {HANDED}
    rng = (watch.model_start, torch.get_rng_state())
    traced = record_run(model_trace, guide_trace, guide_sites, reads, escaped, number, watch.subsamples, rng)
    if not (track or only_costs or watch.enumerated or watch.leaves):
        return traced
    if track and options.warns:
        warn_of_program(samples(model_trace), guide_sites, traced.run.loss, step == 0, bool(watch.enumerated))
    traced = replace(
        traced,
        run=traced.run.with_leaves(watch.leaves),
        enumerated=frozenset(watch.enumerated),
        leaked=escaped & watch.enumerated,
        patterns=patterns,
        crosses=traced.crosses or bool(met),
        met=met,
        handed=handed,
        has_buffers=modules is None or bool(modules),
        maps=() if maps is None else tuple(maps.found),
        work=None if work is None else (watch.guide_work, work.counter.total - watch.guide_work),
    )
    return _only_costs(traced) if only_costs else traced


def _scored(
    guide_sites: Mapping[str, Any], model_sites: Mapping[str, Any], user: bool = False
) -> list[tuple[str, Any]]:
    """Lists the sites whose log-probabilities are costs, by cost name; cost statements only if ``user``."""
    found = [(site, True) for site in guide_sites.values()] + [(site, False) for site in model_sites.values()]
    return [
        (cost_of_site(site, is_guide), site)
        for site, is_guide in found
        if (user or cost_options(site) is None) and not (is_guide and is_untraced(site))
    ]


def _reads(
    tracker: DependencyTracker, sites: Mapping[str, Any], watch: Watch, heard: Heard, is_guide: bool
) -> dict[str, int]:
    """The sources that each site's cost reads, as bits; for a guide site, also the sources of its draw."""
    reads = {}
    for name, site in sites.items():
        # A GuideMessenger runs guide and model as one program: a model site may be noted as the guide's.
        before = watch.escaped.get((is_guide, name), watch.escaped.get((True, name), 0))
        scored = site["score_parts"].score_function if is_untraced(site) else site["log_prob"]
        found = tracker.mask_of(scored) | before | _heard_by(heard, is_guide, name)
        if is_guide:
            found |= tracker.ledger.origins.get(name, 0) | watch.heard.get(name, 0)
        reads[cost_of_site(site, is_guide)] = found
    return reads


def _heard_by(heard: Heard, is_guide: bool, name: str) -> int:
    """The sources that may have steered the log-probability of a site in Python, as bits."""
    return heard.get((is_guide, name), 0)


def _weighted_by_itself(tracker: DependencyTracker, sites: Mapping[str, Any]) -> frozenset[str]:
    """Costs of model sites whose scale or mask reads the site's own value: unknown at other values."""
    bits = tracker.ledger.bits
    return frozenset(
        cost_of_site(site, False)
        for name, site in sites.items()
        if name in bits and tracker.mask_of([site["scale"], full_mask(site)]) & bits[name]
    )


def _only_costs(traced: TracedRun) -> TracedRun:
    """Returns the run with its cost statements as the only costs."""
    for name, site in samples(traced.guide_trace).items():
        if site["is_observed"] and cost_options(site) is None:
            raise UnsupportedProgramError(
                f"Site {name!r} is observed, or a factor, which an expected cost has no place for. Write "
                f"pyro_bpq.cost({name!r}, -log_prob), or use TraceBackpropQ_ELBO, which adds costs to the ELBO."
            )
    costs = total([traced.run.costs[name].sum() for name in traced.user_costs])
    run = replace(traced.run, differentiable=costs, loss=costs.detach())
    return replace(traced, run=run, only_costs=True)


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
