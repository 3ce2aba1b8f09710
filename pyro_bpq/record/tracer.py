r"""Runs guide and model as Pyro does, tracked or not, and records the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pyro
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.infer.enum import get_importance_trace
from pyro.infer.util import is_validation_enabled
from pyro.poutine.guide import GuideMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import prune_subsample_sites
from pyro.util import check_model_guide_match, check_site_shape
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, OneHotCategorical, Transform

from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.graph.bitsets import Reads
from pyro_bpq.record.components import Drawn, Scored, elements_of
from pyro_bpq.record.config import OthersDraw, cost_options
from pyro_bpq.record.function import Recording
from pyro_bpq.record.further import parts_of
from pyro_bpq.record.laws import as_drawn, relaxed_log_prob, unchecked
from pyro_bpq.record.program_errors import explained, of_run, of_scores
from pyro_bpq.record.program_warnings import warn_of_program
from pyro_bpq.record.recorded import Recorded, inputs_in
from pyro_bpq.record.tape import Tape
from pyro_bpq.record.traced_run import (
    PlainRun,
    TracedRun,
    cost_of_site,
    full_mask,
    named,
    plain_run,
    record_run,
)
from pyro_bpq.record.values import Value
from pyro_bpq.record.watch import (
    PARTICLES,
    TraceOptions,
    Watch,
    has_rsample,
    is_enumerated,
    is_untraced,
    plates_of,
    samples,
)
from pyro_bpq.rollout.features import (
    base_distribution,
    batch_of,
    count_components,
    element_log_prob,
    finite_components,
    independent_components,
)
from pyro_bpq.rollout.sums import total

# Modules whose distributions keep a value only in tensors.
_LIBRARIES = ("torch.", "pyro.", "pyro_bpq.")
# Largest depth of nested distributions that is searched.
_DEPTH = 6

Part = Callable[..., Any]
Finish = Callable[[TracedRun], TracedRun]
Sites = Mapping[str, Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

# Sources that may have steered a log-probability in Python, as bits, by name of the cost.
Heard = Mapping[str, int]


def trace_run(
    model: Part, guide: Part, args: Args, kwargs: Kwargs, options: TraceOptions, finish: Finish | None = None
) -> TracedRun:
    """Runs the guide, replays the model against it, and records both.

    ``finish`` makes the costs of the run from its log-probabilities.
    """
    tape = Tape() if options.track else None
    watch = Watch(options, _inputs(args, kwargs), tape)
    with tape or contextlib.nullcontext(), watch:
        program = None if options.only_costs else model
        model_trace, guide_trace, heard = _traces(program, watch, guide, args, kwargs)
        guide_sites, model_sites = watch.guide_sites(guide_trace), samples(model_trace)
        if tape is not None:
            tape.has_ended = True
        traced = _record(watch, model_trace, guide_trace, guide_sites)
        if tape is not None:
            reads = _reads(tape, guide_sites, model_sites, watch, heard)
            traced = replace(traced, reads=Reads(tuple(tape.bits), reads), escaped_sites=tape.escaped)
        traced = traced if finish is None else finish(traced)
        if tape is not None:
            traced = replace(traced, recorded=_recorded(tape, watch, traced, guide_sites, model_sites))
    if options.only_costs:
        traced = _only_costs(traced, options.step == 0)
    if options.track and options.warns:
        warn_of_program(traced, model_sites, guide_sites, not options.has_told and options.step == 0)
    return traced


def run_in_order(model: Part, guide: Part, args: Args, kwargs: Kwargs, options: TraceOptions) -> PlainRun | TracedRun:
    """Runs the guide, and replays the model against it, for a step in program order; untracked."""
    watch = Watch(options, _inputs(args, kwargs))
    with watch:
        model_trace, guide_trace, _ = _traces(model, watch, guide, args, kwargs)
    guide_sites = watch.guide_sites(guide_trace)
    plain = None if watch.attached else plain_run(model_trace, guide_trace, guide_sites)
    return plain or _record(watch, model_trace, guide_trace, guide_sites)


def run_unscored(model: Part, guide: Part, args: Args, kwargs: Kwargs, nesting: float) -> PlainRun | None:
    """Runs the guide, and replays the model against it, as Pyro does; ``None`` if a site has a score."""
    model_trace, guide_trace = get_importance_trace("flat", nesting, model, guide, args, kwargs)
    run = plain_run(model_trace, guide_trace, samples(guide_trace))
    return None if run is None or run.scored else run


def _inputs(args: Args, kwargs: Kwargs) -> dict[int | str, Any]:
    """The arguments of the programs, by position or name."""
    return dict([*enumerate(args), *kwargs.items()])


def _record(watch: Watch, model_trace: Trace, guide_trace: Trace, guide_sites: Sites) -> TracedRun:
    # Truth values and missing ones often switch parts of a program on and off.
    flags = tuple(pair for pair in watch.inputs.items() if any(pair[1] is flag for flag in (None, True, False)))
    run = record_run(model_trace, guide_trace, guide_sites, watch.options.num_particles, watch.subsamples)
    return replace(run, enumerated=frozenset(watch.enumerated), externals=watch.externals, flags=flags)


def _traces(model: Part | None, watch: Watch, guide: Part, args: Args, kwargs: Kwargs) -> tuple[Trace, Trace, Heard]:
    """Traces the guide, and the model replayed against it, with log-probabilities.

    Errors of the programs say where, and what to write.
    """
    nesting, checks = watch.options.max_plate_nesting, is_validation_enabled()
    with explained(of_run, watch):
        given = _run(model, watch, guide, args, kwargs)
        model_trace, guide_trace = map(prune_subsample_sites, given)
        with explained(of_scores, model_trace, guide_trace):
            if model is not None and checks:
                check_model_guide_match(*given, nesting)
            _score_apart(watch, guide_trace, model_trace)
            heard = {**_score(model_trace, False, watch), **_score(guide_trace, True, watch)}
            for site in (*samples(model_trace).values(), *samples(guide_trace).values()) if checks else ():
                check_site_shape(site, nesting)  # type: ignore[arg-type]
    return model_trace, guide_trace, heard


def _run(model: Part | None, watch: Watch, guide: Part, args: Args, kwargs: Kwargs) -> tuple[Trace, Trace]:
    """Traces the guide, and the model replayed against it."""
    messenger = poutine.unwrap(guide)
    if model is not None and isinstance(messenger, Messenger):
        guide(*args, **kwargs)
        watch.where = "model"
        assert isinstance(messenger, GuideMessenger)
        return messenger.get_traces()
    guide_trace = poutine.trace(guide, graph_type="flat").get_trace(*args, **kwargs)
    watch.where = "model"
    if model is None:
        return Trace(), guide_trace
    # Replay hides what the model's own statements say of sites that the guide has drawn.
    is_first = watch.tape is not None or watch.options.step == 0
    checked = OthersDraw("model", "guide", guide_trace, True)(model) if is_first else model
    replayed = poutine.replay(checked, trace=guide_trace)
    return poutine.trace(replayed, graph_type="flat").get_trace(*args, **kwargs), guide_trace


def _score_apart(watch: Watch, *traces: Trace) -> None:
    """On a tape the value that a site's own log-probabilities score is not the one that all else reads.

    So costs have a slope in either. A copy would do, but a view costs nothing.
    """
    for name in watch.drawn:
        sites: list[Any] = [trace.nodes[name] for trace in traces if name in trace.nodes]
        # Of other sites a tensor may say how many values there are.
        fn = sites[0]["fn"] if sites else None
        is_bits = isinstance(base_distribution(fn), (Bernoulli, OneHotCategorical)) and finite_components(fn)
        if (is_bits or count_components(fn)) and sites[0]["value"].is_floating_point():
            # What Python has read since it was drawn plays no part.
            with watch.tape.steered_by(0) if watch.tape else contextlib.nullcontext():
                scored = sites[0]["value"].view_as(sites[0]["value"])
            for site in sites:
                site["value"] = scored


def _score(trace: Trace, is_guide: bool, watch: Watch) -> Heard:
    """Computes the log-probabilities of a trace; on a tape site by site, to record the reads of each."""
    tape, compute = watch.tape, Trace.compute_score_parts if is_guide else Trace.compute_log_prob
    if tape is None:
        compute(trace)
        return {}
    heard, everything = {}, tape.steering
    # A look for numbers that are not finite would be recorded: it comes later.
    with pyro.settings.context(validate_poutine=False):
        for name, site in samples(trace).items():
            one = Trace()
            one.nodes[name] = site
            try:
                with tape.steered_by(watch.steering_of(name, is_guide)):
                    compute(one)
                    found = tape.steering
            except ValueError:
                compute(trace)  # The error shows the shapes of all sites.
                raise
            # A user's own object may have kept any value that has left torch so far; what scores a draw has not.
            may_keep = everything and (site["is_observed"] or not is_guide) and _is_own(site["fn"])
            heard[cost_of_site(site, is_guide)] = found | (everything if may_keep else 0)
    return heard


def _is_own(fn: Any, depth: int = 0) -> bool:
    """Whether a distribution contains a user's own Python code."""
    if isinstance(fn, (list, tuple)):
        return any(_is_own(item, depth + 1) for item in fn)
    if isinstance(fn, (Distribution, Transform, nn.Module)):
        if not type(fn).__module__.startswith(_LIBRARIES) or depth > _DEPTH:
            return True
        return any(_is_own(item, depth + 1) for item in vars(fn).values())
    return callable(fn) and not (getattr(fn, "__module__", None) or "").startswith(_LIBRARIES)


def _recorded(tape: Tape, watch: Watch, traced: TracedRun, guide_sites: Sites, model_sites: Sites) -> Recorded:
    """The recording of a run with the names of its values; the tape must be active."""
    follows = not (traced.enumerated or tape.escaped)
    is_noisy = not all(has_rsample(site) for name, site in guide_sites.items() if name in watch.drawn)
    scored, drawn, laws, values, unweighted = {}, dict[str, Drawn](), {}, dict[Value, Any](), set[str]()
    costs = {name: tape.value_of(cost) for name, cost in traced.run.costs.items()}
    for cost, site, is_guide in named(guide_sites, model_sites):
        if is_untraced(site):
            continue
        is_user, fn = cost_options(site) is not None, site["fn"]
        # A number that scales a cost is no part of what the run does: it may change from run to run.
        plain = site if isinstance(site["scale"], Tensor) else {**site, "scale": 1.0}
        elements, ndim = (site["log_prob"], 0) if is_user or not follows else elements_of(plain)
        scored[cost] = Scored(tape.value_of(elements), ndim, _plates(site))
        is_weighted = is_user or traced.enumerated or tape.mask_of([site["scale"], site["mask"]])
        is_one_hot = isinstance(base_distribution(fn), OneHotCategorical)
        own = None if is_weighted or is_one_hot else site["unscaled_log_prob"]
        if is_one_hot and cost in costs and not (site["is_observed"] or is_enumerated(site)):
            # A linear function of the value, which has a slope.
            own = relaxed_log_prob(fn, site["value"])
            own = scale_and_mask(own, site["scale"], full_mask(site)) if is_weighted else own
        if own is not None:
            costs[cost] = tape.value_of(own if is_guide else -own)
            unweighted.update(() if is_weighted else (cost,))
    for name, value in watch.drawn.items():
        site = guide_sites.get(name)
        if site is None:
            continue
        values[value] = site["value"]
        fn, law, is_pathwise = site["fn"], site["log_prob"], has_rsample(site)
        number = 0 if is_pathwise else independent_components(fn) or 0
        if follows and number > 1:
            law, _ = element_log_prob(unchecked(fn), site["value"])
        read, batch, elements = tape.value_of(site["value"]), batch_of(fn, site["value"]), tape.value_of(law)
        hidden = tape.origins.get(name, 0) & ~tape.masks[elements]
        # Nothing is charged with costs where no site is noisy.
        keeps = not is_pathwise or (is_noisy and hidden)
        plates = {p: dim for p, dim in _plates(site).items() if keeps or (is_noisy and p == PARTICLES)}
        drawn[name] = Drawn(value, read, batch, number, elements, plates, hidden)
        law = site.get("unscaled_log_prob", site["score_parts"].score_function)
        if (bare := as_drawn(fn)) is not fn:
            law = unchecked(bare).log_prob(site["value"])
        laws[name] = tape.value_of(law)
    inputs = inputs_in(tape, watch.options.call, watch.subsamples)
    outside = {key: tape.value_of(own) for key, own in inputs.items()}
    # Parameters that the run has made are among them.
    values.update({outside[key]: own for key, own in inputs.items()})
    own = {name: site["value"] for name, site in traced.guide_trace.nodes.items() if site["type"] == "param"}
    parameters = {name: tape.value_of(value) for name, value in own.items() if isinstance(value, Tensor)}
    # From such runs those of further particles are computed.
    is_one = follows and not (watch.attached or any(PARTICLES in site.plates for site in drawn.values()))
    marked = [own.elements for part in (scored, drawn) for own in part.values()]
    return Recorded(
        recording=Recording.of(tape, values, marked),
        reads=Reads.over(tape.bits, traced.reads or {}),
        self_read=_self_read(tape, model_sites),
        drawn=drawn,
        scored=scored,
        costs=costs,
        unweighted=frozenset(unweighted),
        laws=laws,
        outside=outside,
        parameters=parameters,
        traced=tuple(map(tape.value_of, parts_of(traced.guide_trace, traced.model_trace))) if is_one else (),
        differentiable=tape.value_of(traced.run.differentiable) if is_one else None,
    )


def _self_read(tape: Tape, sites: Sites) -> frozenset[str]:
    """Costs of the model whose law, scale or mask reads the value that it scores."""
    found = set()
    for name, site in sites.items():
        split = None if site["is_observed"] else finite_components(site["fn"])
        if name in tape.bits and split is not None:
            law = [split.parameters(unchecked(site["fn"])), site["scale"], full_mask(site)]
            if tape.mask_of(law) & tape.bits[name]:
                found.add(cost_of_site(site, False))
    return frozenset(found)


def _plates(site: Any) -> dict[str, int]:
    return {frame.name: frame.dim for frame in plates_of(site)}


def _reads(tape: Tape, guide_sites: Sites, model_sites: Sites, watch: Watch, heard: Heard) -> dict[str, int]:
    """The sources that each site's cost reads, as bits; for a guide site, also the sources of its draw."""
    reads = {}
    for cost, site, is_guide in named(guide_sites, model_sites):
        name, scored = site["name"], site["score_parts"].score_function if is_untraced(site) else site["log_prob"]
        # Pyro's traces, and thus what was heard, lack the untraced.
        reads[cost] = tape.mask_of(scored) | heard.get(cost, 0)
        if is_guide:
            # A flow remembers what it drew, so that its log-probability may not look at the value again.
            reads[cost] |= tape.bits.get(name, 0) | tape.origins.get(name, 0) | watch.steering_of(name, True)
    return reads


def _only_costs(traced: TracedRun, is_first: bool) -> TracedRun:
    """Returns the run with its cost statements as the only costs."""
    for name, site in samples(traced.guide_trace).items():
        if site["is_observed"] and cost_options(site) is None and not site["infer"].get("_deterministic"):
            raise UnsupportedProgramError(
                f"Site {name!r} is observed, or a factor, which an expected cost has no place for. Write "
                f"pyro_bpq.cost({name!r}, -log_prob), or use TraceBackpropQ_ELBO, which adds costs to the ELBO."
            )
    if is_first and traced.recorded and not (traced.user_costs or traced.escaped_sites):
        raise UnsupportedProgramError(
            "The program has no cost: an expected cost counts pyro_bpq.cost(name, value) statements only. Write them "
            "where costs arise; or use TraceBackpropQ_ELBO, for which observed sites and factors count."
        )
    costs = total([traced.run.costs[name].sum() for name in traced.user_costs])
    return replace(traced, run=replace(traced.run, differentiable=costs, loss=costs.detach()), only_costs=True)
