r"""Runs Pyro programs and splits what they did into structure (a graph) and tensors (a run)."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions import MaskedDistribution
from pyro.distributions.score_parts import ScoreParts
from pyro.distributions.util import is_identically_zero
from pyro.infer.enum import get_importance_trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from pyro_bpq.config import SiteOptions, site_options
from pyro_bpq.errors import PlateError, SiteNotFoundError, UnsupportedProgramError
from pyro_bpq.estimators.base import Estimator, SiteInfo
from pyro_bpq.features import finite_components
from pyro_bpq.graph import CostNode, Plate, StochasticComputationGraph, StochasticNode
from pyro_bpq.provenance import DependencyTracker
from pyro_bpq.rollout import Run, SiteRecord

__all__ = [
    "PARTICLES",
    "TracedRun",
    "build_graph",
    "cost_of_guide",
    "cost_of_model",
    "dense_graph",
    "trace_run",
]

# Pyro's name of the plate of vectorised particles.
PARTICLES = "num_particles_vectorized"

# Chooses the estimator of a site.
Choose = Callable[[SiteInfo, SiteOptions], Estimator]


def cost_of_guide(site: str) -> str:
    """Name of the cost ``log q`` of a guide site."""
    return f"log q({site})"


def cost_of_model(site: str) -> str:
    """Name of the cost ``-log p`` of a model site."""
    return f"-log p({site})"


@dataclass(frozen=True)
class TracedRun:
    """What one run of guide and model did.

    Args:
        key: What can be seen of its structure without tracking; equal keys mean the same sites, plates,
            kinds of distributions and options in the same order.
        run: Its tensors.
        reads: What every latent site and cost reads: latent sites, by name; ``None`` if not tracked.
        escaped: Whether a sampled value left torch.
        crosses: Whether one of them was sampled in a plate, so that its rows may have met.
        plate_sizes: Size of each vectorised plate.
        infos: What is known of every latent site.
        options: Options of every latent site.
        model_trace: The model's trace, for a replay.
        guide_trace: The guide's trace.
        subsamples: Indices that subsampled plates drew, by name of the plate.
        rng: State of the global generator before and after the run of the model.
        batch_ndim: Largest number of batch dimensions of any site.
        untraced: Latent sites of the guide that Pyro leaves out of its traces: ``log q`` is no cost.
    """

    key: tuple[Any, ...]
    run: Run
    reads: Mapping[str, frozenset[str]] | None
    escaped: bool
    crosses: bool
    plate_sizes: Mapping[Plate, int]
    infos: Mapping[str, SiteInfo]
    options: Mapping[str, SiteOptions]
    model_trace: Any
    guide_trace: Any
    subsamples: Mapping[str, Any]
    rng: tuple[Tensor, Tensor]
    batch_ndim: int
    untraced: frozenset[str] = frozenset()

    @property
    def plate_ndim(self) -> int:
        """Number of plate dimensions."""
        return max((-plate.dim for plate in self.plate_sizes), default=0)


class _Watch(Messenger):  # type: ignore[misc]
    """Notes at every sample statement what has left torch so far; hands out tracked values.

    It must be the outermost handler, so that the traces record the values that it hands out.

    Args:
        tracker: The tracker, or ``None``.
        choose: Gives the estimator of a site.
        particles: Number of particles of the step.
    """

    def __init__(self, tracker: DependencyTracker | None, choose: Choose, particles: int) -> None:
        super().__init__()
        self.tracker, self.choose, self.particles = tracker, choose, particles
        self.is_guide = False
        self.escaped: dict[tuple[bool, str], frozenset[str]] = {}
        self.subsamples: dict[str, Any] = {}
        self.model_start = torch.get_rng_state()
        self.plates: dict[str, tuple[Any, ...]] = {}
        self.drawn: list[str] = []
        self.untraced: dict[str, dict[str, Any]] = {}

    def guide(self, guide: Callable[..., Any]) -> Callable[..., Any]:
        """The guide, whose draws become sources."""
        # A partial of this form is what Pyro looks through when it tells whether a guide is a GuideMessenger.
        return functools.partial(_run_guide, self, guide)

    def _pyro_sample(self, msg: Any) -> None:
        if self.tracker is not None:
            self.escaped[self.is_guide, msg["name"]] = self.tracker.escaped
        if not self.is_guide or msg["is_observed"] or not getattr(msg["fn"], "has_rsample", False):
            return
        info = _info(msg, (), self.particles)
        if not self.choose(info, site_options(msg["name"], msg["infer"])).is_pathwise:
            msg["fn"] = _without_rsample(msg["fn"])

    def _pyro_post_sample(self, msg: Any) -> None:
        if isinstance(msg["fn"], _Subsample):
            self.subsamples[msg["name"]] = msg["value"]
            return
        self.plates[msg["name"]] = tuple(frame for frame in msg["cond_indep_stack"] if frame.vectorized)
        if not self.is_guide or msg["is_observed"]:
            return
        self.drawn.append(msg["name"])
        score = None
        if msg["infer"].get("_do_not_trace"):
            score = _score_of_untraced(msg)
            if score is None:
                return
        if self.tracker is not None and isinstance(msg["value"], Tensor):
            msg["value"] = self.tracker.source(msg["name"], msg["value"])
        if score is not None:
            self._keep(msg, score)

    def _keep(self, msg: Any, score: Tensor) -> None:
        """Notes a site that Pyro leaves out of its traces, but on whose value later costs depend."""
        name, zero = msg["name"], torch.zeros_like(score)
        if name in self.untraced:
            raise UnsupportedProgramError(
                f'Site {name!r} has infer={{"_do_not_trace": True}} and is sampled twice; give each a name of its own.'
            )
        parts = ScoreParts(zero, score, torch.zeros(()))
        self.untraced[name] = {**msg, "log_prob": zero, "log_prob_sum": zero.sum(), "score_parts": parts}

    def guide_sites(self, trace: Any) -> dict[str, Any]:
        """The sites of the guide's trace, and those that Pyro left out of it, in the order of their draws."""
        sites = _samples(trace)
        if not self.untraced:
            return sites
        order = {name: i for i, name in enumerate(self.drawn)}
        merged = {**sites, **self.untraced}
        return {name: merged[name] for name in sorted(merged, key=lambda name: order.get(name, len(order)))}


def _score_of_untraced(msg: Any) -> Tensor | None:
    """``log q`` of a site that Pyro leaves out of its traces; ``None`` where its value carries all gradients."""
    if not torch.is_grad_enabled() or not isinstance(msg["value"], Tensor):
        return None
    score: Any = msg["fn"].score_parts(msg["value"]).score_function
    return None if is_identically_zero(score) else score


def _run_guide(watch: _Watch, guide: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    watch.is_guide = True
    try:
        return guide(*args, **kwargs)
    finally:
        watch.is_guide = False
        watch.model_start = torch.get_rng_state()


def _plate_error(error: ValueError, plates: Mapping[str, tuple[Any, ...]]) -> PlateError | None:
    """What Pyro says about shapes that do not fit, with the plates of the sites that it names."""
    text = str(error)
    if not any(words in text for words in ("invalid log_prob shape", "disagree at site", "inside plate(")):
        return None
    named = {site: frames for site, frames in plates.items() if f"'{site}'" in text or f'"{site}"' in text}
    lines = [
        f"Site {site!r} is in the plates {[(f.name, f.dim, f.size) for f in frames]} (name, dim, size)."
        for site, frames in named.items()
    ]
    return PlateError("\n".join([text, *lines]))


def _without_rsample(fn: Any) -> Any:
    fn = copy.copy(fn)
    if hasattr(fn, "base_dist"):
        fn.base_dist = _without_rsample(fn.base_dist)
    else:
        fn.has_rsample = False
    return fn


def trace_run(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    max_plate_nesting: float,
    choose: Choose,
    num_particles: int = 1,
    track: bool = False,
) -> TracedRun:
    """Runs the guide, replays the model against it, and records both.

    Args:
        model: The model.
        guide: The guide.
        args: Their arguments.
        kwargs: Their keyword arguments.
        max_plate_nesting: Bound on the number of nested plates, for Pyro's shape checks.
        choose: Gives the estimator of a site.
        num_particles: Number of particles in all runs of the step.
        track: Whether to track which values depend on which.

    Returns:
        The traced run.

    Raises:
        SiteNotFoundError: If the model has a latent site that the guide lacks.
        PlateError: If shapes do not fit plates, or those of guide and model differ.
    """
    tracker = DependencyTracker() if track else None
    watch = _Watch(tracker, choose, num_particles)
    with tracker if tracker is not None else contextlib.nullcontext(), watch:
        try:
            model_trace, guide_trace = get_importance_trace(
                "flat", max_plate_nesting, model, watch.guide(guide), args, kwargs
            )
        except ValueError as error:
            raise _plate_error(error, watch.plates) or error from error
        guide_sites, reads = watch.guide_sites(guide_trace), None
        if tracker is not None:
            reads = _reads(tracker, guide_sites, watch.escaped, True)
            reads |= _reads(tracker, _samples(model_trace), watch.escaped, False)
    escaped = frozenset() if tracker is None else tracker.escaped
    rng = (watch.model_start, torch.get_rng_state())
    return _record(model_trace, guide_trace, guide_sites, reads, escaped, num_particles, watch.subsamples, rng)


def _reads(
    tracker: DependencyTracker,
    sites: Mapping[str, Any],
    escaped: Mapping[tuple[bool, str], frozenset[str]],
    is_guide: bool,
) -> dict[str, frozenset[str]]:
    """What the cost of each site of a trace reads; of a guide's latent also what its draw was made from."""
    reads = {}
    for name, site in sites.items():
        # A GuideMessenger runs guide and model as one.
        before = escaped.get((is_guide, name), escaped.get((True, name), frozenset()))
        scored = site["score_parts"].score_function if _is_untraced(site) else site["log_prob"]
        found = tracker.sources_of(scored) | before
        if is_guide:
            found |= tracker.origins_of(name)
        reads[cost_of_guide(name) if is_guide else cost_of_model(name)] = found
    return reads


def _record(
    model_trace: Any,
    guide_trace: Any,
    guide_sites: Mapping[str, Any],
    reads: Mapping[str, frozenset[str]] | None,
    escaped: frozenset[str],
    particles: int,
    subsamples: Mapping[str, Any],
    rng: tuple[Tensor, Tensor],
) -> TracedRun:
    sizes: dict[Plate, int] = {}
    options, infos, sites, costs = {}, {}, {}, {}
    key: list[Any] = []
    untraced: list[str] = []
    model_sites = _samples(model_trace)
    for name, site in guide_sites.items():
        plates = _plates(site, sizes)
        costs[cost_of_guide(name)] = site["log_prob"]
        chosen = None
        if not site["is_observed"]:
            infos[name] = info = _info(site, plates, particles)
            options[name] = chosen = site_options(name, site["infer"])
            if _is_untraced(site):
                untraced.append(name)
            sites[name] = _site(site, model_sites.get(name), chosen, info)
        kind = type(site["fn"])
        split = infos[name].components if name in infos else None
        key.append((name, plates, tuple(site["fn"].event_shape), kind, split, _fingerprint(chosen), _is_untraced(site)))
    for name, site in model_sites.items():
        if name not in sites and not site["is_observed"]:
            raise SiteNotFoundError(
                f"The model's latent site {name!r} has no counterpart in the guide, whose latent sites are "
                f'{list(sites)}; write pyro.sample("{name}", ...) in the guide, or observe it in the model.'
            )
        costs[cost_of_model(name)] = -site["log_prob"]
        key.append((name, _plates(site, sizes), tuple(site["fn"].event_shape), site["is_observed"]))
    everything = [*guide_sites.values(), *model_sites.values()]
    differentiable, loss = _sums(guide_sites, model_sites)
    run = Run(sites, costs, differentiable, loss)
    ndim = max((site["log_prob"].dim() for site in everything), default=0)
    return TracedRun(
        key=tuple(key),
        run=run,
        reads=reads,
        escaped=bool(escaped),
        crosses=any(infos[name].plates for name in escaped if name in infos),
        plate_sizes=sizes,
        infos=infos,
        options=options,
        model_trace=model_trace,
        guide_trace=guide_trace,
        subsamples=subsamples,
        rng=rng,
        batch_ndim=ndim,
        untraced=frozenset(untraced),
    )


def _is_untraced(site: Any) -> bool:
    return bool(site["infer"].get("_do_not_trace"))


def _samples(trace: Any) -> dict[str, Any]:
    return {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}


def _sums(guide_sites: Mapping[str, Any], model_sites: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The costs through which pathwise gradients flow, and the loss."""
    guide_sum = _sum([site["log_prob_sum"].detach() for site in guide_sites.values()])
    model_sum = _sum([site["log_prob_sum"] for site in model_sites.values()])
    # A factor of the guide is a cost; of the other sites only what has a gradient in expectation.
    terms = {
        name: site["log_prob"] if site["is_observed"] else site["score_parts"].entropy_term
        for name, site in guide_sites.items()
    }
    entropy = _sum([term.sum() for term in terms.values() if not is_identically_zero(term)])
    return entropy - model_sum, guide_sum - model_sum.detach()


def _sum(terms: list[Tensor]) -> Tensor:
    if not terms:
        return torch.zeros(())
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


def _plates(site: Any, sizes: dict[Plate, int]) -> tuple[Plate, ...]:
    """The vectorised plates of a site but for that of the particles."""
    plates = []
    for frame in site["cond_indep_stack"]:
        if frame.vectorized and frame.name != PARTICLES:
            plate, size = Plate(frame.name, frame.dim), frame.size
            if size < 0:
                # pyro.plate("rows") without a size broadcasts nothing: a site is in it as far as its shape says so.
                shape = site["log_prob"].shape
                size = shape[frame.dim] if -frame.dim <= len(shape) else 1
                if size == 1:
                    continue
            sizes[plate] = size
            plates.append(plate)
    return tuple(sorted(plates)) if len(plates) > 1 else tuple(plates)


def _info(site: Any, plates: tuple[Plate, ...], particles: int) -> SiteInfo:
    fn = site["fn"]
    return SiteInfo(
        name=site["name"],
        distribution=_distribution_name(fn),
        has_rsample=bool(getattr(fn, "has_rsample", False)),
        components=finite_components(fn),
        num_particles=particles,
        plates=tuple(plate.name for plate in plates),
    )


def _distribution_name(fn: Any) -> str:
    wrappers = ("Independent", "MaskedDistribution", "ExpandedDistribution")
    while hasattr(fn, "base_dist") and type(fn).__name__ in wrappers:
        fn = fn.base_dist
    return type(fn).__name__


def _site(site: Any, prior: Any, options: SiteOptions, info: SiteInfo) -> SiteRecord:
    score = site["score_parts"].score_function
    baseline = None
    if options.baseline is not None:
        baseline = functools.partial(options.baseline.predict, info.name, site["log_prob"].shape)
    return SiteRecord(
        fn=site["fn"],
        value=site["value"],
        score=None if is_identically_zero(score) else score,
        scale=site["scale"],
        mask=_mask(site),
        prior=None if prior is None else prior["fn"],
        prior_scale=1.0 if prior is None else prior["scale"],
        prior_mask=None if prior is None else _mask(prior),
        context=options.context,
        baseline=baseline,
    )


def _mask(site: Any) -> Tensor | bool | None:
    """The mask of a site, that of its distribution included."""
    fn, mask = site["fn"], site["mask"]
    while isinstance(fn, MaskedDistribution):
        mask, fn = fn._mask if mask is None else torch.as_tensor(mask) & torch.as_tensor(fn._mask), fn.base_dist
    return mask


def _fingerprint(options: SiteOptions | None) -> tuple[Any, ...] | None:
    if options is None:
        return None
    width = None if options.context is None else options.context.shape[-1]
    baseline = None if options.baseline is None else options.baseline.estimator()
    return (options.estimator, options.critic, options.share, width, baseline)


def dense_graph(traced: TracedRun) -> StochasticComputationGraph:
    """The graph in which every site reads every earlier one, and every cost of the model all of them.

    It is a superset of any graph that the program can have: right whatever the program does, at the
    price of more variance.
    """
    earlier: list[str] = []
    reads: dict[str, frozenset[str]] = {}
    for cost in traced.run.costs:
        name = _guide_site(cost, traced)
        if name is not None:
            earlier.append(name)
        reads[cost] = frozenset(earlier)
    return build_graph(traced, reads)


def _guide_site(cost: str, traced: TracedRun) -> str | None:
    name = cost[len("log q(") : -1]
    return name if cost.startswith("log q(") and name in traced.run.sites else None


def build_graph(traced: TracedRun, reads: Mapping[str, frozenset[str]]) -> StochasticComputationGraph:
    """The graph of a run whose sites and costs read what ``reads`` says.

    Args:
        traced: The run.
        reads: For each cost the latent sites that it reads; a site's parents are what its ``log q`` reads.

    Returns:
        The graph: stochastic nodes in the guide's order, costs of the guide, then of the model.
    """
    order = {name: i for i, name in enumerate(traced.run.sites)}
    plates = {entry[0]: entry[1] for entry in reversed(traced.key)}
    nodes = []
    for name in order:
        parents = sorted(reads[cost_of_guide(name)] - {name}, key=order.__getitem__)
        nodes.append(StochasticNode(name, tuple(parents), plates[name], traced.infos[name].has_rsample))
    costs = []
    for (name, where, *_), cost in zip(traced.key, traced.run.costs, strict=True):
        site = _guide_site(cost, traced)
        members = reads[cost] | {site} if site is not None else reads[cost]
        costs.append(CostNode(cost, tuple(sorted(members, key=order.__getitem__)), where, name))
    return StochasticComputationGraph(tuple(nodes), tuple(costs))
