r"""Runs guide and model as Pyro does, tracked or not, and records the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from pyro_bpq.tracing.config import OthersDraw, cost_options
from pyro_bpq.tracing.guide_warnings import ParameterReads
from pyro_bpq.tracing.ledger import Ledger
from pyro_bpq.tracing.linear_reads import LinearReads
from pyro_bpq.tracing.plain_values import flags_of
from pyro_bpq.tracing.program_errors import EXPLAINED, explain_run, explain_scores, warn_of_program
from pyro_bpq.tracing.provenance import DependencyTracker
from pyro_bpq.tracing.sandbox import BufferedModules
from pyro_bpq.tracing.traced_run import (
    PlainRun,
    TracedRun,
    cost_of_site,
    full_mask,
    plain_run,
    record_run,
    total,
)
from pyro_bpq.tracing.watch import HANDED, TraceOptions, Watch, carried, is_untraced, samples
from pyro_bpq.tracing.work import WorkMode

# Modules whose distributions keep a value only in tensors.
_LIBRARIES = ("torch.", "pyro.", "pyro_bpq.")
# Largest depth of nested distributions that is searched.
_DEPTH = 6

Part = Callable[..., Any]
Sites = Mapping[str, Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

Heard = Mapping[tuple[bool, str], int]
"""Sources that may have steered a log-probability in Python, as bits, by (is of the guide, site name)."""


def trace_run(model: Part, guide: Part, args: Args, kwargs: Kwargs, options: TraceOptions) -> TracedRun:
    """Runs the guide, replays the model against it, and records both."""
    tracker = DependencyTracker() if options.track else None
    components, elements = options.components and not options.only_costs, None
    if tracker is not None and (options.rows or components):
        elements = ElementWatch(tracker, components, options.rows)
    work = WorkMode() if options.counts else None
    is_first = options.track and options.warns and options.step == 0 and not options.has_told
    parameters = ParameterReads() if is_first else None
    watch = Watch(options, tracker, elements, work, parameters)
    maps = LinearReads(watch.leaves) if options.maps else None
    modules = BufferedModules() if options.track else None
    # The counter of work is the innermost mode: it does not see the operators of the others.
    modes = (parameters, tracker, None if elements is None else elements.elements, work, maps, watch, modules)
    with contextlib.ExitStack() as stack:
        for mode in modes:
            if mode is not None:
                stack.enter_context(mode)
        program = None if options.only_costs else model
        model_trace, guide_trace, heard = _explained_traces(program, watch, guide, args, kwargs)
        guide_sites, model_sites = watch.guide_sites(guide_trace), samples(model_trace)
        tracked = {} if tracker is None else _tracked(tracker, watch, guide_sites, model_sites, heard)
    traced = _record(watch, model_trace, guide_trace, guide_sites, args, kwargs)
    if options.only_costs and options.step == 0 and tracked and not (traced.user_costs or tracked["escaped_sites"]):
        raise UnsupportedProgramError(
            "The program has no cost: an expected cost counts pyro_bpq.cost(name, value) statements only. Write them "
            "where costs arise; or use TraceBackpropQ_ELBO, for which observed sites and factors count."
        )
    if not (options.track or options.only_costs or watch.enumerated or watch.leaves):
        return traced
    in_plates = {name for name, info in traced.infos.items() if info.plates}
    traced = replace(
        traced,
        **tracked,
        run=traced.run.with_leaves(watch.leaves),
        enumerated=frozenset(watch.enumerated),
        crosses=bool(tracked.get("met") or in_plates & tracked.get("escaped_sites", set())),
        has_buffers=modules is None or bool(modules),
        maps=() if maps is None else tuple(maps.found),
        work=None if work is None else (watch.guide_work, work.total - watch.guide_work),
    )
    if options.track and options.warns:
        warn_of_program(traced, model_sites, guide_sites, parameters)
    return _only_costs(traced) if options.only_costs else traced


def run_in_order(model: Part, guide: Part, args: Args, kwargs: Kwargs, options: TraceOptions) -> PlainRun | TracedRun:
    """Runs the guide, and replays the model against it, for a step in program order; untracked."""
    watch = Watch(options)
    with watch:
        model_trace, guide_trace, _ = _explained_traces(model, watch, guide, args, kwargs)
    guide_sites = watch.guide_sites(guide_trace)
    plain = None if watch.attached else plain_run(model_trace, guide_trace, guide_sites)
    return plain or _record(watch, model_trace, guide_trace, guide_sites, args, kwargs)


def _record(
    watch: Watch, model_trace: Trace, guide_trace: Trace, guide_sites: Sites, args: Args, kwargs: Kwargs
) -> TracedRun:
    rng, number = (watch.model_start, torch.get_rng_state()), watch.options.num_particles
    flags = flags_of(args, kwargs)
    return record_run(model_trace, guide_trace, guide_sites, number, watch.subsamples, rng, flags)


def _explained_traces(
    model: Part | None, watch: Watch, guide: Part, args: Args, kwargs: Kwargs
) -> tuple[Trace, Trace, Heard]:
    """The same as :func:`importance_traces`; errors of the programs say where, and what to write."""
    try:
        return importance_traces(model, watch, guide, args, kwargs)
    except EXPLAINED as error:
        explain_run(error, watch, dict([*enumerate(args), *kwargs.items()]))
        raise


def importance_traces(
    model: Part | None, watch: Watch, guide: Part, args: Args, kwargs: Kwargs
) -> tuple[Trace, Trace, Heard]:
    """Traces the guide, and the model replayed against it, with log-probabilities.

    The log-probability of a site whose value is an autograd leaf takes the plain value. So only what the programs
    compute from the value has a gradient to the leaf.
    """
    nesting, guide = watch.options.max_plate_nesting, watch.guide(guide)
    ledger = None if watch.tracker is None else watch.tracker.ledger
    messenger = poutine.unwrap(guide)
    if model is not None and isinstance(messenger, Messenger):
        guide(*args, **kwargs)
        assert isinstance(messenger, GuideMessenger)
        model_trace, guide_trace = messenger.get_traces()
    else:
        guide_trace, model_trace = poutine.trace(guide, graph_type="flat").get_trace(*args, **kwargs), Trace()
        if model is not None:
            # Replay hides what the model's own statements say of sites that the guide has drawn.
            is_first = watch.tracker is not None or watch.options.step == 0
            checked = OthersDraw("model", "guide", guide_trace, True)(model) if is_first else model
            replayed = poutine.replay(checked, trace=guide_trace)
            model_trace = poutine.trace(replayed, graph_type="flat").get_trace(*args, **kwargs)
    given = model_trace, guide_trace
    try:
        if model is not None and is_validation_enabled():
            check_model_guide_match(model_trace, guide_trace, nesting)
        guide_trace, model_trace = prune_subsample_sites(guide_trace), prune_subsample_sites(model_trace)
        for trace in (guide_trace, model_trace) if model is not None else ():
            for name in trace.nodes.keys() & watch.leaves.keys():
                trace.nodes[name]["value"] = trace.nodes[name]["value"].detach()  # type: ignore[union-attr]
        heard = {
            **_score(model_trace, Trace.compute_log_prob, False, ledger),
            **_score(guide_trace, Trace.compute_score_parts, True, ledger),
        }
        if is_validation_enabled():
            for site in (*samples(model_trace).values(), *samples(guide_trace).values()):
                check_site_shape(site, nesting)  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        explain_scores(error, *given)
        raise
    return model_trace, guide_trace, heard


def _score(trace: Trace, compute: Callable[[Trace], None], is_guide: bool, ledger: Ledger | None) -> Heard:
    """Computes the log-probabilities of a trace; with a ledger, site by site, to record the reads of each."""
    if ledger is None:
        compute(trace)
        return {}
    heard = {}
    for name, site in samples(trace).items():
        one = Trace()
        one.nodes[name] = site
        ledger.listen()
        try:
            compute(one)
        except ValueError:
            # The whole trace is computed again, so that the error message shows the shapes of all sites.
            compute(trace)
            raise
        found = ledger.stop_listening()
        # A user's own object may have kept any value that has left torch so far.
        heard[is_guide, name] = found | (ledger.escaped if ledger.escaped and _is_own(site["fn"]) else 0)
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


def _tracked(
    tracker: DependencyTracker, watch: Watch, guide_sites: Sites, model_sites: Sites, heard: Heard
) -> dict[str, Any]:
    """What the handlers of a tracked run know, as fields of its record; the handlers must be active."""
    of_guide = _reads(tracker, guide_sites, watch, heard, True)
    of_model = _reads(tracker, model_sites, watch, heard, False)
    # The lowest bit is not a site: it marks the guide's own values.
    bits = {cost: found >> 1 for cost, found in (of_guide | of_model).items()}
    # A GuideMessenger runs guide and model as one program: the guide hands nothing over.
    handed = frozenset(cost for cost, found in of_model.items() if found & watch.handed and watch.has_model)
    handed |= _weighted_by_itself(tracker, model_sites)
    # So does the log-probability of a value that carries more than its site's value shows.
    handed |= {cost_of_site(site, False) for site in model_sites.values() if carried(site["value"])}
    found: dict[str, Any] = {"reads": Reads(tuple(tracker.ledger.bits)[1:], bits), "handed": handed}
    elements = watch.elements
    if elements is not None:
        scored, log_probs = _scored(guide_sites, model_sites, True), _scored(guide_sites, model_sites)
        found["patterns"] = elements.patterns(log_probs)
        if elements.rows is not None and elements.particles is not None:
            found["met"] = elements.rows.meeting(scored)
            found["unfollowed"] = elements.rows.unfollowed(log_probs)
            found["mixes"] = bool(elements.particles.meeting(scored))
    found["escaped_sites"] = tracker.escaped - {HANDED}
    return found


def _reads(tracker: DependencyTracker, sites: Sites, watch: Watch, heard: Heard, is_guide: bool) -> dict[str, int]:
    """The sources that each site's cost reads, as bits; for a guide site, also the sources of its draw."""
    reads = {}
    for name, site in sites.items():
        # A GuideMessenger runs guide and model as one program: a model site may be noted as the guide's.
        before = watch.escaped.get((is_guide, name), watch.escaped.get((True, name), 0))
        scored = site["score_parts"].score_function if is_untraced(site) else site["log_prob"]
        found = tracker.mask_of(scored) | before | heard.get((is_guide, name), 0)
        if is_guide:
            found |= tracker.ledger.origins.get(name, 0) | watch.heard.get(name, 0)
            # A flow remembers what it drew, so that its log-probability may not look at the value again.
            found |= tracker.ledger.bits.get(name, 0)
        reads[cost_of_site(site, is_guide)] = found
    return reads


def _weighted_by_itself(tracker: DependencyTracker, sites: Sites) -> frozenset[str]:
    """Costs of model sites whose scale or mask reads the site's own value: unknown at other values."""
    bits = tracker.ledger.bits
    return frozenset(
        cost_of_site(site, False)
        for name, site in sites.items()
        if name in bits and tracker.mask_of([site["scale"], full_mask(site)]) & bits[name]
    )


def _scored(guide_sites: Sites, model_sites: Sites, user: bool = False) -> list[tuple[str, Any]]:
    """Lists the sites whose log-probabilities are costs, by cost name; cost statements only if ``user``."""
    found = [(site, True) for site in guide_sites.values()] + [(site, False) for site in model_sites.values()]
    return [
        (cost_of_site(site, is_guide), site)
        for site, is_guide in found
        if (user or cost_options(site) is None) and not (is_guide and is_untraced(site))
    ]


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
